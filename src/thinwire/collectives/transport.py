"""How bytes reach the peers: the small interface below every collective, and torch's groups as one of it.

A transport moves uint8 tensors whose sizes both ends know. It is asynchronous: every call returns a
:class:`Pending` at once; calls of collective kind are made in the same order on every rank, send and recv
in the same order on both ends of a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from ..errors import PeerError
from .streams import Ends, Streams
from .traffic import Tally


class Pending(Protocol):
    """A transfer that has been started. The buffers belong to it until ``wait`` returns."""

    def wait(self) -> None:
        """Return when the transfer is done; raise PeerError if a peer was lost or the time is up."""


class Transport(Protocol):
    """Bytes to peers. ``rank`` and ``size`` are those of the group."""

    rank: int
    size: int

    def all_to_all(
        self, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        """Send ``in_splits[p]`` bytes of inp to each rank p, receive ``out_splits[p]`` bytes from it."""

    def all_gather(self, out: Tensor, inp: Tensor) -> Pending:
        """``out`` (size * n bytes) becomes every rank's ``inp`` (n bytes, the same n everywhere)."""

    def broadcast(self, buffer: Tensor, src: int) -> Pending:
        """``buffer`` becomes that of rank ``src``."""

    def send(self, buffer: Tensor, dst: int) -> Pending:
        """Send ``buffer`` to rank ``dst``."""

    def recv(self, buffer: Tensor, src: int) -> Pending:
        """Receive exactly ``buffer.numel()`` bytes from rank ``src``."""


class _TorchPending:
    def __init__(self, start: Callable[[], dist.Work | None], what: str) -> None:
        self._what = what
        with self._lost_peer():
            self._work = start()

    def wait(self) -> None:
        if self._work is not None:
            with self._lost_peer():
                self._work.wait()

    @contextmanager
    def _lost_peer(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            raise PeerError(f"{self._what} failed: {e}") from e


class TorchTransport:
    """A ``torch.distributed`` process group (gloo, NCCL) as a transport.

    The group must be used for nothing else by other threads: the order of its collectives is the order of
    the calls here.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def all_to_all(
        self, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        # alltoall_base and _allgather_base: the names that 2.11 and 2.13 share.
        return _TorchPending(
            lambda: self._group.alltoall_base(out, inp, list(out_splits), list(in_splits)),
            f"all_to_all among {self.size} ranks",
        )

    def all_gather(self, out: Tensor, inp: Tensor) -> Pending:
        return _TorchPending(
            lambda: self._group._allgather_base(out, inp),
            f"all_gather among {self.size} ranks",
        )

    def broadcast(self, buffer: Tensor, src: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = src
        return _TorchPending(lambda: self._group.broadcast([buffer], options), f"broadcast from rank {src}")

    def send(self, buffer: Tensor, dst: int) -> Pending:
        return _TorchPending(lambda: self._group.send([buffer], dst, 0), f"send to rank {dst}")

    def recv(self, buffer: Tensor, src: int) -> Pending:
        return _TorchPending(lambda: self._group.recv([buffer], src, 0), f"recv from rank {src}")


class Metered:
    """A transport for one call of a collective: it counts the bytes sent and the time waited.

    ends: what stateful codecs remember of such calls; None: nothing, each call begins anew. checksum: the frames that
    are sent carry a checksum of their payload.
    """

    def __init__(
        self, inner: Transport, tally: Tally, ends: Ends | None = None, *, checksum: bool = False
    ) -> None:
        self._inner = inner
        self.tally = tally
        self.checksum = checksum
        self.rank = inner.rank
        self.size = inner.size
        self.ends = ends if ends is not None else Ends(Streams(), inner.rank, "")

    def all_to_all(
        self, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        self.tally.wire_bytes += sum(in_splits) - in_splits[self.rank]
        return self._timed(self._inner.all_to_all(out, inp, out_splits, in_splits))

    def all_gather(self, out: Tensor, inp: Tensor) -> Pending:
        self.tally.wire_bytes += inp.numel() * (self.size - 1)
        return self._timed(self._inner.all_gather(out, inp))

    def broadcast(self, buffer: Tensor, src: int) -> Pending:
        # A tree: every rank but the root receives the buffer once; who sends it is the transport's choice.
        self.tally.wire_bytes += buffer.numel() * (self.size - 1) // self.size
        return self._timed(self._inner.broadcast(buffer, src))

    def send(self, buffer: Tensor, dst: int) -> Pending:
        self.tally.wire_bytes += buffer.numel()
        return self._timed(self._inner.send(buffer, dst))

    def recv(self, buffer: Tensor, src: int) -> Pending:
        return self._timed(self._inner.recv(buffer, src))

    def _timed(self, pending: Pending) -> Pending:
        return _TimedPending(pending, self.tally)


class _TimedPending:
    def __init__(self, pending: Pending, tally: Tally) -> None:
        self._pending = pending
        self._tally = tally

    def wait(self) -> None:
        with self._tally.waiting():
            self._pending.wait()

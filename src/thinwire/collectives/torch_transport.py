"""A ``torch.distributed`` process group (gloo, NCCL) as a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerError
from .rounds import Rounds, pairs_in_rounds
from .transport import Exchange, Pending

# Messages of rounds and of send and recv, which other threads start, must not be taken for each other.
_SINGLE_TAG, _ROUNDS_TAG = 0, 1


class _TorchPending:
    def __init__(self, start: Callable[[], dist.Work | None], what: str) -> None:
        self._what = what
        with self._lost_peer():
            self._work = start()

    def wait(self) -> None:
        if self._work is not None:
            with self._lost_peer():
                self._work.wait()
            self._work = None

    def wait_for(self, peer: int) -> None:
        self.wait()

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
        self._rounds = Rounds()

    def all_to_all(
        self,
        out: Tensor,
        inp: Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        *,
        in_rounds: bool = False,
    ) -> Exchange:
        if in_rounds and inp.device.type == "cpu":
            return self._in_rounds(torch.split(out, list(out_splits)), torch.split(inp, list(in_splits)))
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

    def _in_rounds(self, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> Exchange:
        return pairs_in_rounds(
            self._rounds,
            self.rank,
            outs,
            ins,
            lambda buffer, src: self._recv(buffer, src, _ROUNDS_TAG),
            lambda buffer, dst: self._send(buffer, dst, _ROUNDS_TAG),
        )

    def broadcast(self, buffer: Tensor, src: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = src
        return _TorchPending(lambda: self._group.broadcast([buffer], options), f"broadcast from rank {src}")

    def send(self, buffer: Tensor, dst: int) -> Pending:
        return self._send(buffer, dst, _SINGLE_TAG)

    def recv(self, buffer: Tensor, src: int) -> Pending:
        return self._recv(buffer, src, _SINGLE_TAG)

    def _send(self, buffer: Tensor, dst: int, tag: int) -> Pending:
        return _TorchPending(lambda: self._group.send([buffer], dst, tag), f"send to rank {dst}")

    def _recv(self, buffer: Tensor, src: int, tag: int) -> Pending:
        return _TorchPending(lambda: self._group.recv([buffer], src, tag), f"recv from rank {src}")

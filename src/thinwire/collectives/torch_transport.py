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

# Beyond those of callers: messages of other threads, or in another order, must not be taken for each other.
_ROUNDS_TAG = 16


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
            lambda buffer, src: self.recv(buffer, src, _ROUNDS_TAG),
            lambda buffer, dst: self.send(buffer, dst, _ROUNDS_TAG),
        )

    def broadcast(self, buffer: Tensor, src: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = src
        return _TorchPending(lambda: self._group.broadcast([buffer], options), f"broadcast from rank {src}")

    def send(self, buffer: Tensor, dst: int, tag: int = 0) -> Pending:
        return _TorchPending(lambda: self._group.send([buffer], dst, tag), f"send to rank {dst}")

    def recv(self, buffer: Tensor, src: int, tag: int = 0) -> Pending:
        return _TorchPending(lambda: self._group.recv([buffer], src, tag), f"recv from rank {src}")

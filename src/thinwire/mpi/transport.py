"""An MPI communicator as a transport: bytes to peers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..collectives.rounds import AtOnce, Paired, Rounds, pairs_in_rounds
from ..collectives.transport import Exchange, Pending
from .buffers import PIECE_NBYTES, Staged, memory, pieces
from .communicator import Communicator
from .operation import Operation

# Beyond those of callers: messages of other threads, or in another order, must not be taken for each other.
_ROUNDS_TAG, _EXCHANGE_TAG = 16, 17


class MpiTransport:
    """A communicator as a transport. It must be used for nothing else: the order of its collectives is that of the
    calls here.

    An all-to-all is a send and a receive for each pair, so that each frame can be decoded when it is there.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size
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
        outs, ins = torch.split(out, list(out_splits)), torch.split(inp, list(in_splits))
        if in_rounds:
            return self._in_rounds(outs, ins)
        return self._at_once(outs, ins)

    def _in_rounds(self, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> Paired:
        return pairs_in_rounds(
            self._rounds,
            self.rank,
            outs,
            ins,
            lambda buffer, src: self.recv(buffer, src, _ROUNDS_TAG),
            lambda buffer, dst: self.send(buffer, dst, _ROUNDS_TAG),
        )

    def _at_once(self, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> AtOnce:
        me, size = self.rank, self.size
        # All receives first: what arrives for a receive that waits needs no buffer of MPI's.
        sources = [(me + d) % size for d in range(1, size)]
        arriving = [(p, self.recv(outs[p], p, _EXCHANGE_TAG)) for p in sources if outs[p].numel()]
        targets = [(me - d) % size for d in range(1, size)]
        leaving = [self.send(ins[p], p, _EXCHANGE_TAG) for p in targets if ins[p].numel()]
        outs[me].copy_(ins[me])
        return AtOnce(arriving, leaving)

    def all_gather(self, out: Tensor, inp: Tensor) -> Pending:
        if inp.numel() > PIECE_NBYTES:
            return self._at_once(torch.split(out, inp.numel()), [inp] * self.size)
        source, target = Staged(inp, reads=True, writes=False), Staged(out, reads=False, writes=True)
        BYTE, n = self._communicator.process.mpi.BYTE, inp.numel()
        return self._communicator.collective(
            "Iallgather",
            [([memory(source.flat), n, BYTE], [memory(target.flat), n, BYTE])],
            keep=(source, target),
            finish=target.finish,
        )

    def broadcast(self, buffer: Tensor, src: int) -> Pending:
        staged = Staged(buffer, reads=self.rank == src, writes=self.rank != src)
        BYTE = self._communicator.process.mpi.BYTE
        return self._communicator.collective(
            "Ibcast",
            [([memory(x), x.numel(), BYTE], src) for x in pieces(staged.flat)],
            keep=staged,
            finish=staged.finish,
        )

    def send(self, buffer: Tensor, dst: int, tag: int = 0) -> Operation:
        return self._communicator.send(Staged(buffer, reads=True, writes=False).flat, dst, tag)

    def recv(self, buffer: Tensor, src: int, tag: int = 0) -> Operation:
        staged = Staged(buffer, reads=False, writes=True)
        return self._communicator.recv(staged.flat, src, tag, finish=staged.finish)

"""Messages between some pairs of a group's ranks: for collectives in which most pairs have nothing to tell each other.

All ranks call it in the same order; both ends of a pair know how many messages it has and how long they are. Over a
transport without tags (NCCL's, for tensors of a device) it is one all-to-all with nothing for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .rounds import AtOnce, Paired, Rounds
from .transport import Exchange, Pending, Transport

Messages = Sequence[tuple[int, Tensor]]
"""(peer, bytes): several to one peer travel in this order."""

# Besides those of a transport's own messages.
_AT_ONCE_TAG, _ROUNDS_TAG = 2, 3


class Pairwise:
    """The messages of one call of a collective. For one thread. device: of its tensors."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self.device = device
        self._rounds = Rounds()

    def start(self, leaving: Messages, arriving: Messages, *, in_rounds: bool = False) -> Exchange:
        """Send and receive; empty messages do not travel. in_rounds: see :mod:`.rounds`, the same on all ranks."""
        if self.device.type != "cpu":
            return _all_to_all(self._transport, leaving, arriving, self.device)
        if not in_rounds:
            return AtOnce(*self._post(leaving, arriving, _AT_ONCE_TAG))
        me, size = self._transport.rank, self._transport.size

        def start(distance: int) -> list[Pending]:
            source, to = (me + distance) % size, (me - distance) % size
            incoming, outgoing = self._post(
                [(peer, buffer) for peer, buffer in leaving if peer == to],
                [(peer, buffer) for peer, buffer in arriving if peer == source],
                _ROUNDS_TAG,
            )
            return [pending for _, pending in incoming] + outgoing

        used = sorted(
            {(peer - me) % size for peer, _ in arriving} | {(me - peer) % size for peer, _ in leaving}
        )
        pending = self._rounds.add(partial(start, distance) for distance in used)
        number = {(me + distance) % size: n for n, distance in enumerate(used, 1)}
        return Paired(pending, number.__getitem__)

    def _post(
        self, leaving: Messages, arriving: Messages, tag: int
    ) -> tuple[list[tuple[int, Pending]], list[Pending]]:
        receive, send = self._transport.recv, self._transport.send
        incoming = [(peer, receive(buffer, peer, tag)) for peer, buffer in arriving if buffer.numel()]
        return incoming, [send(buffer, peer, tag) for peer, buffer in leaving if buffer.numel()]


def _all_to_all(
    transport: Transport, leaving: Messages, arriving: Messages, device: torch.device
) -> Exchange:
    every = range(transport.size)
    ins, outs = (
        [[buffer for peer, buffer in messages if peer == rank] for rank in every]
        for messages in (leaving, arriving)
    )
    sizes = [[sum(buffer.numel() for buffer in buffers) for buffers in side] for side in (outs, ins)]
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    out = torch.empty(sum(sizes[0]), dtype=torch.uint8, device=device)
    inp = torch.cat([nothing, *(buffer for buffers in ins for buffer in buffers)])
    return _Scattered(
        transport.all_to_all(out, inp, *sizes), out, inp, [b for buffers in outs for b in buffers]
    )


class _Scattered:
    """An all-to-all whose result is dealt to the buffers that it is for. keep: what is sent must outlive it."""

    def __init__(self, exchange: Exchange, out: Tensor, keep: Tensor, buffers: list[Tensor]) -> None:
        self._exchange, self._out, self._keep, self._buffers = exchange, out, keep, buffers

    def wait(self) -> None:
        self._exchange.wait()
        for buffer, part in zip(
            self._buffers, torch.split(self._out, [b.numel() for b in self._buffers]), strict=True
        ):
            buffer.copy_(part)

    def wait_for(self, peer: int) -> None:
        self.wait()

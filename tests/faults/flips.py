"""Bytes that change on their way: a transport over the real one that flips bits in what it receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from thinwire.collectives.transport import Exchange, Pending, Transport

Flip = Callable[[Tensor], None]
"""Changes a buffer of received bytes in place."""


class Flipping:
    """``inner``, with ``flip`` applied to all bytes that come from peers, as soon as they are here."""

    def __init__(self, inner: Transport, flip: Flip) -> None:
        self._inner = inner
        self._flip = flip
        self.rank = inner.rank
        self.size = inner.size

    def all_to_all(
        self,
        out: Tensor,
        inp: Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        *,
        in_rounds: bool = False,
    ) -> Exchange:
        exchange = self._inner.all_to_all(out, inp, out_splits, in_splits, in_rounds=in_rounds)
        return self._flipped(exchange, out)  # type: ignore[no-any-return]

    def all_gather(self, out: Tensor, inp: Tensor) -> Pending:
        return self._flipped(self._inner.all_gather(out, inp), out)

    def broadcast(self, buffer: Tensor, src: int) -> Pending:
        return self._flipped(self._inner.broadcast(buffer, src), buffer)

    def send(self, buffer: Tensor, dst: int, tag: int = 0) -> Pending:
        return self._inner.send(buffer, dst, tag)

    def recv(self, buffer: Tensor, src: int, tag: int = 0) -> Pending:
        return self._flipped(self._inner.recv(buffer, src, tag), buffer)

    def _flipped(self, pending: Pending, received: Tensor) -> Any:
        return _Flipped(pending, received, self._flip)


class _Flipped:
    def __init__(self, pending: Pending, received: Tensor, flip: Flip) -> None:
        self._pending = pending
        self._received = received
        self._flip = flip
        self._done = False

    def wait(self) -> None:
        self._pending.wait()
        if not self._done:
            self._flip(self._received)
        self._done = True

    def wait_for(self, peer: int) -> None:
        self.wait()

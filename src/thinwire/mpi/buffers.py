"""Tensors as MPI sees them: contiguous, in memory that it can reach, in pieces that it can count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .library import load, takes_cuda

PIECE_NBYTES = 1 << 30
"""MPI-3 counts in 32-bit integers; longer messages travel in pieces of this size, the last one shorter."""


class Staged:
    """A tensor for the time of a call. ``flat`` is what MPI reads or writes; ``finish`` puts it where it belongs.

    reads: the call reads the tensor's values; writes: it leaves new ones in it.
    """

    def __init__(self, x: Tensor, *, reads: bool, writes: bool) -> None:
        x = x.detach()
        if x.is_cuda and not takes_cuda():
            self.flat = torch.empty(x.numel(), dtype=x.dtype, pin_memory=True)
            if reads:
                self.flat.view_as(x).copy_(x)  # waits for the stream
        else:
            if x.is_cuda:
                torch.cuda.current_stream(x.device).synchronize()  # MPI knows no streams
            self.flat = x.contiguous().view(-1)
        self._target = x if writes and self.flat.data_ptr() != x.data_ptr() else None

    def finish(self) -> None:
        """After the call: copy the values to a tensor that MPI could not reach itself."""
        if self._target is not None:
            self._target.copy_(self.flat.view_as(self._target))
            if self._target.is_cuda:
                torch.cuda.current_stream(
                    self._target.device
                ).synchronize()  # of this thread, not of the caller


def memory(x: Tensor) -> Any:
    """The bytes of a contiguous tensor as MPI's buffer."""
    return load().memory.fromaddress(x.data_ptr() if x.numel() else 0, x.numel() * x.element_size())


def pieces(x: Tensor) -> Iterator[Tensor]:
    """A flat tensor in pieces that MPI can count; an empty one is one piece, for it is a message, too."""
    step = PIECE_NBYTES // x.element_size()
    yield from torch.split(x, step) if x.numel() > step else (x,)

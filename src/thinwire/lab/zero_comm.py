"""The zero-communication step: the same program, every payload replaced by a one-byte token.

Dependencies, pipeline bubbles and stragglers stay, only the bytes go, so its step time bounds what any
compression can reach. Received tensors hold finite stand-in values: its losses mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from ..group import ThinwireGroup, register

BACKEND = "thinwire-zero-comm"
_CONTROL_NBYTES = 64  # shapes, flags and losses are sent for real: the program needs them
_STAND_IN = 1e-3  # finite, not zero: kernels take their usual paths


class TokenGroup(ThinwireGroup):
    """A thinwire group whose inner group sends one byte instead of every float message."""

    def make_inner(self, store: Store, timeout: timedelta) -> dist.ProcessGroup:
        return cast(dist.ProcessGroup, _TokenInner(super().make_inner(store, timeout)))


class _StandIn(dist.Work):
    """The Work of a token; its future gives the tensors that it stands for, which DDP puts into gradients."""

    def __init__(self, work: dist.Work, tensors: list[Tensor]) -> None:
        super().__init__()
        self._work, self._tensors = work, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._work.wait() if timeout is None else self._work.wait(timeout)

    def get_future(self) -> Any:
        tensors = self._tensors
        return self._work.get_future().then(lambda _: tensors)


class _TokenInner:
    """The ops that :class:`ThinwireGroup` hands to its inner group, with tokens for payloads."""

    def __init__(self, real: dist.ProcessGroup) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        if _control(tensors):
            return self._real.allreduce(tensors, opts)
        # The rank's own values stand in for the sum.
        return _StandIn(self._real.allreduce([_token()], opts), tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        if _control(tensors):
            return self._real.allreduce_coalesced(tensors, opts)
        plain = dist.AllreduceOptions()
        plain.reduceOp = opts.reduceOp
        return self._real.allreduce([_token()], plain)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        if _control([input]):
            return self._real._reduce_scatter_base(output, input, opts)
        start = self._real.rank() * output.numel()
        output.copy_(input.reshape(-1)[start : start + output.numel()].view_as(output))
        return self._real.allreduce([_token()], dist.AllreduceOptions())

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        if _control([output]):
            return self._real._allgather_base(output, input, opts)
        for part in output.view(-1).chunk(self._real.size()):
            part.copy_(input.reshape(-1))
        return self._gather_tokens()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        if _control(outputs[0]):
            return self._real.allgather(outputs, inputs, opts)
        for output in outputs[0]:
            output.fill_(_STAND_IN)
        return self._gather_tokens()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._real.broadcast(tensors if _control(tensors) else [_token()], opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: list[int], in_splits: list[int], opts: Any
    ) -> dist.Work:
        # With uneven splits ranks hold different amounts, so whether it is control must not depend on the size.
        output.fill_(_STAND_IN)
        size = self._real.size()
        return self._real.alltoall_base(_token(size), _token(size), [], [], opts)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        return self._real.send(tensors if _control(tensors) else [_token()], dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        if _control(tensors):
            return self._real.recv(tensors, src, tag)
        tensors[0].detach().fill_(_STAND_IN)
        return self._real.recv([_token()], src, tag)

    def _gather_tokens(self) -> dist.Work:
        return self._real._allgather_base(_token(self._real.size()), _token())


def _control(tensors: Sequence[Tensor]) -> bool:
    nbytes = sum(x.numel() * x.element_size() for x in tensors)
    return nbytes <= _CONTROL_NBYTES or not tensors[0].dtype.is_floating_point


def _token(count: int = 1) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8)


register(BACKEND, TokenGroup)

"""The tp axis inside a model: this rank's place on it, and the loss over a split vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.integrate import tensor
from thinwire.integrate.roles import as_role
from thinwire.torch_names import all_gather_single


@dataclass(frozen=True)
class TensorAxis:
    """This rank's place on the tp axis; mesh: the axis alone, None: tp=1."""

    mesh: DeviceMesh | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> TensorAxis:
        return cls() if mesh is None else cls(mesh, mesh.get_local_rank(), mesh.size())

    def slice(self, full: Tensor, split: int | None) -> Tensor:
        """This rank's part of a full tensor along dimension ``split``, in memory of its own."""
        if split is None or self.size == 1:
            return full
        return full.chunk(self.size, split)[self.rank].clone()

    def enter(self, x: Tensor) -> Tensor:
        """Hand the same activation to every rank's part: nothing forward, gradients are summed backward."""
        return x if self.mesh is None else tensor.enter(x, self.mesh)

    def leave(self, partial: Tensor) -> Tensor:
        """Sum the parts' outputs forward; backward every part gets the gradient as it is."""
        return partial if self.mesh is None else tensor.leave(partial, self.mesh)


def cross_entropy(logits: Tensor, targets: Tensor, axis: TensorAxis) -> Tensor:
    """Mean cross-entropy in nats, fp32, of logits whose vocabulary is split over the tp axis.

    logits: (..., vocab / tp), this rank's part; targets: (...) int64 over the whole vocabulary. The ranks exchange
    two numbers per token; every rank gets the same loss, and the gradient of its own logits.
    """
    loss = _SplitCrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), axis)  # type: ignore[no-untyped-call]
    return loss  # type: ignore[no-any-return]


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: TensorAxis) -> Tensor:
        values = logits.float()
        column = targets - axis.rank * values.shape[1]
        mine = (column >= 0) & (column < values.shape[1])
        column = (column * mine).unsqueeze(1)
        total = values.logsumexp(1)
        target = values.gather(1, column).squeeze(1).where(mine, 0.0)
        if axis.mesh is not None:
            # As integers: a codec for activations must not touch them.
            part = torch.stack([total, target]).view(torch.int32)
            parts = part.new_empty(axis.size, *part.shape)
            group = axis.mesh.get_group()
            with as_role(group, "control"):
                all_gather_single(parts.view(-1), part.view(-1), group=group)
            totals, targets_ = parts.view(torch.float32).unbind(1)
            total, target = totals.logsumexp(0), targets_.sum(0)
        ctx.save_for_backward((values - total.unsqueeze(1)).exp_(), column, mine)
        ctx.dtype = logits.dtype
        return (total - target).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        softmax, column, mine = ctx.saved_tensors
        grad = softmax.scatter_add(1, column, -mine.to(softmax.dtype).unsqueeze(1))
        return grad.mul_(grads[0] / len(grad)).to(ctx.dtype), None, None

"""Tensor parallelism: how activations enter and leave a computation that is split over ranks, roles told.

(Shoeybi et al., "Megatron-LM", 2019, section 3: the operators f and g.) The reductions are DTensor's, from
``Partial`` to ``Replicate``; what is added here is that the group hears which is an activation and which the
gradient of one, so that a policy may treat them differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from .roles import as_role


def enter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Hand the same activation to every rank's part: nothing forward, gradients are summed backward.

    x: any shape, equal on the ranks of ``mesh`` (1-D). The gradient that comes back is equal on them, too.
    """
    return _Enter.apply(x, mesh)  # type: ignore[no-any-return, no-untyped-call]


def leave(partial: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum the parts' outputs over ``mesh`` (1-D) forward; backward every part gets the gradient as it is."""
    return _Leave.apply(partial, mesh)  # type: ignore[no-any-return, no-untyped-call]


def sum_partial(partial: Tensor, mesh: DeviceMesh, role: str) -> Tensor:
    """The sum over the ranks of ``mesh`` (1-D), of this role; outside of autograd."""
    with as_role(mesh.get_group(), role):
        total = DTensor.from_local(partial, mesh, [Partial()], run_check=False)
        return total.redistribute(placements=[Replicate()]).to_local()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_partial(grads[0].contiguous(), ctx.mesh, "activation_gradient"), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, mesh: DeviceMesh) -> Tensor:
        return sum_partial(partial.contiguous(), mesh, "activation")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None

"""Entering and leaving a tensor-parallel computation: values, gradients, roles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from support import TIMEOUT_S, gaussian, same
from thinwire import groups, init_mesh
from thinwire.integrate.tensor import enter, leave, sum_partial
from thinwire.launch import run_ranks

from .test_roles import BY_ROLE, codecs_by_role

pytestmark = pytest.mark.usefixtures("kernels")


def _two_layers(rank: int, world: int, report: Any) -> None:
    x, up, down = (
        gaussian(1, 64 * 96).view(64, 96),
        gaussian(2, 96 * 8).view(96, 8),
        gaussian(3, 8 * 96).view(8, 96),
    )
    whole = x.clone().requires_grad_()
    expected = torch.tanh(whole @ up) @ down
    expected.sin().sum().backward()
    assert whole.grad is not None
    for mesh in (init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), init_mesh({"tp": world}, "none")):
        mine = x.clone().requires_grad_()
        part = slice(rank * 8 // world, (rank + 1) * 8 // world)
        result = leave(torch.tanh(enter(mine, mesh) @ up[:, part]) @ down[part], mesh)
        result.sin().sum().backward()
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-5, atol=1e-4)
    roles = {m.role for m in groups(mesh)["tp"].traffic.entries()}
    assert roles == {"activation", "activation_gradient"}


def test_a_split_computation_is_the_whole_one() -> None:
    run_ranks(_two_layers, 2, timeout=TIMEOUT_S)


def _by_role(rank: int, world: int, report: Any) -> None:
    mesh = init_mesh({"tp": world}, BY_ROLE)
    x = gaussian(rank, 4096).requires_grad_()
    # A view that is not contiguous goes in, as backward passes give them.
    y = leave(enter(x, mesh).view(64, 64).t(), mesh)
    assert same(y.detach(), sum(gaussian(r, 4096) for r in range(world)).view(64, 64).t().contiguous())
    y.backward(gaussian(9 + rank, 4096).view(64, 64))
    assert codecs_by_role(groups(mesh)["tp"]) == {"activation": "pass-through", "activation_gradient": "bf16"}
    given = torch.ones(4096)
    assert (sum_partial(given, mesh, "gradient") == world).all()
    assert (given == 1).all()


def test_forward_and_backward_may_have_codecs_of_their_own() -> None:
    run_ranks(_by_role, 2, timeout=TIMEOUT_S)

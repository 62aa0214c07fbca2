"""PyTorch's tensor- and sequence-parallel styles over a compressed group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from support import TIMEOUT_S, gaussian, same
from thinwire import groups, init_mesh
from thinwire.errors import PolicyError
from thinwire.integrate.roles import as_role
from thinwire.launch import run_ranks
from thinwire.policy import Policy, from_dict

pytestmark = pytest.mark.usefixtures("kernels")
BATCH, SEQUENCE, WIDTH, HIDDEN = 2, 8, 16, 24
STEP = 1 / 254  # half a step of int8, of a block's largest value


def policy(codec: str) -> Policy:
    """Of activations; parameters, which DTensor broadcasts and scatters when they are made, stay exact."""
    ops = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), codec)
    return from_dict({"axis": {"tp": {**ops, "min_nbytes": 0}}}, "test")


class Block(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]


def distinct(mesh: DeviceMesh) -> DeviceMesh:
    """DTensor takes meshes of the same ranks and names for one another, whatever their groups; this test has several."""
    hidden: Any = mesh
    hidden._thread_id, hidden._hash = id(mesh), None
    return mesh


def plain_mesh(world: int) -> DeviceMesh:
    return distinct(init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))


def tp_mesh(world: int, chosen: Policy) -> DeviceMesh:
    return distinct(init_mesh({"tp": world}, chosen))


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(Block(False), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence_parallel(mesh: DeviceMesh) -> nn.Module:
    """Between blocks a rank has a part of the sequence: it is gathered before ``up`` and reduce-scattered after ``down``."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(Block(True), mesh, plan)


def whole(rank: int = 0) -> Tensor:
    return gaussian(1 + rank, BATCH * SEQUENCE * WIDTH).view(BATCH, SEQUENCE, WIDTH)


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def passes(block: nn.Module, x: Tensor, aim: Tensor) -> dict[str, Tensor]:
    """This rank's output, gradient of the input, and gradients; the loss is linear, so its gradient is exact."""
    x = x.clone().requires_grad_()
    y = local(block(x))
    (y * aim).sum().backward()
    found = {"output": y.detach(), "input": x.grad}
    found |= {name: local(p.grad) for name, p in block.named_parameters() if p.grad is not None}
    return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}


def tensor_case(mesh: DeviceMesh, rank: int, world: int) -> dict[str, Tensor]:
    return passes(tensor_parallel(mesh), whole(), whole(5))


def sequence_case(mesh: DeviceMesh, rank: int, world: int) -> dict[str, Tensor]:
    mine = slice(rank * SEQUENCE // world, (rank + 1) * SEQUENCE // world)
    return passes(sequence_parallel(mesh), whole()[:, mine], whole(5)[:, mine])


def _bits(rank: int, world: int, report: Any) -> None:
    plain = plain_mesh(world)
    for case in (tensor_case, sequence_case):
        expected = case(plain, rank, world)
        assert {"output", "input", "up.weight", "down.weight"} <= expected.keys()
        # Lossless codecs go the whole way through encoding; of two ranks, sums are the same in any order.
        for codec in ("none", "mpc:dim=1", "exponent"):
            mesh = tp_mesh(world, policy(codec))
            found = case(mesh, rank, world)
            assert found.keys() == expected.keys()
            for name, tensor in found.items():
                assert same(tensor.contiguous(), expected[name].contiguous()), (case.__name__, codec, name)
            sent = {
                (m.op, m.codec.split(":")[0])
                for m in groups(mesh)["tp"].traffic.entries()
                if m.role != "control"
            }
            name = "pass-through" if codec == "none" else codec.split(":")[0]
            ops = {"all_reduce"} if case is tensor_case else {"all_gather", "reduce_scatter"}
            assert {(op, name) for op in ops} <= sent, (case.__name__, codec, sent)


def test_lossless_is_gloo_bit_for_bit() -> None:
    run_ranks(_bits, 2, timeout=TIMEOUT_S)


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max())


def _bounds(rank: int, world: int, report: Any) -> dict[str, Tensor]:
    """The partial sums are encoded once by each rank; what lies between them is exact."""
    block, x, aim = Block(False), whole(), whole(5)
    with torch.no_grad():
        hidden = block.up(x).tanh()
        slope = (1 - hidden**2) * (aim @ block.down.weight)
        parts = [slice(r * HIDDEN // world, (r + 1) * HIDDEN // world) for r in range(world)]
        forward = sum(largest(hidden[..., p] @ block.down.weight[:, p].T) for p in parts) + largest(
            block.down.bias
        )
        backward = sum(largest(slope[..., p] @ block.up.weight[p]) for p in parts)
    plain = plain_mesh(world)
    exact = tensor_case(plain, rank, world)
    mesh = tp_mesh(world, policy("int8:block=32"))
    found = tensor_case(mesh, rank, world)
    for name, bound in (("output", forward * STEP), ("input", backward * STEP)):
        assert 0 < largest(found[name] - exact[name]) <= bound * 1.001, name
    for name in exact.keys() - {"output", "input"}:
        assert same(found[name].contiguous(), exact[name].contiguous()), name
    # By role: DTensor does not say which, so who calls it does; on the CPU backward runs in the caller's thread.
    roles = {"activation": {"all_reduce": "int8:block=32"}, "activation_gradient": {"all_reduce": "bf16"}}
    by_role = tp_mesh(world, from_dict({"axis": {"tp": {"role": roles, "min_nbytes": 0}}}, "roles"))
    group = by_role.get_group("tp")
    block = tensor_parallel(by_role)
    with pytest.raises(PolicyError, match="by role"):
        block(x)
    given = x.clone().requires_grad_()
    with as_role(group, "activation"):
        y = local(block(given))
    assert same(y.detach(), found["output"])
    with as_role(group, "activation_gradient"):
        (y * aim).sum().backward()
    assert given.grad is not None
    assert 0 < largest(given.grad - exact["input"]) <= backward * 2**-9 * 1.001
    return {name: found[name] for name in ("output", "input")}


def test_lossy_is_within_the_codecs_bound_and_the_same_on_all_ranks() -> None:
    # ColossalAI 5920
    # ColossalAI 5920
    first, second = run_ranks(_bounds, 2, timeout=TIMEOUT_S)
    assert all(same(first[name], second[name]) for name in first)


def _sequence_bounds(rank: int, world: int, report: Any) -> None:
    """What is gathered is rounded, and what is made of it reduce-scattered, rounded for the other rank."""
    mine = slice(rank * SEQUENCE // world, (rank + 1) * SEQUENCE // world)
    block = Block(True)
    with torch.no_grad():
        normed = block.norm(whole())
        hidden = block.up(normed).tanh()
        # tanh does not steepen: an error of the input grows by the sums of the weights' absolute values at most.
        gathered = (
            largest(normed) * STEP * float((block.down.weight.abs() @ block.up.weight.abs()).sum(1).max())
        )
        reach = float(block.down.weight.abs().sum(1).max()) + largest(block.down.bias)
        assert largest(hidden) <= 1
    plain = plain_mesh(world)
    exact = sequence_case(plain, rank, world)["output"]
    found = sequence_case(tp_mesh(world, policy("int8:block=32")), rank, world)["output"]
    assert exact.shape == whole()[:, mine].shape
    assert 0 < largest(found - exact) <= (gathered + reach * STEP) * 1.001


@pytest.mark.slow
def test_lossy_sequence_parallelism_is_within_the_codecs_bound() -> None:
    run_ranks(_sequence_bounds, 2, timeout=TIMEOUT_S)

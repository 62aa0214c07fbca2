"""FSDP2 on a mesh of two dimensions: what was reduce-scattered over one is all-reduced over the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from support import TIMEOUT_S
from thinwire import compress_fsdp, groups, init_mesh
from thinwire.errors import UnsupportedError
from thinwire.integrate.fsdp import FsdpCompression
from thinwire.launch import run_ranks
from thinwire.policy import Policy, from_dict

from .test_ddp_features import whole
from .test_fsdp_features import Net

pytestmark = pytest.mark.usefixtures("kernels")
STEPS, SHARDS = 3, 2


def policy(scatter: str, all_reduce: str, feedback: bool) -> Policy:
    dp = {"reduce_scatter": scatter, "all_reduce": all_reduce, "feedback": feedback, "min_nbytes": 0}
    return from_dict({"axis": {"dp": dp}}, "test")


@torch.no_grad()
def filled() -> Any:
    model = Net()
    for i, parameter in enumerate(model.parameters()):
        parameter.copy_(whole(*parameter.shape, seed=i))
    return model


def sharded(mesh: DeviceMesh) -> Any:
    model = filled()
    for unit in (model.second, model):
        fully_shard(unit, mesh=mesh)
    return model


def backward(model: nn.Module, rank: int, number: int) -> None:
    y: Tensor = model(whole(4, 8, seed=100 * number + rank))
    (y * whole(*y.shape, seed=7)).sum().backward()


def step(model: Any, rank: int, number: int) -> dict[str, Tensor]:
    """The first micro-batch is reduce-scattered only; what is all-reduced is the sum with the second."""
    model.zero_grad()
    for i in range(2):
        model.set_requires_all_reduce(i == 1)
        backward(model, rank, 10 * number + i)
    return {n: p.grad.to_local().clone() for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}


def largest_sum(rank: int) -> Tensor:
    """The largest values of this rank's gradients of a step's micro-batches, added up; of all steps the largest."""
    model, sums = filled(), []
    for number in range(STEPS):
        total = torch.zeros(())
        for i in range(2):
            model.zero_grad()
            backward(model, rank, 10 * number + i)
            total += torch.stack([p.grad.abs().max() for p in model.parameters() if p.grad is not None]).max()
        sums.append(total)
    return torch.stack(sums).max()


def train(mesh: DeviceMesh, rank: int) -> tuple[list[dict[str, Tensor]], FsdpCompression | None]:
    model = sharded(mesh)
    compression = compress_fsdp(model) if groups(mesh) else None
    return [step(model, rank, number) for number in range(STEPS)], compression


WIDTHS = {name: tuple(p.shape) for name, p in Net().named_parameters()}


def share_of(name: str) -> int:
    """Values of each rank's part of a parameter, the padding of the last one included."""
    rows, *columns = WIDTHS[name]
    return -(-rows // SHARDS) * math.prod(columns)


def lost(states: list[dict[str, Tensor]], name: str, like: Tensor, rank: int, world: int) -> Tensor:
    """What residuals of both encodings hold of this rank's part of a parameter."""
    shard, share = rank % SHARDS, share_of(name)
    sent = torch.stack([s[f"{name}@dp"] for s in states]).mean(0)[shard * share :][: like.numel()]
    peers = range(shard, world, SHARDS)
    between = torch.stack([states[r][f"{name}.replica@dp"] for r in peers]).mean(0)[: like.numel()]
    return (sent + between).view(like.shape)


def _accounts(rank: int, world: int, report: Any) -> list[list[Tensor]]:
    replicas = world // SHARDS
    sizes = {"dp": replicas, "zero": SHARDS}
    exact = train(init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("replicate", "shard")), rank)[0]
    found = train(init_mesh(sizes, policy("none", "none", False)), rank)[0]
    for a, b in zip(exact, found, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a), "none is FSDP, bit for bit"

    bound = largest_sum(rank)
    dist.all_reduce(bound, dist.ReduceOp.MAX)
    largest = float(bound)

    results = []
    mesh = init_mesh(sizes, policy("int8:block=32", "int8:block=32", False))
    found = train(mesh, rank)[0]
    # Each of the encodings (two between more than two replicas) loses half a step of int8 of what it sees.
    limit = largest * ((1 + 1 / 254) ** (2 if replicas == 2 else 3) - 1 + 2**-20)
    for a, b in zip(exact, found, strict=True):
        assert all(float((a[n] - b[n]).abs().max()) <= limit for n in a)
        results.append(list(b.values()))
    for axis, op in (("zero", "reduce_scatter"), ("dp", "all_reduce")):
        entries = groups(mesh)[axis].traffic.entries()
        assert {(m.axis, m.role) for m in entries if m.op == op and m.codec.startswith("int8")} == {
            ("dp", "gradient")
        }

    # Residuals of one encoding, the other, and both.
    for codecs in (("int4:block=32", "none"), ("none", "int4:block=32"), ("int4:block=32", "int4:block=32")):
        found, compression = train(init_mesh(sizes, policy(*codecs, True)), rank)
        assert compression is not None
        states: list[Any] = [None] * world
        state = {n: t.clone() for n, t in compression.state_dict().items()}
        assert int(state.pop("steps")) == 2 * STEPS  # reduce-scatters make them
        for name in WIDTHS:
            state.setdefault(f"{name}@dp", torch.zeros(Net().get_parameter(name).numel()))
            state.setdefault(f"{name}.replica@dp", torch.zeros(share_of(name)))
        dist.all_gather_object(states, state)
        results.append([t for step in found for t in step.values()])
        if replicas > 2 and codecs[1] != "none":
            continue  # a part of it is with the owners of chunks
        for name in WIDTHS:
            total = sum(a[name] - b[name] for a, b in zip(exact, found, strict=True))
            assert isinstance(total, Tensor)
            error = float((total - lost(states, name, total, rank, world)).abs().max())
            assert error <= STEPS * largest * 2**-20, (codecs, name, error)
    return results


def test_what_is_missing_of_sums_over_steps_is_in_residuals() -> None:
    # pytorch 64665
    ranks = run_ranks(_accounts, 4, timeout=TIMEOUT_S)
    for rank, found in enumerate(ranks):  # replicas of a shard have the same bits
        for a, b in zip(ranks[rank % SHARDS], found, strict=True):
            assert all(map(torch.equal, a, b))


def _resumed(rank: int, world: int, report: Any) -> None:
    sizes = {"dp": 2, "zero": 2}
    chosen = policy("int4:block=32,round=stochastic", "int4:block=32,round=stochastic", True)
    scale = 1024.0

    def make(mesh: DeviceMesh, scaled: Callable[[], float] | None = None) -> tuple[Any, FsdpCompression]:
        model = sharded(mesh)
        return model, compress_fsdp(model, scale=scaled)

    (plain, kept), (scaled, other) = (
        make(init_mesh(sizes, chosen)),
        make(init_mesh(sizes, chosen), lambda: scale),
    )
    assert other.nbytes == 2 * kept.nbytes
    for number in range(3):
        if number == 2:
            saved = {n: t.clone() for n, t in kept.state_dict().items()}
            # A step that overflows on one rank leaves no trace, but for the number of steps.
            scaled.zero_grad()
            (scaled(whole(4, 8, seed=rank)).sum() * (torch.inf if rank == 0 else scale)).backward()
            scale /= 2
            assert all(torch.equal(t, saved[n]) for n, t in other.state_dict().items() if n != "steps")
            other.load_state_dict({**other.state_dict(), "steps": saved["steps"]})
        plain.zero_grad()
        scaled.zero_grad()
        for model, factor in ((plain, 1.0), (scaled, scale)):
            y = model(whole(4, 8, seed=100 * number + rank))
            ((y * whole(*y.shape, seed=7)).sum() * factor).backward()
        for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
            assert torch.equal(a.grad.to_local(), b.grad.to_local() / scale)
    with pytest.raises(UnsupportedError, match="cut over 1 rank and replicated over 4"):
        compress_fsdp(sharded(init_mesh({"dp": 4, "zero": 1}, chosen)))


@pytest.mark.slow
def test_a_skipped_step_leaves_no_trace_and_state_goes_into_checkpoints() -> None:
    run_ranks(_resumed, 4, timeout=TIMEOUT_S)


@pytest.mark.slow
def test_three_replicas() -> None:
    run_ranks(_accounts, 6, timeout=2 * TIMEOUT_S)

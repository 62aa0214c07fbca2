"""PyTorch's own parallelism over thinwire groups: DDP, FSDP2 and DTensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from support import TIMEOUT_S, gaussian
from thinwire import GroupOptions, groups, init_mesh
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")
BF16 = from_dict({"axis": {a: {"all": "bf16", "min_nbytes": 0} for a in ("dp", "tp", "zero")}}, "bf16")


def toy() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


def train(model: nn.Module, rank: int, steps: int = 2) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(gaussian(10 * step + rank, 64).view(4, 16)).square().mean().backward()
        optimizer.step()
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().clone() for p in full]


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = toy()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _ddp(rank: int, world: int, report: Any) -> list[Tensor]:
    expected = train(DistributedDataParallel(toy()), rank)
    none = dist.new_group(backend="thinwire", pg_options=GroupOptions(policy="none"))
    found = train(DistributedDataParallel(toy(), process_group=none), rank)
    assert all(map(torch.equal, expected, found)), "none is gloo, bit for bit"
    lossy = dist.new_group(backend="thinwire", pg_options=GroupOptions(policy=BF16))
    found = train(DistributedDataParallel(toy(), process_group=lossy), rank)
    # Two steps of lr 0.1 with gradients below 1: the gradients' error is at most 2 roundings of 2^-9.
    assert all((a - b).abs().max() < 2 * 0.1 * 2**-7 for a, b in zip(expected, found, strict=True))
    assert "bf16" in {m.codec for m in lossy.traffic.entries()}
    return found


def _fsdp(rank: int, world: int, report: Any) -> list[Tensor]:
    expected = train(sharded(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))), rank)
    found = train(sharded(init_mesh({"dp": world}, "none")), rank)
    assert all(map(torch.equal, expected, found)), "none is gloo, bit for bit"
    mesh = init_mesh({"dp": world}, BF16)
    found = train(sharded(mesh), rank)
    # Parameters below 1 are gathered with an error of 2^-9, and gradients as in DDP.
    assert all((a - b).abs().max() < 2**-7 for a, b in zip(expected, found, strict=True))
    counted = {(m.axis, m.op, m.role, m.codec) for m in groups(mesh)["dp"].traffic.entries()}
    assert ("dp", "reduce_scatter", "gradient", "bf16") in counted
    assert ("zero", "all_gather", "parameter", "bf16") in counted
    return found


def _dtensor(rank: int, world: int, report: Any) -> list[Tensor]:
    whole = gaussian(0, 32 * 12).view(32, 12)
    results = []
    for policy, tolerance in (("none", 0.0), (BF16, 4 * 2.0**-8)):
        mesh = init_mesh({"tp": world}, policy)
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        columns = rows.redistribute(placements=[Shard(1)])
        part = DTensor.from_local(whole / world, mesh, [Partial()], run_check=False)
        found = [
            rows.full_tensor(),
            columns.full_tensor(),
            part.redistribute(placements=[Replicate()]).to_local(),
            part.redistribute(placements=[Shard(0)]).full_tensor(),
        ]
        for tensor in found[:2]:
            assert (tensor - whole).abs().max() <= tolerance
        for tensor in found[2:]:
            assert (tensor - whole).abs().max() <= tolerance + 2**-22
        results += found
    return results


@pytest.mark.parametrize("run", [_ddp, _fsdp, _dtensor])
def test_none_is_gloo_and_lossy_ranks_agree(run: Any) -> None:
    # torchao 590
    results = run_ranks(run, 2, timeout=TIMEOUT_S)
    assert all(map(torch.equal, *results))

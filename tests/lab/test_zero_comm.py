"""The group that sends tokens: the program runs on, the bytes do not travel."""

from typing import Any

import torch
import torch.distributed as dist

from thinwire.integrate.mesh import init_mesh
from thinwire.lab import zero_comm
from thinwire.lab.cluster import interface_tx_bytes
from thinwire.launch import run_ranks

_VALUES = 1 << 20  # 4 MiB of fp32


def _ops(rank: int, world: int, report: Any) -> int:
    group = init_mesh({"dp": world}, "none", backend=zero_comm.BACKEND).get_group("dp")
    dist.barrier()
    before = interface_tx_bytes("lo") or 0
    x = torch.full((_VALUES,), float(rank))
    dist.all_reduce(x, group=group)
    assert torch.equal(x, torch.full((_VALUES,), float(rank)))
    shard, full = torch.empty(_VALUES // world), torch.empty(_VALUES)
    dist.reduce_scatter_tensor(shard, x, group=group)
    dist.all_gather_into_tensor(full, shard, group=group)
    assert torch.isfinite(full).all()
    if rank == 0:
        dist.send(x, 1, group=group)
        dist.send(torch.tensor([7, 8]), 1, group=group)
    if rank == 1:
        dist.recv(x, 0, group=group)
        assert torch.isfinite(x).all()
        shape = torch.zeros(2, dtype=torch.int64)
        dist.recv(shape, 0, group=group)
        assert shape.tolist() == [7, 8]  # metadata is sent for real
    flag = torch.tensor([float(rank)])
    dist.all_reduce(flag, group=group)
    assert flag.item() == sum(range(world))  # and so is what is as small as a loss
    dist.barrier()
    return (interface_tx_bytes("lo") or 0) - before


def test_tokens_replace_payloads() -> None:
    sent = run_ranks(_ops, 2, timeout=60)
    # All ops together hold 20 MiB; tokens, metadata and barriers are a few packets each.
    assert max(sent) < _VALUES

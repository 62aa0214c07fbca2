"""What the ranks of the tests do."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from support import gaussian, inputs
from thinwire import GroupOptions, ThinwireGroup, compress_fsdp, init_mesh
from thinwire.collectives.topology import Topology
from thinwire.group import BACKEND
from thinwire.mpi import buffers
from thinwire.mpi.process import process
from thinwire.policy import from_dict
from thinwire.torch_names import all_gather_single, reduce_scatter_single

FEW = (("int8", "two_shot", None), ("exponent", "two_shot", None), ("int8", "hierarchical", "aabb"))
"""Codec, algorithm, hosts."""
MORE = (
    *(
        (codec, "two_shot", None)
        for codec in ("bf16", "int4:block=128,round=stochastic", "mpc:dim=1", "topk")
    ),
    ("exponent", "recursive_doubling", None),
)
NUMELS = (1, 126, 4099, 600_000)
"""The last one, which goes in rounds, is for those of ``FEW`` alone."""
_RANKS = 4


def group_over(
    backend: str, codec: str, timeout_s: float = 60.0, algorithm: str = "two_shot", hosts: str | None = None
) -> ThinwireGroup:
    settings: dict[str, Any] = {
        "all": codec,
        "min_nbytes": 0,
        "allow_without_feedback": True,
        "algorithm": algorithm,
    }
    made = dist.new_group(
        backend=BACKEND,
        pg_options=GroupOptions(
            policy=from_dict({"axis": {"dp": settings}}, "test"),
            axis="dp",
            backend=backend,
            lanes=1,
            seed=3,
            hosts=None if hosts is None else Topology.of_hosts(hosts),
        ),
        timeout=timedelta(seconds=timeout_s),
    )
    assert isinstance(made, ThinwireGroup)
    return made


def all_ops(group: ThinwireGroup, rank: int, world: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """One call of each op; what this rank ends with."""
    x = inputs(world, numel, dtype)[rank]
    reduced, mean = x.clone(), x.clone()
    dist.all_reduce(reduced, group=group)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    shares = torch.cat([gaussian(p + 100 * rank, numel, dtype) for p in range(world)])
    scattered = torch.empty(numel, dtype=dtype)
    reduce_scatter_single(scattered, shares, group=group)
    gathered = torch.empty(world * numel, dtype=dtype)
    all_gather_single(gathered, x, group=group)
    spread = x.clone()
    dist.broadcast(spread, group=group, group_src=1)
    # Rank r sends p + r values to rank p.
    leaving = [gaussian(rank * 10 + p, p + rank, dtype) for p in range(world)]
    arriving = [torch.empty(rank + p, dtype=dtype) for p in range(world)]
    out, inp = torch.cat(arriving), torch.cat(leaving)
    dist.all_to_all_single(out, inp, [len(a) for a in arriving], [len(v) for v in leaving], group=group)
    received = torch.empty(numel, dtype=dtype)
    works = [
        dist.irecv(received, group=group, group_src=(rank - 1) % world),
        dist.isend(x, group=group, group_dst=(rank + 1) % world),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return [reduced, mean, scattered, gathered, spread, out, received]


def against_gloo(
    rank: int, world: int, ways: Sequence[tuple[str, str, str | None]], report: Callable[[Any], None]
) -> list[str]:
    """Every op in several ways, over MPI and over gloo: where the bits differ."""
    differ = []
    for way in ways:
        codec, algorithm, hosts = way
        ours, theirs = (
            group_over(backend, codec, algorithm=algorithm, hosts=hosts) for backend in ("mpi", "gloo")
        )
        for numel in NUMELS:
            for dtype in (torch.float32, torch.bfloat16):
                if codec == "bf16" and dtype == torch.bfloat16:
                    continue  # passes through: sums of each one's own
                if numel == NUMELS[-1] and (dtype != torch.float32 or way not in FEW):
                    continue
                found = [all_ops(group, rank, world, numel, dtype) for group in (ours, theirs)]
                for i, (a, b) in enumerate(zip(*found, strict=True)):
                    if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                        differ.append(f"{codec} {algorithm} numel={numel} {dtype}: op {i}")
        if ours.traffic.by_axis()["dp"]["wire_bytes"] != theirs.traffic.by_axis()["dp"]["wire_bytes"]:
            differ.append(f"{codec}: bytes")
        for group in (ours, theirs):
            dist.destroy_process_group(group)
    return differ


def passing_through(rank: int, world: int, report: Callable[[Any], None]) -> None:
    """MPI's own operations; raises AssertionError for a wrong one."""
    buffers.PIECE_NBYTES = 1000  # so that pieces are seen
    total = world * (world + 1) // 2
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.int8,
    ):
        for numel in (0, 1, 999):
            x = torch.full((numel,), rank + 1, dtype=dtype)
            dist.all_reduce(x)
            assert x.tolist() == [total] * numel, (dtype, numel)
        x = torch.tensor([rank + 1, 5 - rank], dtype=dtype)
        for op, expected in (
            (dist.ReduceOp.MIN, [1, 6 - world]),
            (dist.ReduceOp.MAX, [world, 5]),
            (dist.ReduceOp.PRODUCT, [24, 120]),
        ):
            y = x.clone()
            dist.all_reduce(y, op)
            assert y.tolist() == expected, (dtype, op)
    y = torch.full((3, 4), float(rank))[:, ::2]
    dist.all_reduce(y, dist.ReduceOp.AVG)
    assert y.tolist() == [[1.5, 1.5]] * 3, "not contiguous"
    flag = torch.tensor([rank == 2, False])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    assert flag.tolist() == [True, False]

    out = torch.empty(2)
    reduce_scatter_single(out, torch.arange(2.0 * world) + rank)
    assert out.tolist() == [4.0 * (2 * rank) + 6, 4.0 * (2 * rank + 1) + 6]
    uneven = torch.empty(rank + 1)
    dist.reduce_scatter(uneven, [torch.full((p + 1,), float(p)) for p in range(world)])
    assert uneven.tolist() == [4.0 * rank] * (rank + 1)

    gathered = torch.empty(world * 3, dtype=torch.int32)
    all_gather_single(gathered, torch.full((3,), rank, dtype=torch.int32))
    assert gathered.tolist() == [p for p in range(world) for _ in range(3)]
    parts = [torch.empty(2, 2) for _ in range(world)]
    dist.all_gather(parts, torch.full((2, 2), float(rank)))
    assert [p[1, 1].item() for p in parts] == [0, 1, 2, 3]
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, {"rank": rank})
    assert everything[-1] == {"rank": world - 1}

    for numel in (0, 1, 5000):
        x = torch.full((numel,), float(rank))
        dist.broadcast(x, 2)
        assert x.tolist() == [2.0] * numel
    x = torch.full((700,), float(rank))
    dist.reduce(x, 1)
    assert x[0].item() == (6.0 if rank == 1 else float(rank)), "reduce"
    got = [torch.empty(2) for _ in range(world)] if rank == 3 else None
    dist.gather(torch.full((2,), float(rank)), got, dst=3)
    assert got is None or [g[0].item() for g in got] == [0, 1, 2, 3]
    mine = torch.empty(3)
    dist.scatter(mine, [torch.full((3,), 10.0 + p) for p in range(world)] if rank == 0 else None, src=0)
    assert mine.tolist() == [10.0 + rank] * 3

    leaving = torch.cat([torch.full((p,), float(rank)) for p in range(world)])
    arriving = torch.empty(world * rank)
    dist.all_to_all_single(arriving, leaving, [rank] * world, list(range(world)))
    assert arriving.tolist() == [float(p) for p in range(world) for _ in range(rank)]

    if rank == 0:
        senders = set()
        for _ in range(world - 1):
            x = torch.empty(2)
            senders.add(dist.recv(x))
        assert senders == {1, 2, 3}
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()

    futures = []
    for i in range(5):
        work = dist.all_reduce(torch.full((100,), float(i)), async_op=True)
        assert work is not None
        futures.append(work.get_future())
    assert [f.wait()[0][0].item() for f in futures] == [0.0, 4.0, 8.0, 12.0, 16.0], (
        "nobody waits but for futures"
    )

    odd = dist.new_group([1, 3])
    if rank in (1, 3):
        x = torch.full((10,), float(rank))
        dist.all_reduce(x, group=odd)
        assert x[0].item() == 4.0
        dist.broadcast(x, 3, group=odd)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = torch.full((10,), float(rank))
    dist.all_reduce(x, group=mesh.get_group("b"))
    assert x[0].item() == (1.0 if rank < 2 else 5.0)
    x = torch.full((10,), float(rank))
    dist.all_reduce(x, group=mesh.get_group("a"))
    assert x[0].item() == (2.0 if rank % 2 == 0 else 4.0)
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(30, 20))
    model(torch.full((2, 30), float(rank))).sum().backward()
    grad = model.module.weight.grad
    assert grad is not None
    assert torch.allclose(grad, torch.full_like(grad, 3.0))


def trained_by_fsdp(backend: str) -> list[Tensor]:
    """This rank's shards after two steps of FSDP2: parameters in bf16, gradients in int4 with feedback."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.Tanh(), torch.nn.Linear(33, 20))
    rank, world = dist.get_rank(), dist.get_world_size()
    policy = from_dict(
        {
            "axis": {
                "dp": {"reduce": "int4:block=32", "min_nbytes": 0},
                "zero": {"gather": "bf16", "min_nbytes": 0},
            }
        },
        "test",
    )
    mesh = init_mesh({"dp": world}, policy, options=GroupOptions(backend=backend, lanes=1))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    compress_fsdp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(gaussian(10 * step + rank, 4 * 20).view(4, 20)).square().mean().backward()
        optimizer.step()
    return [p.detach().to_local().clone() for p in model.parameters() if isinstance(p, DTensor)]


def fsdp_against_gloo(rank: int, world: int, report: Callable[[Any], None]) -> bool:
    ours, theirs = trained_by_fsdp("mpi"), trained_by_fsdp("gloo")
    return len(ours) == 4 and all(map(torch.equal, ours, theirs))


def both(rank: int, world: int, report: Callable[[Any], None]) -> list[str]:
    passing_through(rank, world, report)
    return against_gloo(rank, world, FEW, report)


def fault(rank: int, world: int, what: str, codec: str, report: Callable[[Any], None]) -> None:
    """Rank 1 does ``what`` while the others wait for it in an all-reduce; they report what they see."""
    group = group_over("mpi", codec, timeout_s=5.0)
    dist.all_reduce(torch.ones(5000), group=group)
    report(os.getpid())
    if rank == 1:
        match what:
            case "raise":
                raise ValueError("rank 1 has had enough")
            case "exit":
                sys.exit(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "late":
                # Elsewhere in the program for longer than the time-out, and for longer than anybody waits.
                time.sleep(60)
    try:
        dist.all_reduce(torch.ones(5000), group=group)
    except Exception as e:
        report(f"{type(e).__name__}: {e}")
        raise


def level(rank: int, world: int, report: Callable[[Any], None]) -> int:
    passing_through(rank, world, report)
    group = group_over("mpi", "int8")
    all_ops(group, rank, world, 4099, torch.float32)
    own = process()
    return int(own.mpi.Query_thread() - own.mpi.THREAD_SERIALIZED)


def rank_and_size(rank: int, world: int, report: Callable[[Any], None]) -> tuple[int, int]:
    return rank, world

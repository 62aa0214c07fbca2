"""Many ranks on one machine: every collective with every codec of the presets, and what a rank of a group costs.

No time of a call is measured: on a few cores 64 ranks mostly wait for each other. What is: that all ranks end with the same
bits, how far those are from the exact result, and what making a group takes of time, threads, sockets and memory.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import collectives as c
from ...codecs import Codec, LowRank, parse
from ...collectives.frames import equal_parts
from ...collectives.low_rank import Matrix
from ...collectives.options import Algorithm, CallOptions
from ...collectives.topology import Topology
from ...collectives.traffic import Message
from ...collectives.transport import Metered
from ...group import GroupOptions, ThinwireGroup
from ...launch import run_ranks
from ...presets import list_presets, load

PER_HOST = 8
_ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {
    "all_reduce": ("two_shot", "ring", "hierarchical", "recursive_doubling"),
    "reduce_scatter": ("two_shot", "ring", "hierarchical"),
    "all_gather": ("two_shot", "hierarchical"),
    "all_to_all": ("two_shot", "hierarchical"),
    "broadcast": ("two_shot",),
    "send_recv": ("two_shot",),
}
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Usage:
    """What a process holds. memory: proportional set size in MiB: shared pages count by their share."""

    threads: int
    sockets: int
    memory_mib: float

    @staticmethod
    def now() -> Usage:
        files = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        sockets = sum(os.path.lexists(f) and os.readlink(f).startswith("socket:") for f in files)
        with open("/proc/self/smaps_rollup") as lines:
            kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return Usage(len(os.listdir("/proc/self/task")), sockets, kib / 1024)


@dataclass
class WideResult:
    """Of one number of ranks; usage: the largest of any rank, before there is a thinwire group and when all has run.

    setup_s: of a group with codecs, the slowest rank's. errors: "OP CODEC ALGORITHM" -> relative L2 error; differ: cases in
    which ranks that should have the same bits have others.
    """

    ranks: int
    setup_s: float
    before: Usage
    after_setup: Usage
    after: Usage
    errors: dict[str, float] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def preset_codecs() -> list[str]:
    """The specs of all codecs that a preset names, for fp32 messages."""
    names = [name if name != "naive-zfp" else "naive-zfp:8" for name in list_presets()]
    policies = [load(name) for name in names]
    found = {choice.float32 for p in policies for axis in p.axes.values() for choice in axis.choices()}
    return sorted({"none", *(str(codec) for codec in found if isinstance(codec, Codec))})


def run_wide(
    ranks: int, numel: int, codecs: Sequence[str], on_progress: Callable[[str], None] = lambda _: None
) -> WideResult:
    """All cases with so many ranks, eight to a host (in name only). numel: values of a message."""
    results = run_ranks(
        _rank,
        ranks,
        numel,
        tuple(codecs),
        timeout=_TIMEOUT_S * 2,
        collective_timeout=_TIMEOUT_S,
        on_message=lambda _, text: on_progress(text),
        preload=("thinwire.lab.bench.wide_preload",),
    )
    first: WideResult = results[0]
    for moment in ("before", "after_setup", "after"):
        every = [getattr(result, moment) for result in results]
        setattr(
            first,
            moment,
            Usage(*(max(getattr(u, name) for u in every) for name in ("threads", "sockets", "memory_mib"))),
        )
    first.setup_s = max(result.setup_s for result in results)
    return first


def _rank(
    rank: int, world: int, numel: int, codecs: tuple[str, ...], report: Callable[[Any], None]
) -> WideResult:
    topology = Topology.of_hosts([str(r // PER_HOST) for r in range(world)])
    dist.barrier()
    before, start = Usage.now(), time.perf_counter()
    group = dist.new_group(
        backend="thinwire",
        pg_options=GroupOptions("balanced", axis="dp", hosts=topology, feedback_by_caller=True),
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    assert isinstance(group, ThinwireGroup)
    result = WideResult(world, time.perf_counter() - start, before, Usage.now(), before)
    for op, algorithms in _ALGORITHMS.items():
        for spec in codecs:
            for algorithm in algorithms:
                name = f"{op} {spec} {algorithm}"
                if rank == 0:
                    report(f"{world} ranks: {name}")
                options = CallOptions(algorithm=algorithm, topology=topology, seed=1)
                got, exact = _case(op, parse(spec), group, numel, options)
                _judge(result, name, op, got, exact)
    _judge(result, "all_reduce lowrank", "all_reduce", *_low_rank(group, numel, topology))
    result.after = Usage.now()
    return result


def _input(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def _case(
    op: str, codec: Codec, group: ThinwireGroup, numel: int, options: CallOptions
) -> tuple[Tensor, Tensor]:
    """What the op gives and what it should give."""
    rank, world = group.rank(), group.size()
    x, each = _input(rank, numel), numel // world
    total = x.double()
    dist.all_reduce(total)
    before, after = (rank - 1) % world, (rank + 1) % world
    share, whole = slice(rank * each, (rank + 1) * each), torch.empty(each * world)

    def call(t: Metered) -> tuple[Tensor, Tensor]:
        if op == "all_reduce":
            c.all_reduce(x, codec, t, options)
            return x, total
        if op == "reduce_scatter":
            return c.reduce_scatter(x, codec, t, c.Chunks(each * world, world, each), options), total[share]
        if op == "all_gather":
            c.all_gather(x[:each], equal_parts(whole, world), codec, t, options)
            return whole, torch.cat([_input(r, numel)[:each] for r in range(world)])
        if op == "all_to_all":
            c.all_to_all(
                equal_parts(x[: each * world], world), equal_parts(whole, world), codec, t, options, even=True
            )
            return whole, torch.cat([_input(r, numel)[share] for r in range(world)])
        if op == "broadcast":
            c.broadcast(x, codec, t, 0, options)
            return x, _input(0, numel)
        # One after the other around the ring, so that no rank waits for one that waits for it.
        got = torch.empty(numel)
        if rank % 2 == 0:
            c.send(x, codec, t, after)
        c.recv(got, codec, t, before)
        if rank % 2:
            c.send(x, codec, t, after)
        return got, _input(before, numel)

    found: list[tuple[Tensor, Tensor]] = []
    kind = "send" if op == "send_recv" else op
    message = Message("dp", kind, "gradient", str(codec), "float32", numel * 4)
    group.submit(message, lambda t: found.append(call(t)), None).wait()
    return found[0]


def _low_rank(group: ThinwireGroup, numel: int, topology: Topology) -> tuple[Tensor, Tensor]:
    """The two rounds of PowerSGD on a message that is a matrix of rank 1, which they approximate without error."""
    side = int(numel**0.5)
    codec = LowRank()
    left, right = _input(0, side), _input(1, side)
    x = torch.outer(left, right).reshape(-1) * (group.rank() + 1)
    world = group.size()
    exact = torch.outer(left, right).reshape(-1).double() * (world * (world + 1) / 2)
    q = torch.nn.functional.normalize(_input(2, codec.rank * side).view(codec.rank, side))
    options = CallOptions(algorithm="hierarchical", topology=topology)
    message = Message("dp", "all_reduce", "gradient", str(codec), "float32", numel * 4)
    matrices = [Matrix(0, side, side, q)]
    group.submit(message, lambda t: c.low_rank_all_reduce(x, matrices, t, options), x).wait()
    return x, exact


def _judge(result: WideResult, name: str, op: str, got: Tensor, exact: Tensor) -> None:
    """Errors over all ranks, and whether those that should have the same bits have them."""
    squares = torch.stack([(got.double() - exact).square().sum(), exact.double().square().sum()])
    dist.all_reduce(squares)
    result.errors[name] = float((squares[0] / squares[1]).sqrt())
    if op in ("all_reduce", "all_gather", "broadcast"):
        mine = torch.tensor([zlib.crc32(got.numpy().tobytes())])
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        if len({int(digest) for digest in every}) > 1:
            result.differ.append(name)

"""What each rank of the benchmark does: the contenders in turns, each call timed, counted and compared."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....collectives.traffic import PASS_THROUGH, gloo_nbytes, raw_nbytes
from ....group import GroupOptions, ThinwireGroup
from ....integrate.mesh import init_mesh
from ..codec import sample
from .cases import OPS, Op
from .plain_mpi import PlainMpi
from .plan import Contender, Plan

Group = dist.ProcessGroup | PlainMpi

_COLUMNS = 1024  # of a sample: the scale changes from row to row


@dataclass
class Measured:
    """What one rank has measured of one contender with one message.

    nbytes: of the message. seconds: of a call, one for each repeat. wire_bytes: sent in a call. sent_as: the codecs in use.
    error_sq, exact_sq: sums of squares of (result - exact) and of the exact result. digests: of the bits of two calls.
    """

    op: str
    nbytes: int
    contender: str
    seconds: list[float] = field(default_factory=list)
    wire_bytes: float = 0.0
    sent_as: str = PASS_THROUGH
    error_sq: float = 0.0
    exact_sq: float = 0.0
    digests: tuple[str, ...] = ()

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure_rank(rank: int, world: int, plan: Plan, report: Callable[[Any], None]) -> list[Measured]:
    """All cases of the plan. Rank 0 reports (cases done, cases in all, what is next)."""
    groups: dict[str, Group] = {}
    for contender in plan.contenders:
        if contender.group not in groups:
            groups[contender.group] = _group(contender, world, contender.over or plan.transport)
    found: list[Measured] = []
    cases = plan.cases()
    for done, (op, nbytes) in enumerate(cases):
        if rank == 0:
            report((done, len(cases), f"{op}, {nbytes} bytes"))
        found += _Case(plan, OPS[op], nbytes, rank, world).measure(groups)
    if rank == 0:
        report((len(cases), len(cases), "done"))
    return found


def _group(contender: Contender, world: int, transport: str) -> Group:
    if contender.policy is None:
        if transport == "mpi":
            return PlainMpi()
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return group
    return init_mesh({"dp": world}, contender.policy, options=GroupOptions(backend=transport)).get_group("dp")


class _Case:
    """One op on a message of one size: its tensors, and the contenders that run it."""

    def __init__(self, plan: Plan, op: Op, nbytes: int, rank: int, world: int) -> None:
        self._plan, self._op, self._rank, self._world = plan, op, rank, world
        dtype = plan.torch_dtype
        numel = op.numel(nbytes, dtype.itemsize, world)
        self._nbytes = numel * dtype.itemsize
        self._in_numel = numel // world if op.splits_in else numel
        self._x = self._input(rank)
        # A tensor for each call of a sample: in place, the second call would otherwise sum sums.
        out_numel = numel // world if op.splits_out else numel
        self._outs = [torch.empty(out_numel, dtype=dtype) for _ in range(plan.calls)]
        self._half = torch.empty(self._in_numel, dtype=torch.bfloat16)
        self._half_out = torch.empty(out_numel, dtype=torch.bfloat16)

    def measure(self, groups: dict[str, Group]) -> list[Measured]:
        plan, op = self._plan, self._op
        found = {c.name: Measured(op.name, self._nbytes, c.name) for c in plan.contenders}
        exact = op.exact(lambda rank: self._input(rank).double(), self._rank, self._world)
        for repeat in range(-plan.warmup, plan.repeats):
            if repeat == 0:
                for group in groups.values():
                    if isinstance(group, ThinwireGroup):
                        group.traffic.reset()
            for contender in plan.turn(repeat):
                into = found[contender.name]
                seconds = self._sample(contender, groups[contender.group])
                if repeat >= 0:
                    into.seconds.append(seconds)
                if repeat == plan.repeats - 1:
                    into.error_sq = float((self._outs[-1].double() - exact).square().sum())
                    into.exact_sq = float(exact.square().sum())
        for contender in plan.contenders:
            self._count(contender, groups[contender.group], found[contender.name])
        if plan.check:
            for contender in plan.contenders:
                group = groups[contender.group]
                found[contender.name].digests = tuple(self._digest(contender, group) for _ in range(2))
        return list(found.values())

    def _input(self, rank: int) -> Tensor:
        rows = sample(-(-self._in_numel // _COLUMNS), _COLUMNS, seed=rank)
        return rows.reshape(-1)[: self._in_numel].to(self._plan.torch_dtype)

    def _sample(self, contender: Contender, group: Group) -> float:
        """Seconds of a call, the mean of a sample's."""
        for out in self._outs:
            if self._op.in_place:
                out.copy_(self._x)
            else:
                out.fill_(torch.nan)  # a result of the contender before must not pass for this one's
        dist.barrier()
        start = time.perf_counter()
        for out in self._outs:
            self._call(contender, group, out)
        return (time.perf_counter() - start) / len(self._outs)

    def _call(self, contender: Contender, group: Group, out: Tensor) -> None:
        if not contender.cast:
            self._run(group, out, self._x)
            return
        if self._op.in_place:
            self._half_out.copy_(out)
        else:
            self._half.copy_(self._x)
        self._run(group, self._half_out, self._half)
        out.copy_(self._half_out)

    def _run(self, group: Group, out: Tensor, x: Tensor) -> None:
        if isinstance(group, PlainMpi):
            group.call(self._op.name, out, x)
        else:
            self._op.call(out, x, group)

    def _count(self, contender: Contender, group: Group, into: Measured) -> None:
        """Bytes of the timed calls: counted at the transport; for a plain group what gloo sends; for MPI, which does not
        tell, the least that the op takes."""
        if not isinstance(group, ThinwireGroup):
            nbytes = self._nbytes // self._plan.torch_dtype.itemsize * 2 if contender.cast else self._nbytes
            op = "send" if self._op.name == "send_recv" else self._op.name
            sent = gloo_nbytes if isinstance(group, dist.ProcessGroup) else raw_nbytes
            into.wire_bytes = sent(op, nbytes, self._world)
            return
        entries = {m: e for m, e in group.traffic.entries().items() if m.role != "control"}
        calls = self._plan.repeats * self._plan.calls
        into.wire_bytes = sum(e.tally.wire_bytes for e in entries.values()) / calls
        into.sent_as = ", ".join(sorted({m.codec for m in entries}))

    def _digest(self, contender: Contender, group: Group) -> str:
        """Of the bits of a result. Seeds depend on the number of the call: the count begins anew for each."""
        if isinstance(group, ThinwireGroup):
            group.calls.zero_()
        self._sample(contender, group)
        values = self._outs[0].view(torch.uint8).numpy()
        return hashlib.blake2b(values.data, digest_size=16).hexdigest()

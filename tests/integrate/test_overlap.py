"""Gradients travel while the backward pass runs, on threads of their own, and the bits do not depend on it.

No clock is compared with a limit: the first layer's gradient, the last of a backward pass, is held back until the first
bucket has arrived. A reduction that needed the thread of the backward pass, or its end, would never arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from support import TIMEOUT_S, gaussian, same
from thinwire import GradientSync, GroupOptions, ThinwireGroup, compress_ddp
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")
WIDTH, LAYERS = 64, 6
POLICY = from_dict({"axis": {"dp": {"reduce": "int4:block=32", "feedback": True, "min_nbytes": 0}}}, "test")
PARTS = {"thinwire::encode", "thinwire::wire", "thinwire::decode"}


class Net(nn.Module):
    """before_last: called in a backward pass before the gradients of the first layer's parameters are there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.before_last: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0 and x.requires_grad:
                x.register_hook(lambda _: self.before_last())
            x = x.tanh()
        return x.square().mean()


class Recorded(ThinwireGroup):
    """A group that keeps the Works of its compressed calls."""

    def submit(self, *args: Any, **kwargs: Any) -> dist.Work:
        work = super().submit(*args, **kwargs)
        self.__dict__.setdefault("works", []).append(work)
        return work


def group_of(world: int, *, inline: bool) -> Any:
    options = GroupOptions(policy=POLICY, axis="dp", feedback_by_caller=True, inline=inline)
    return dist.new_group(list(range(world)), backend="overlap-test", pg_options=options)


class Trains:
    """Backward passes under GradientSync or DDP."""

    def __init__(self, kind: str, world: int, *, inline: bool = False) -> None:
        self.net, self.group = Net(), group_of(world, inline=inline)
        self.model: Any = self.net
        self.sync: GradientSync | None = None
        if kind == "ddp":
            self.model = DistributedDataParallel(self.net, process_group=self.group, bucket_cap_mb=0.02)
            compress_ddp(self.model)
        else:
            named = self.net.named_parameters()
            self.sync = GradientSync(
                named, self.group, sharded=kind == "sharded", bucket_bytes=4 * WIDTH * WIDTH
            )

    def step(self, rank: int, step: int) -> list[Tensor]:
        loss = self.model(gaussian(100 * step + rank, 8 * WIDTH).view(8, WIDTH))
        if self.sync is not None:
            self.sync.start()
        with record_function("backward"):
            loss.backward()
        if self.sync is not None:
            self.sync.finish()
            return [bucket.grad.clone() for bucket in self.sync.buckets]
        found = [p.grad.clone() for p in self.net.parameters() if p.grad is not None]
        self.net.zero_grad()
        return found


def _overlaps(rank: int, world: int, report: Any) -> None:
    from thinwire.group import register

    register("overlap-test", Recorded)
    for kind in ("ddp", "sync", "sharded"):
        trains = Trains(kind, world)
        results = [trains.step(rank, 0)]  # after which DDP makes its buckets anew
        works = trains.group.works
        before = len(works)

        def first_has_arrived(works: list[dist.Work] = works, before: int = before) -> None:
            assert len(works) > before, "nothing was launched during the backward pass"
            works[before].wait()

        trains.net.before_last = first_has_arrived
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as trace:
            results.append(trains.step(rank, 1))
        assert len(works) - before > 2, "several buckets"
        events = trace.events()
        assert events is not None
        (backward,) = (e for e in events if e.name == "backward")
        inside = [
            e
            for e in events
            if e.name in PARTS
            and backward.time_range.start < e.time_range.start
            and e.time_range.end < backward.time_range.end
        ]
        assert {e.name for e in inside} == PARTS, (
            "encoded, sent and decoded before the backward pass had ended"
        )
        assert all(e.thread != backward.thread for e in inside)

        trains.net.before_last = lambda: None
        results.append(trains.step(rank, 2))
        in_order = Trains(kind, world, inline=True)
        for step, expected in enumerate(results):
            assert all(map(same, expected, in_order.step(rank, step))), (kind, step)


def test_reductions_run_beside_the_backward_pass() -> None:
    """Report torchft 209: a quantised path that blocked its caller."""
    run_ranks(_overlaps, 2, timeout=TIMEOUT_S)

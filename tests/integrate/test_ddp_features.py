"""DDP's features under compression: what DDP does without it, up to what the codec loses and the residuals hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from support import TIMEOUT_S, each
from thinwire import GroupOptions, compress_ddp
from thinwire.errors import UnsupportedError
from thinwire.integrate.ddp import DdpCompression
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")
STEPS = 4
Gradients = dict[str, Tensor]


def whole(*shape: int, seed: int) -> Tensor:
    """Small whole numbers: sums of their products are exact in fp32, in whatever order they are added."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).relu()).relu())  # type: ignore[no-any-return]


class Case:
    """A feature: the model, what DDP is told, and the backward passes of a step."""

    settings: ClassVar[Mapping[str, Any]] = {}
    hooks: ClassVar[tuple[bool, ...]] = (False, True)  # without compress_ddp, with it

    def __init__(self) -> None:
        self.scale: Callable[[], float] | None = None

    def module(self) -> nn.Module:
        return self.filled(Net())

    @staticmethod
    @torch.no_grad()
    def filled(module: nn.Module) -> nn.Module:
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(whole(*parameter.shape, seed=i))
        return module

    def loss(self, y: Tensor) -> Tensor:
        return (y.float() * whole(*y.shape, seed=7)).sum()

    def backward(self, model: Any, rank: int, number: int) -> None:
        self.loss(model(whole(4, 8, seed=100 * number + rank))).backward()

    def step(self, model: Any, rank: int, number: int) -> Gradients:
        model.zero_grad()
        self.backward(model, rank, number)
        return {name: p.grad.to_dense().clone() for name, p in model.named_parameters() if p.grad is not None}

    def train(self, model: Any, rank: int) -> dict[int, Gradients]:
        """The gradients of the steps that this rank takes part in, by their number."""
        return {number: self.step(model, rank, number) for number in range(STEPS)}


class RebuiltBuckets(Case):
    """Parameters are made in another order than they are used in."""

    # pytorch 48670, pytorch 48867
    class Reordered(Net):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.third, self.first, self.second = nn.Linear(12, 6), nn.Linear(8, 12), nn.Linear(12, 12)

    def module(self) -> nn.Module:
        return self.filled(self.Reordered())


class Accumulation(Case):
    # pytorch 69031
    def backward(self, model: Any, rank: int, number: int) -> None:
        for i in range(3):
            with model.no_sync() if i < 2 else nullcontext():
                super().backward(model, rank, 10 * number + i)


class BucketView(Accumulation):
    settings: ClassVar = {"gradient_as_bucket_view": True}


class Unused(Case):
    """Branches that all ranks use, or one of them, or in some steps, or never, none."""

    # pytorch 124193
    settings: ClassVar = {"find_unused_parameters": True}

    class Branches(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other, self.never = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x: Tensor, other: bool) -> Tensor:  # type: ignore[override]
            middle = self.other if other else self.second
            return self.third(middle(self.first(x).relu()).relu())  # type: ignore[no-any-return]

    def module(self) -> nn.Module:
        return self.filled(self.Branches())

    def backward(self, model: Any, rank: int, number: int) -> None:
        other = ((False, True), (False, False), (True, True), (True, False))[number % 4][rank]
        self.loss(model(whole(4, 8, seed=100 * number + rank), other)).backward()


class UnusedAccumulation(Unused):
    def backward(self, model: Any, rank: int, number: int) -> None:
        for i in range(2):
            with model.no_sync() if i < 1 else nullcontext():
                super().backward(model, rank, number + i)


class StaticGraph(Case):
    """One layer is used twice and checkpointed with reentrance, another never."""

    settings: ClassVar = {"static_graph": True}

    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu()
            for _ in range(2):
                h = checkpoint(self.second, h, use_reentrant=True)
            return self.third(h.relu())  # type: ignore[no-any-return]

    def module(self) -> nn.Module:
        return self.filled(self.Twice())


class Checkpointing(Case):
    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.first, x, use_reentrant=False).relu()
            return self.third(checkpoint(self.second, h, use_reentrant=False).relu())  # type: ignore[no-any-return]

    def module(self) -> nn.Module:
        return self.filled(self.Net())


class Autocast(Case):
    def backward(self, model: Any, rank: int, number: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(whole(4, 8, seed=100 * number + rank))
        self.loss(y).backward()


class LossScale(Case):
    """A step overflows on one rank: the scaler skips it, and the residuals forget it."""

    # pytorch 55031
    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.scale = self.scaler.get_scale

    def step(self, model: Any, rank: int, number: int) -> Gradients:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(whole(4, 8, seed=100 * number + rank))
        overflow = number == 1 and rank == 1
        self.scaler.scale(self.loss(y) * (torch.inf if overflow else 1.0)).backward()
        self.scaler.unscale_(optimizer)
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        alone = model.process_group.size() == 1
        assert (self.scaler.get_scale() < before) == (overflow if alone else number == 1)
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class MetaDevice(Case):
    def module(self) -> nn.Module:
        with torch.device("meta"):
            model = Net()
        return self.filled(model.to_empty(device="cpu"))


class MixedDtypes(Case):
    # pytorch 196996
    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.second.to(torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.second(self.first(x).relu().bfloat16()).relu()
            return self.third(h.float())  # type: ignore[no-any-return]

    def module(self) -> nn.Module:
        return self.filled(self.Net())


class Frozen(Case):
    def module(self) -> nn.Module:
        model = Net()
        model.first.requires_grad_(False)
        model.third.bias.requires_grad_(False)
        return self.filled(model)


class Tied(Case):
    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.tied = nn.Linear(12, 12)
            self.tied.weight = self.second.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self.second(self.first(x).relu()).relu()
            return self.third(self.tied(h).relu())  # type: ignore[no-any-return]

    def module(self) -> nn.Module:
        return self.filled(self.Net())


class Sparse(Case):
    """A sparse gradient passes as it is."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding(5, 12, sparse=True)  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x.long() + 2).sum(1)).relu())  # type: ignore[no-any-return]

    def module(self) -> nn.Module:
        return self.filled(self.Net())


class Join(Case):
    """One rank runs out of inputs, and takes part with zeros until the other does."""

    # pytorch 61020
    first_out = 0

    def join(self, model: Any) -> Any:
        return model.join()

    def train(self, model: Any, rank: int) -> dict[int, Gradients]:
        found = {}
        with self.join(model):
            for number in range(2 if rank == self.first_out else STEPS):
                found[number] = self.step(model, rank, number)
        return {**found, STEPS: self.step(model, rank, STEPS)}


class JoinDivided(Join):
    """The average is over the ranks that have inputs left."""

    hooks: ClassVar = (False,)

    def join(self, model: Any) -> Any:
        return model.join(divide_by_initial_world_size=False)


class JoinUnused(Join, Unused):
    first_out = 1


class JoinAccumulation(Join, Accumulation):
    first_out = 1


class Compiled(Case):
    # torch.compile cuts the graph at buckets, and refuses any that are smaller than the first one's 1 MiB.
    settings: ClassVar = {"bucket_cap_mb": 1}

    def module(self) -> nn.Module:
        model = super().module()
        model.compile(backend="aot_eager")
        return model


FAST: list[type[Case]] = [
    Case, RebuiltBuckets, Accumulation, BucketView, Unused, UnusedAccumulation, StaticGraph, Checkpointing, Autocast,
    LossScale, MetaDevice, MixedDtypes, Frozen, Tied, Sparse, Join, JoinDivided, JoinUnused, JoinAccumulation,
]  # fmt: skip


class Groups:
    """Groups of one policy each, and one for each rank alone."""

    def __init__(self, rank: int, world: int) -> None:
        self.alone = [dist.new_group([r]) for r in range(world)][rank]
        self.none = self._group("none")
        self.int8 = self._group("int8:block=32")
        self.int4 = self._group("int4:block=32", feedback=True)

    @staticmethod
    def _group(codec: str, feedback: bool = False) -> Any:
        dp = {"reduce": codec, "feedback": feedback, "min_nbytes": 64}
        options = GroupOptions(policy=from_dict({"axis": {"dp": dp}}, "test"), feedback_by_caller=True)
        return dist.new_group(backend="thinwire", pg_options=options)


def wrapped(case: Case, group: dist.ProcessGroup | None) -> DistributedDataParallel:
    """Small buckets, so that there are several."""
    settings = {"bucket_cap_mb": 0.0005, **case.settings}
    return DistributedDataParallel(case.module(), process_group=group, **settings)


def train(
    kind: type[Case], rank: int, group: dist.ProcessGroup | None, hook: bool = False
) -> tuple[dict[int, Gradients], DdpCompression | None]:
    case = kind()
    model = wrapped(case, group)
    compression = compress_ddp(model, scale=case.scale) if hook else None
    return case.train(model, rank), compression


def equal(a: dict[int, Gradients], b: dict[int, Gradients]) -> bool:
    return a.keys() == b.keys() and all(
        a[i].keys() == b[i].keys()
        and all(torch.equal(a[i][n].nan_to_num(), b[i][n].nan_to_num()) for n in a[i])
        for i in a
    )


def on_all_ranks(value: Any, world: int) -> list[Any]:
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, value)
    return everyone


def agree(found: dict[int, Gradients], world: int) -> bool:
    """Whether ranks that took part in the same step have the same gradients."""
    first, *others = on_all_ranks(found, world)
    return all(
        equal({i: first[i] for i in first if i in o}, {i: o[i] for i in o if i in first}) for o in others
    )


def _check(kind: type[Case], groups: Groups, rank: int, world: int) -> None:
    exact = train(kind, rank, None)[0]
    for hook in kind.hooks:
        assert equal(exact, train(kind, rank, groups.none, hook)[0]), f"none is DDP, bit for bit; {hook=}"

    own = train(kind, rank, groups.alone)[0]
    finite = [number for number in exact if all(bool(g.isfinite().all()) for g in exact[number].values())]
    largest = max(
        on_all_ranks(
            max(float(g.nan_to_num(0, 0, 0).abs().max()) for step in own.values() for g in step.values()),
            world,
        )
    )
    for hook in kind.hooks:
        groups.int8.traffic.reset()
        found = train(kind, rank, groups.int8, hook)[0]
        assert agree(found, world)
        assert found.keys() == exact.keys()
        for number, step in found.items():
            assert step.keys() == exact[number].keys(), f"step {number}: gradients of other parameters"
            for name, gradient in step.items():
                if number not in finite:
                    continue
                # Half a step of int8 on each rank; 16-bit gradients are rounded before and after the sum.
                bound = largest * (1 / 254 + (2**-8 if gradient.dtype == torch.bfloat16 else 2**-22))
                error = float((gradient - exact[number][name]).abs().max())
                assert error <= bound, f"step {number}, {name}: {error} > {bound}, {hook=}"
            assert any(m.codec.startswith("int8:block=32") for m in groups.int8.traffic.entries())

    if True not in kind.hooks:
        return
    found, compression = train(kind, rank, groups.int4, hook=True)
    assert agree(found, world)
    assert compression is not None
    # Ends the last step: a skipped one, or gradients that DDP has not used, are taken back.
    compression._begin_step()
    residuals = on_all_ranks({n: r.clone() for n, r in compression.state_dict().items()}, world)
    if len(exact) < STEPS:
        return  # the average went on without this rank
    for name in {name for step in exact.values() for name in step}:
        if f"{name.removeprefix('module.')}@dp" not in residuals[0]:
            assert kind is Sparse, name
            continue
        lost = torch.stack([r[f"{name.removeprefix('module.')}@dp"] for r in residuals]).mean(0)
        total = sum(exact[i][name].float() - found[i][name].float() for i in finite if name in exact[i])
        assert isinstance(total, Tensor)
        in_bf16 = any(exact[i][name].dtype == torch.bfloat16 for i in finite if name in exact[i])
        # What is missing of the sum over steps is what the residuals hold.
        tolerance = len(exact) * largest * (2**-8 if in_bf16 else 2**-20)
        error = float((total.view(-1) - lost).abs().max())
        assert error <= tolerance, f"{name}: {error} of the sum over steps is lost, more than {tolerance}"


def _all(rank: int, world: int, kinds: list[type[Case]], report: Any) -> None:
    groups = Groups(rank, world)
    each(kinds, lambda kind: _check(kind, groups, rank, world))


def test_every_feature_is_ddps_and_no_gradient_is_lost() -> None:
    # VeOmni 1167: averages are DDP's, so nobody divides twice
    run_ranks(_all, 2, FAST, timeout=TIMEOUT_S)


def _divisor(rank: int, world: int, report: Any) -> None:
    model = wrapped(Case(), Groups(rank, world).int4)
    compress_ddp(model)
    with (
        pytest.raises(UnsupportedError, match="divide_by_initial_world_size=False"),
        model.join(divide_by_initial_world_size=False),
    ):
        Case().step(model, rank, 0)


def test_join_with_another_divisor_is_refused() -> None:
    # pytorch 61020
    run_ranks(_divisor, 2, timeout=TIMEOUT_S)


@pytest.mark.slow
def test_compiled_models() -> None:
    run_ranks(_all, 2, [Compiled], timeout=2 * TIMEOUT_S)

"""FSDP2's features under compression: what FSDP2 does without it, up to what the codec loses and the residuals hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from support import TIMEOUT_S, each
from thinwire import compress_fsdp, groups, init_mesh
from thinwire.integrate.fsdp import FsdpCompression
from thinwire.launch import run_ranks
from thinwire.policy import Policy, from_dict

from .test_ddp_features import equal, on_all_ranks, whole

pytestmark = pytest.mark.usefixtures("kernels")
STEPS = 3
WIDTH = 11  # not divisible by 2 ranks
Gradients = dict[str, Tensor]


def policy(codec: str, feedback: bool = False) -> Policy:
    dp = {"reduce": codec, "feedback": feedback, "min_nbytes": 0}
    return from_dict({"axis": {"dp": dp}}, "test")


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, width)
        self.third = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).relu()).relu())  # type: ignore[no-any-return]


class Case:
    """A feature: the model, what ``fully_shard`` is told, and the passes of a step."""

    settings: ClassVar[Mapping[str, Any]] = {}
    eps = 2.0**-22  # of what gradients are rounded to on their way

    def module(self) -> Any:
        return self.filled(Net())

    @staticmethod
    @torch.no_grad()
    def filled(module: nn.Module) -> nn.Module:
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(whole(*parameter.shape, seed=i))
        return module

    def units(self, model: Any) -> list[Any]:
        return [model.second]

    def sharded(self, mesh: DeviceMesh) -> Any:
        model = self.module()
        for unit in (*self.units(model), model):
            fully_shard(unit, mesh=mesh, **self.settings)
        return model

    def loaded(self, model: Any) -> None:
        """After compression, before the first step."""

    def loss(self, y: Tensor) -> Tensor:
        return (y.float() * whole(*y.shape, seed=7)).sum()

    def step(self, model: Any, rank: int, number: int) -> None:
        self.loss(model(whole(4, 8, seed=100 * number + rank))).backward()

    def train(self, model: Any, rank: int) -> dict[int, Gradients]:
        """This rank's part of the gradients of each step."""
        found = {}
        for number in range(STEPS):
            model.zero_grad()
            self.step(model, rank, number)
            found[number] = {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        return found


def local(gradient: Tensor) -> Tensor:
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clone()


class Accumulation(Case):
    """Gradients add up unsharded, then sharded."""

    def step(self, model: Any, rank: int, number: int) -> None:
        for i in range(3):
            if isinstance(model, Net) and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(i == 2)
                model.set_reshard_after_backward(i == 2)
            super().step(model, rank, 10 * number + i)


class HalfAccumulation(Accumulation):
    """Half the gradients of a step are bf16 when they come, and what they add up in is fp32."""

    # pytorch 196996
    settings: ClassVar = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
    eps = 2.0**-7


class HalfReduction(Accumulation):
    settings: ClassVar = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    }
    eps = 2.0**-7


class Unused(Case):
    """A unit that no rank uses in some steps, and a parameter of another that one rank uses."""

    class Branches(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, WIDTH)
            self.extra = nn.Parameter(torch.empty(6))

        def forward(self, x: Tensor, other: bool, extra: bool) -> Tensor:  # type: ignore[override]
            middle = self.other if other else self.second
            y: Tensor = self.third(middle(self.first(x).relu()).relu())
            return y + self.extra if extra else y

    def module(self) -> Any:
        return self.filled(self.Branches())

    def units(self, model: Any) -> list[Any]:
        return [model.second, model.other]

    def sharded(self, mesh: DeviceMesh) -> Any:
        model = super().sharded(mesh)
        model.set_reduce_scatter_unused_params(True)
        return model

    def step(self, model: Any, rank: int, number: int) -> None:
        x = whole(4, 8, seed=100 * number + rank)
        self.loss(model(x, number % 2 == 1, rank == number % 2)).backward()


class Frozen(Case):
    """A unit that is frozen until the last step, and a bias always."""

    def module(self) -> Any:
        model = super().module()
        model.second.requires_grad_(False)
        model.third.bias.requires_grad_(False)
        return model

    def step(self, model: Any, rank: int, number: int) -> None:
        model.second.requires_grad_(number >= 2)
        super().step(model, rank, number)


class MetaDevice(Case):
    """Made without memory, sharded and compressed, and then filled."""

    def module(self) -> Any:
        with torch.device("meta"):
            return Net()

    def loaded(self, model: Any) -> None:
        values = {}
        for i, (name, parameter) in enumerate(model.named_parameters()):
            value = whole(*parameter.shape, seed=i)
            values[name] = (
                distribute_tensor(value, parameter.device_mesh, parameter.placements)
                if isinstance(parameter, DTensor)
                else value
            )
        self.fill(model, values)

    def fill(self, model: Any, values: dict[str, Tensor]) -> None:
        model.load_state_dict(values, assign=True)


class EmptyDevice(MetaDevice):
    def fill(self, model: Any, values: dict[str, Tensor]) -> None:
        model.to_empty(device="cpu")
        model.load_state_dict(values)


class Tied(Case):
    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.tied = nn.Linear(8, WIDTH)
            self.tied.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu() + self.tied(x)
            return self.third(self.second(h).relu())  # type: ignore[no-any-return]

    def module(self) -> Any:
        return self.filled(self.Net())


class Checkpointing(Case):
    """The backward pass gathers parameters once more, for the forward pass that it repeats."""

    settings: ClassVar = {"reshard_after_forward": True}

    class Net(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.first, x, use_reentrant=False).relu()
            return self.third(checkpoint(self.second, h, use_reentrant=False).relu())  # type: ignore[no-any-return]

    def module(self) -> Any:
        return self.filled(self.Net())


class MixedDtypes(Case):
    """A unit in bf16 among fp32 ones."""

    eps = 2.0**-7

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.second.to(torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.second(self.first(x).relu().bfloat16()).relu()
            return self.third(h.float())  # type: ignore[no-any-return]

    def module(self) -> Any:
        return self.filled(self.Net())


class Columns(Case):
    """Matrices are cut along their second dimension."""

    settings: ClassVar = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}

    def module(self) -> Any:
        return self.filled(Net(12))


class Grouped(Case):
    """Two layers are one unit."""

    def units(self, model: Any) -> list[Any]:
        return [[model.second, model.third]]


class Ignored(Case):
    """A parameter that FSDP leaves alone."""

    def sharded(self, mesh: DeviceMesh) -> Any:
        model = self.module()
        return fully_shard(model, mesh=mesh, ignored_params={model.third.bias})


class Offload(Case):
    """Shards and their gradients live in the host's memory."""

    # DeepSpeed 6926, ms-swift 3697
    settings: ClassVar = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


class Evaluation(Case):
    """Between steps the model is evaluated and its state is read."""

    # Megatron 4563, Megatron 5236
    def step(self, model: Any, rank: int, number: int) -> None:
        with torch.no_grad():
            before = model(whole(4, 8, seed=1))
        super().step(model, rank, number)
        assert all(torch.isfinite(local(t)).all() for t in model.state_dict().values())
        with torch.no_grad():
            assert torch.equal(before, model(whole(4, 8, seed=1)))


class Compiled(Case):
    def sharded(self, mesh: DeviceMesh) -> Any:
        model = super().sharded(mesh)
        model.compile(backend="aot_eager")
        return model


FAST: list[type[Case]] = [
    Case, Accumulation, HalfAccumulation, HalfReduction, Unused, Frozen, MetaDevice, EmptyDevice, Tied, Checkpointing,
    MixedDtypes, Columns, Grouped, Ignored, Offload, Evaluation,
]  # fmt: skip


def train(
    kind: type[Case], rank: int, mesh: DeviceMesh | None
) -> tuple[dict[int, Gradients], dict[str, Tensor], FsdpCompression | None]:
    """Gradients by step, parameters by name, and what compression has kept. mesh: None: without FSDP, this rank's own."""
    case = kind()
    model = case.module() if mesh is None else case.sharded(mesh)
    compression = compress_fsdp(model) if mesh is not None and groups(mesh) else None
    case.loaded(model)
    found = case.train(model, rank)
    return found, dict(model.named_parameters()), compression


def shard(residual: Tensor, parameter: Tensor, rank: int) -> Tensor:
    """What a rank's part of a parameter lacks, of a residual of all of it."""
    assert isinstance(parameter, DTensor)
    (placement,), world = parameter.placements, parameter.device_mesh.size()
    whole = residual.view(parameter.shape)
    if placement.dim == 1:  # FSDP sends the parts one below the other
        whole = torch.cat(residual.view(world * parameter.shape[0], -1).chunk(world), dim=1)
    parts = whole.chunk(world, placement.dim)
    return parts[rank] if rank < len(parts) else whole[:0]


def _check(kind: type[Case], meshes: Mapping[str, DeviceMesh], rank: int, world: int) -> None:
    exact = train(kind, rank, meshes["plain"])[0]
    assert equal(exact, train(kind, rank, meshes["none"])[0]), "none is FSDP, bit for bit"

    own = train(kind, rank, None)[0]
    largest = max(on_all_ranks(max(float(g.abs().max()) for s in own.values() for g in s.values()), world))
    found, _, _ = train(kind, rank, meshes["int8"])
    for number, step in found.items():
        assert step.keys() == exact[number].keys(), f"step {number}: gradients of other parameters"
        for name, gradient in step.items():
            bound = largest * (1 / 254 + kind.eps)  # half a step of int8 on each rank
            error = float((gradient - exact[number][name]).abs().max())
            assert error <= bound, f"step {number}, {name}: {error} > {bound}"
    assert any(m.codec.startswith("int8:block=32") for m in groups(meshes["int8"])["dp"].traffic.entries())

    found, parameters, compression = train(kind, rank, meshes["int4"])
    assert compression is not None
    residuals = on_all_ranks({n: r.clone() for n, r in compression.state_dict().items()}, world)
    for name in {name for step in exact.values() for name in step}:
        if kind is Ignored and name == "third.bias":
            continue  # not even averaged
        total = sum(exact[i][name].float() - found[i][name].float() for i in exact if name in exact[i])
        assert isinstance(total, Tensor)
        lost = shard(torch.stack([r[f"{name}@dp"] for r in residuals]).mean(0), parameters[name], rank)
        tolerance = STEPS * largest * (kind.eps if kind is not HalfAccumulation else 2**-20)
        error = float((total - lost).abs().max())
        assert error <= tolerance, f"{name}: {error} of the sum over steps is lost, more than {tolerance}"


def _all(rank: int, world: int, kinds: list[type[Case]], report: Any) -> None:
    meshes = {"plain": init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))}
    for name, codec, feedback in (
        ("none", "none", False),
        ("int8", "int8:block=32", False),
        ("int4", "int4:block=32", True),
    ):
        meshes[name] = init_mesh({"dp": world}, policy(codec, feedback))
    each(kinds, lambda kind: _check(kind, meshes, rank, world))


def test_every_feature_is_fsdps_and_no_gradient_is_lost() -> None:
    # VeOmni 1167: averages are FSDP's, so nobody divides twice
    run_ranks(_all, 2, FAST, timeout=TIMEOUT_S)


@pytest.mark.slow
def test_compiled_models() -> None:
    run_ranks(_all, 2, [Compiled], timeout=2 * TIMEOUT_S)

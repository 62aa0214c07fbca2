"""FSDP2 with error feedback: what residuals are of, micro-batches, loss scales, skipped steps, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from support import TIMEOUT_S, gaussian
from thinwire import GroupOptions, compress_fsdp, groups, init_mesh
from thinwire.errors import CheckpointError, PolicyError, UnsupportedError
from thinwire.launch import run_ranks
from thinwire.policy import Policy, from_dict

pytestmark = pytest.mark.usefixtures("kernels")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 33  # not divisible by 2 ranks; 20 is not by 3


def policy(reduce: str, gather: str = "none", **settings: Any) -> Policy:
    dp = {"reduce": reduce, "min_nbytes": 0, **settings}
    return from_dict({"axis": {"dp": dp, "zero": {"gather": gather, "min_nbytes": 0}}}, "test")


class Net(nn.Module):
    """``first`` and ``tied`` share a weight; the bias of ``last`` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(20, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.last = nn.Linear(WIDTH, 20)
        self.tied = nn.Linear(20, WIDTH)
        self.tied.weight = self.first.weight
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for block in self.blocks:
            x = block(x).tanh()
        return self.tied(self.last(x))  # type: ignore[no-any-return]


def sharded(mesh: DeviceMesh, **settings: Any) -> Any:
    model = Net()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **settings)
    return model


def plain_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor)
            found[name] = parameter.grad.to_local().clone()
    return found


def shards(model: nn.Module) -> list[Tensor]:
    return [p.detach().to_local() for p in model.parameters() if isinstance(p, DTensor)]


def step(
    model: nn.Module, rank: int, number: int, scale: float = 1.0, micro_batches: int = 1
) -> dict[str, Tensor]:
    """The mean gradients of a step, without the scale."""
    model.zero_grad()
    for i in range(micro_batches):
        model.set_requires_gradient_sync(i == micro_batches - 1)  # type: ignore[operator]
        x = gaussian(1000 * i + 100 * number + rank, 4 * 20).view(4, 20)
        (model(x).float().square().mean() * scale).backward()
    return {name: grad / scale for name, grad in gradients(model).items()}


def train(model: nn.Module, rank: int, steps: int, first: int = 0, **settings: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(first, first + steps):
        step(model, rank, number, **settings)
        optimizer.step()
    return [shard.clone() for shard in shards(model)]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def prefetching(model: Any) -> None:
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model._set_unshard_async_op(True)


VARIANTS: list[tuple[dict[str, Any], Callable[[Any], None]]] = [
    ({}, lambda model: None),
    ({"reshard_after_forward": False}, lambda model: None),
    ({"mp_policy": HALF}, lambda model: None),
    (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)},
        lambda m: None,
    ),
    ({"reshard_after_forward": True}, prefetching),
    ({}, lambda model: model.set_force_sum_reduction_for_comms(True)),
]


def _none_is_fsdp(rank: int, world: int, report: Any) -> None:
    plain, mesh = plain_mesh(world), init_mesh({"dp": world}, "none")
    for settings, prepare in VARIANTS:
        models = sharded(plain, **settings), sharded(mesh, **settings)
        compress_fsdp(models[1])
        results = []
        for model in models:
            prepare(model)
            results.append(train(model, rank, 2, micro_batches=2))
        assert all(map(torch.equal, *results)), settings


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_none_is_fsdp_bit_for_bit(world: int) -> None:
    run_ranks(_none_is_fsdp, world, timeout=TIMEOUT_S)


def local_gradients(rank: int, number: int, micro_batches: int) -> dict[str, Tensor]:
    """What a rank's own backward passes give, computed without any other rank."""
    model = Net()
    for i in range(micro_batches):
        x = gaussian(1000 * i + 100 * number + rank, 4 * 20).view(4, 20)
        model(x).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _within_the_codecs_bound(rank: int, world: int, report: Any) -> None:
    """Gradients of accumulated micro-batches, reduced once, through lossy codecs of every kind of rounding."""
    exact = step(sharded(plain_mesh(world)), rank, 0, micro_batches=3)
    peers = [local_gradients(r, 0, 3) for r in range(world) if r != rank]
    unit_of = {name: name.split(".")[1] if "blocks" in name else "root" for name in exact}
    largest = {
        unit: sum(max(float(p[n].abs().max()) for n in exact if unit_of[n] == unit) for p in peers) / world
        for unit in set(unit_of.values())
    }
    # Of a block's largest value: a half, or a whole, of 1/127; of the value itself 2^-9. The last ulps are those of sums.
    for codec, bound in (
        ("bf16", 2**-9),
        ("int8:block=32", 1 / 254),
        ("int8:block=32,round=stochastic", 1 / 127),
    ):
        mesh = init_mesh({"dp": world}, policy(codec, feedback=False))
        model = sharded(mesh)
        compression = compress_fsdp(model)
        found = step(model, rank, 0, micro_batches=3)
        for name, gradient in found.items():
            if gradient.numel():
                error = float((gradient - exact[name]).abs().max())
                assert error <= bound * largest[unit_of[name]] * 1.001 + 1e-6, (codec, name)
        entries = groups(mesh)["dp"].traffic.entries()
        reduced = [entry.calls for m, entry in entries.items() if m.op == "reduce_scatter"]
        assert sum(reduced) == 3  # one for each unit
        assert {m.role for m in entries if m.op == "reduce_scatter"} == {"gradient"}
        assert {(m.axis, m.role) for m in entries if m.op == "all_gather"} >= {("zero", "parameter")}
        assert compression.nbytes == 0


def test_lossy_gradients_are_within_the_codecs_bound() -> None:
    run_ranks(_within_the_codecs_bound, 2, timeout=TIMEOUT_S)


def _what_was_lost(name: str, shard: Tensor, rank: int, residuals: list[dict[str, Tensor]]) -> Tensor:
    """The mean over the ranks of what they still have to send to this one of its shard of a parameter."""
    numel = residuals[0][name + "@dp"].numel()
    row = numel // Net().get_parameter(name).shape[0]
    rows = -(-(numel // row) // len(residuals))  # dimension 0 in equal parts
    begin = rank * rows * row
    parts = [state[name + "@dp"][begin : begin + shard.numel()] for state in residuals]
    return torch.stack([part.float() for part in parts]).mean(0).view(shard.shape)


def _sums_add_up(rank: int, world: int, report: Any) -> None:
    """The gradient stays the same, so all that is missing of the sum over steps is what the residuals hold."""
    steps = 12
    exact = {name: steps * grad for name, grad in step(sharded(plain_mesh(world)), rank, 0).items()}
    largest = max(float(g.abs().max()) for r in range(world) for g in local_gradients(r, 0, 1).values())
    # A residual r is half a step of int4 at most, |r| <= (largest + |r|) / 14; bf16 loses 2^-9 of it in each step.
    rounded = 2**-9 * largest / 13
    errors = {}
    for feedback, dtype in ((True, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        model = sharded(init_mesh({"dp": world}, policy("int4:block=32", feedback=feedback)))
        compression = compress_fsdp(model, residual_dtype=dtype)
        sums = {name: torch.zeros_like(total) for name, total in exact.items()}
        for _ in range(steps):
            for name, gradient in step(model, rank, 0).items():
                sums[name] += gradient
        errors[feedback, dtype] = sum(float((sums[name] - exact[name]).norm()) for name in exact)
        state = compression.state_dict()
        assert int(state.pop("steps")) == steps
        trained = sum(p.numel() for p in Net().parameters() if p.requires_grad)
        assert compression.nbytes == (trained * dtype.itemsize if feedback else 0)
        assert {key.removesuffix("@dp") for key in state} == (set(exact) if feedback else set())
        if feedback:
            residuals: list[Any] = [None] * world
            dist.all_gather_object(residuals, {key: value.clone() for key, value in state.items()})
            for name, total in exact.items():
                lost = _what_was_lost(name, total, rank, residuals)
                bound = 1e-5 + (steps * rounded if dtype == torch.bfloat16 else 0.0)
                assert float((total - sums[name] - lost).abs().amax() if lost.numel() else 0.0) <= bound, name
    blind = errors[False, torch.float32]
    assert errors[True, torch.float32] < blind / 3
    assert errors[True, torch.bfloat16] < blind / 3


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_residuals_hold_what_sums_over_steps_lack(world: int) -> None:
    run_ranks(_sums_add_up, world, timeout=TIMEOUT_S)


def _skipped(rank: int, world: int, report: Any) -> None:
    """A power of two as loss scale changes nothing; a step that is skipped leaves no trace."""
    chosen = policy("int4:block=32", feedback=True)
    scale = 1024.0
    plain, scaled, told = (sharded(init_mesh({"dp": world}, chosen), mp_policy=HALF) for _ in range(3))
    compress_fsdp(plain)
    compression = compress_fsdp(scaled, scale=lambda: scale)
    other = compress_fsdp(told, rollback=True)
    assert (
        compression.nbytes
        == other.nbytes
        == 2 * compress_fsdp(sharded(init_mesh({"dp": world}, chosen))).nbytes
    )
    for number in range(4):
        expected = step(plain, rank, number)
        assert same(step(scaled, rank, number, scale), expected), number
        assert same(step(told, rank, number), expected), number
        if number == 2:
            # Only one rank overflows.
            for model in (scaled, told):
                bad = step(model, rank, 50, torch.inf if rank == 0 else scale)
                everyone: list[Any] = [None] * world
                dist.all_gather_object(everyone, all(bool(g.isfinite().all()) for g in bad.values()))
                assert not all(everyone)
            scale /= 2  # as a GradScaler does then
            other.skip()
    unable = sharded(init_mesh({"dp": world}, chosen))
    without = compress_fsdp(unable)
    without.skip()  # nothing to undo yet
    step(unable, rank, 0)
    with pytest.raises(RuntimeError, match="without rollback=True cannot undo"):
        without.skip()


def test_loss_scale_and_skipped_steps() -> None:
    run_ranks(_skipped, 2, timeout=TIMEOUT_S)


def _resumed(rank: int, world: int, report: Any) -> None:
    chosen = policy("int4:block=32,round=stochastic", "int8:block=32,round=stochastic", feedback=True)
    for dtype in (torch.float32, torch.bfloat16):
        first = sharded(init_mesh({"dp": world}, chosen), reshard_after_forward=True)
        compression = compress_fsdp(first, residual_dtype=dtype)
        train(first, rank, 3)
        parameters = [shard.clone() for shard in shards(first)]
        saved = {name: tensor.clone() for name, tensor in compression.state_dict().items()}
        expected = train(first, rank, 2, first=3)

        # Other units, the same parameters: residuals are theirs.
        second = sharded(init_mesh({"dp": world}, chosen), reshard_after_forward=True)
        again = compress_fsdp(second, residual_dtype=dtype)
        for shard, value in zip(shards(second), parameters, strict=True):
            shard.copy_(value)
        again.load_state_dict(saved)
        with torch.no_grad():
            second(torch.zeros(1, 20))  # evaluation between steps changes nothing
        assert all(map(torch.equal, expected, train(second, rank, 2, first=3)))

    whole = fully_shard(Net(), mesh=init_mesh({"dp": world}, chosen))
    regrouped = compress_fsdp(whole, residual_dtype=torch.bfloat16)
    regrouped.load_state_dict(saved)
    assert same(regrouped.state_dict(), saved)
    with pytest.raises(CheckpointError, match=r"first\.weight@dp: 660 values expected, 5 values found"):
        regrouped.load_state_dict({**saved, "first.weight@dp": torch.zeros(5)})
    with pytest.raises(CheckpointError, match="steps: 1 values expected, nothing found"):
        regrouped.load_state_dict({})


def test_resume_is_bit_exact() -> None:
    # DeepSpeed 4851, DeepSpeed 7164, DeepSpeed 7606
    run_ranks(_resumed, 2, timeout=TIMEOUT_S)


def _backward_sees_what_forward_saw(rank: int, world: int, report: Any) -> list[Tensor]:
    """Parameters are gathered again for the backward pass, with the rounding of the forward pass."""
    model = sharded(
        init_mesh({"dp": world}, policy("none", "int4:block=32,round=stochastic")), reshard_after_forward=True
    )
    compress_fsdp(model)
    seen: list[Tensor] = []
    block = model.blocks[0]

    def see(*_: Any) -> None:
        seen.append(block.weight.detach().clone())

    block.register_forward_pre_hook(see)
    block.register_forward_hook(lambda module, args, output: output.register_hook(see) and None)
    master = [shard.clone() for shard in shards(model)]
    for _ in range(2):
        model(gaussian(rank, 80).view(4, 20)).square().mean().backward()
    assert all(map(torch.equal, master, shards(model)))  # the shards stay exact
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])  # each step rounds by itself
    exact = Net().blocks[0].weight.detach()
    assert not torch.equal(seen[0], exact)
    assert float((seen[0] - exact).abs().max()) <= float(exact.abs().max()) / 7 * 1.001
    return seen


def test_gathered_parameters_are_the_same_in_a_step_and_on_all_ranks() -> None:
    # torchao 4300
    results = run_ranks(_backward_sees_what_forward_saw, 2, timeout=TIMEOUT_S)
    assert all(map(torch.equal, *results))


def _refused(rank: int, world: int, report: Any) -> None:
    chosen = policy("int4:block=32", feedback=True)
    mesh = init_mesh({"dp": world}, chosen)
    with pytest.raises(UnsupportedError, match=r"found no sharded parameters: call .*fully_shard"):
        compress_fsdp(Net())
    with pytest.raises(
        UnsupportedError, match=r"needs thinwire groups, that of FSDP unit .* is ProcessGroup"
    ):
        compress_fsdp(sharded(plain_mesh(world)))
    with pytest.raises(UnsupportedError, match="feedback_by_caller=True"):
        compress_fsdp(sharded(init_mesh({"dp": world}, "bf16", feedback=False)))
    with pytest.raises(UnsupportedError, match=f"cut over 1 rank and replicated over {world}.*compress_ddp"):
        compress_fsdp(sharded(init_mesh({"dp": world, "zero": 1}, chosen)))
    with pytest.raises(UnsupportedError, match="policy balanced, axis zero: differences"):
        compress_fsdp(sharded(init_mesh({"dp": world}, "balanced")))
    with pytest.raises(UnsupportedError, match="needs whole matrices"):
        compress_fsdp(sharded(init_mesh({"dp": world}, policy("lowrank:rank=2", feedback=True))))
    with pytest.raises(UnsupportedError, match="float16: must be"):
        compress_fsdp(sharded(mesh), residual_dtype=torch.float16)
    with pytest.raises(PolicyError, match="compress_fsdp for FSDP2"):
        dist.new_group(backend="thinwire", pg_options=GroupOptions(policy="balanced"))


def _refused_in_a_step(rank: int, world: int, report: Any) -> None:
    mesh = init_mesh({"dp": world}, policy("int4:block=32", feedback=True))
    for allowed in (False, True):
        divided = sharded(mesh)
        compress_fsdp(divided)
        divided.set_gradient_divide_factor(3.0)
        divided.set_force_sum_reduction_for_comms(allowed)
        divided.blocks[1].set_gradient_divide_factor(3.0)
        divided.blocks[1].set_force_sum_reduction_for_comms(allowed)
        with nullcontext() if allowed else pytest.raises(UnsupportedError, match="set_force_sum_reduction"):
            step(divided, rank, 0)
    for allowed in (False, True):
        partly = Net()
        partly.register_parameter("unused", nn.Parameter(torch.ones(3)))
        compress_fsdp(fully_shard(partly, mesh=mesh))
        partly.set_reduce_scatter_unused_params(allowed)  # type: ignore[operator]
        with nullcontext() if allowed else pytest.raises(UnsupportedError, match="got no gradient"):
            step(partly, rank, 0)
    separate = sharded(mesh)
    compress_fsdp(separate)
    separate.set_separate_reduce_scatter_group(True)
    with pytest.raises(UnsupportedError, match="uses another group"):
        step(separate, rank, 0)


@pytest.mark.parametrize("run", [_refused, _refused_in_a_step])
def test_what_is_refused(run: Any) -> None:
    # DeepSpeed 5046, DeepSpeed 818
    run_ranks(run, 2, timeout=TIMEOUT_S)

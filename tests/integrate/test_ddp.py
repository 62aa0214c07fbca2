"""DDP with error feedback: buckets that are rebuilt, loss scales, skipped steps, checkpoints."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from support import TIMEOUT_S, gaussian
from thinwire import DdpCompression, GroupOptions, compress_ddp, stats
from thinwire.errors import CheckpointError, UnsupportedError
from thinwire.integrate.ddp import gradient_group
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")


def policy(codec: str, feedback: bool) -> Any:
    return from_dict({"axis": {"dp": {"reduce": codec, "feedback": feedback, "min_nbytes": 0}}}, "test")


def group_of(codec: str, feedback: bool = True) -> dist.ProcessGroup:
    options = GroupOptions(policy=policy(codec, feedback), feedback_by_caller=True)
    return dist.new_group(backend="thinwire", pg_options=options)


def wrapped(group: dist.ProcessGroup | None, **settings: Any) -> DistributedDataParallel:
    """Small buckets, so that there are several, and parameters that are used in another order than they are made."""
    torch.manual_seed(1)
    layers = [nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 8)]
    return DistributedDataParallel(
        nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.004, **settings
    )


def step(model: nn.Module, rank: int, number: int, scale: float = 1.0) -> list[Tensor]:
    """One backward pass; the averaged gradients without the scale."""
    model.zero_grad()
    x = gaussian(100 * number + rank, 4 * 32).view(4, 32)
    (model(x).square().mean() * scale).backward()
    return [p.grad.div(scale) for p in model.parameters() if p.grad is not None]


def _sums_add_up(rank: int, world: int, report: Any) -> list[Tensor]:
    """What is lost in one step is sent in later ones: sums over steps stay as near as one step's error."""
    exact, coarse = wrapped(None), wrapped(group_of("int2"))
    plain = wrapped(group_of("int2", feedback=False))
    compress_ddp(plain)
    compression = compress_ddp(coarse)
    sums = [[torch.zeros_like(p) for p in exact.parameters()] for _ in range(3)]
    for _ in range(12):
        for total, model in zip(sums, (exact, coarse, plain), strict=True):
            for into, gradient in zip(total, step(model, rank, 0), strict=True):
                into += gradient
    error, error_blind = (
        sum(float((a - b).norm()) for a, b in zip(sums[0], found, strict=True)) for found in sums[1:]
    )
    assert error < error_blind / 3
    assert compression.nbytes > 0
    assert len(compression.state_dict()) >= len(sums[0])
    return sums[1]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_feedback_over_rebuilt_buckets(world: int) -> None:
    # pytorch 48670, pytorch 48867
    ranks = run_ranks(_sums_add_up, world, timeout=TIMEOUT_S)
    for other in ranks[1:]:
        assert all(map(torch.equal, ranks[0], other))


def whole_numbers(group: dist.ProcessGroup | None) -> DistributedDataParallel:
    """A model whose gradients are exact in fp32, so that they do not depend on how a matrix product is summed up."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.004)


def _none_is_ddp(rank: int, world: int, report: Any) -> None:
    models = whole_numbers(None), whole_numbers(group_of("none", feedback=False))
    compress_ddp(models[1])
    for number in range(3):
        x = gaussian(10 * number + rank, 4 * 32).view(4, 32).round()
        for model in models:
            model.zero_grad()
            model(x).sum().backward()
        expected, found = ([p.grad for p in model.parameters()] for model in models)
        assert all(
            a is not None and b is not None and torch.equal(a, b)
            for a, b in zip(expected, found, strict=True)
        )


def test_none_is_ddp_bit_for_bit() -> None:
    run_ranks(_none_is_ddp, 2, timeout=TIMEOUT_S)


class _Bucket:
    def index(self) -> int:
        return 0

    def buffer(self) -> Tensor:
        return torch.ones(4096)

    def parameters(self) -> list[Tensor]:
        return []


def _pending(rank: int, world: int, report: Any) -> None:
    compression: Any = compress_ddp(whole_numbers(group_of("none", feedback=False)))
    store: Any = dist.distributed_c10d._get_default_store()
    compression.reduce(_Bucket()).wait()
    if rank == 1:
        store.wait(["counted"])
    before = [sys.getrefcount(x) for x in (compression, compression.group)]
    future = compression.reduce(_Bucket())
    after = [sys.getrefcount(x) for x in (compression, compression.group)]
    if rank == 0:
        store.set("counted", "")
    assert torch.equal(future.wait(), torch.ones(4096))
    if rank == 0:
        assert before == after


def test_a_bucket_under_way_does_not_hold_its_group() -> None:
    """The inner group's thread would be the last to hold it, end it, and join itself: the process aborted."""
    run_ranks(_pending, 2, timeout=TIMEOUT_S)


def residuals(compression: DdpCompression) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in compression.state_dict().items() if "@" in name}


def _scaled(rank: int, world: int, report: Any) -> None:
    """A power of two as loss scale changes nothing; a step that overflows leaves no trace."""
    scale = 1024.0
    plain, scaled = wrapped(group_of("int4")), wrapped(group_of("int4"))
    compress_ddp(plain)
    compression = compress_ddp(scaled, scale=lambda: scale)
    for number in range(4):
        a, b = step(plain, rank, number), step(scaled, rank, number, scale)
        assert all(map(torch.equal, a, b)), number
        if number == 2:
            before = residuals(compression)
            # Only one rank overflows; all of them see it.
            bad = step(scaled, rank, 50, scale * (torch.inf if rank == 0 else 1.0))
            assert not all(bool(torch.isfinite(g).all()) for g in bad)
            after = residuals(compression)
            assert all(torch.equal(before[name], after[name]) for name in before)


def test_loss_scale_and_skipped_steps() -> None:
    run_ranks(_scaled, 2, timeout=TIMEOUT_S)


def _resumed(rank: int, world: int, report: Any) -> None:
    """Also after the first step of a process, after which DDP makes its buckets anew, and if it never does."""
    for codec, steps, settings in (
        ("int4:block=32", 1, {}),
        ("int4:block=32,round=stochastic", 3, {}),
        ("int4:block=32", 3, {"static_graph": True}),
        ("int4:block=32", 3, {"find_unused_parameters": True}),
    ):
        first = wrapped(group_of(codec), **settings)
        compression = compress_ddp(first)
        for number in range(steps):
            step(first, rank, number)
        # Tensors only, so that any file format takes them.
        file = io.BytesIO()
        torch.save(compression.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        expected = [step(first, rank, number) for number in (50, 51, 52)]
        if not settings:  # a hook cannot be registered again: it takes them back
            compression.load_state_dict(saved)
            for number, gradients in zip((50, 51, 52), expected, strict=True):
                assert all(map(torch.equal, gradients, step(first, rank, number))), (codec, steps)

        second = wrapped(group_of(codec), **settings)
        again = compress_ddp(second)
        again.load_state_dict(saved)
        at_once = again.state_dict()
        assert at_once.keys() == saved.keys()
        assert all(torch.equal(tensor, at_once[name]) for name, tensor in saved.items())
        found = [step(second, rank, number) for number in (50, 51, 52)]
        for a, b in zip(expected, found, strict=True):
            assert all(map(torch.equal, a, b)), (codec, steps, settings)
        ends = compression.state_dict(), again.state_dict()
        assert ends[0].keys() == ends[1].keys()
        assert not [name for name, tensor in ends[0].items() if not torch.equal(tensor, ends[1][name])]

    model = wrapped(group_of("int4"))
    third = compress_ddp(model)
    third.load_state_dict({name: tensor for name, tensor in saved.items() if name.endswith("@dp")})
    with pytest.raises(CheckpointError, match=r"0\.weight@dp: 1536 values expected, 5 found"):
        third.load_state_dict({"0.weight@dp": torch.zeros(5)})
    with pytest.raises(CheckpointError, match="those of 2 trained parameters found, this model has 6"):
        third.load_state_dict({"buckets": torch.tensor([[0, 1], [0, 0]])})


def test_resume_is_bit_exact() -> None:
    # pytorch 75666, pytorch 79334, pytorch 102721
    run_ranks(_resumed, 3, timeout=TIMEOUT_S)  # three: an owner's residual matters, too


def _gradients_alone(rank: int, world: int, report: Any) -> None:
    """A group of their own: DDP's parameters, its buffers and what the script sends stay on the plain one."""
    exact = wrapped(None)
    model = wrapped(None)
    group = gradient_group(model, policy("int4:block=32", feedback=True))
    compression = compress_ddp(model, group=group)
    sums = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(2)]
    for _ in range(6):
        for total, ddp in zip(sums, (exact, model), strict=True):
            for into, gradient in zip(total, step(ddp, rank, 0), strict=True):
                into += gradient
    # What is missing of the sums is what the residuals hold, a step of int4.
    assert all((a - b).abs().max() < a.abs().max() / 7 for a, b in zip(*sums, strict=True))
    assert {message.role for message in stats(group).messages if message.compressed} == {"gradient"}
    assert type(model.process_group) is dist.ProcessGroup
    assert len(residuals(compression)) >= len(sums[0])
    alone = dist.new_group([rank], backend="thinwire", pg_options=GroupOptions(feedback_by_caller=True),
                           use_local_synchronization=True)  # fmt: skip
    with pytest.raises(UnsupportedError, match=rf"of ranks \[{rank}\], the model's of \[0, 1\]"):
        compress_ddp(wrapped(None), group=alone)


def test_gradients_have_a_group_of_their_own() -> None:
    run_ranks(_gradients_alone, 2, timeout=TIMEOUT_S)


def _refused(rank: int, world: int, report: Any) -> None:
    with pytest.raises(UnsupportedError, match="needs a thinwire group, this model"):
        compress_ddp(wrapped(None))
    untold = dist.new_group(backend="thinwire", pg_options=GroupOptions(policy="bf16"))
    with pytest.raises(UnsupportedError, match="feedback_by_caller=True"):
        compress_ddp(wrapped(untold))


def test_what_is_refused() -> None:
    run_ranks(_refused, 2, timeout=TIMEOUT_S)

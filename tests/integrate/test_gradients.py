"""GradientSync: what it averages, what it gathers, and what it keeps for the next step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support import TIMEOUT_S, gaussian, same
from thinwire import GradientSync, Policy, groups, init_mesh, parse
from thinwire.collectives import Chunks
from thinwire.errors import CheckpointError, UnsupportedError
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")
MICRO = 3


def policy(
    reduce: str, gather: str | None = None, *, feedback: bool = True, difference: bool = True
) -> Policy:
    axes: dict[str, Any] = {"dp": {"reduce": reduce, "feedback": feedback, "min_nbytes": 0}}
    if gather is not None:
        axes["zero"] = {"gather": gather, "difference": difference, "min_nbytes": 0}
    return from_dict({"axis": axes}, "test")


INT4 = policy("int4:block=32", "int4:block=32")
STOCHASTIC = policy("int4:block=32,round=stochastic", "int4:block=32,round=stochastic")


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(16, 37), nn.Linear(37, 8)
        self.sometimes = nn.Parameter(torch.ones(8))
        self.never = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.to(dtype)

    def forward(self, x: Tensor, *, scale: bool) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return y * self.sometimes if scale else y


def loss_of(model: Toy, rank: int, step: int, micro: int) -> Tensor:
    """``sometimes`` is used in the first micro-batch of rank 0 only."""
    x = gaussian(100 * step + 10 * rank + micro, 64).view(4, 16).to(model.second.weight.dtype)
    target = x[:, :8].sin()
    return (model(x, scale=rank == 0 and micro == 0) - target).square().mean()


def make(model: Toy, group: dist.ProcessGroup | None, *, sharded: bool, **options: Any) -> GradientSync:
    options = {"labels": lambda name: "bias" in name, "bucket_bytes": 1024, **options}
    return GradientSync(model.named_parameters(), group, sharded=sharded, **options)


def backward(
    model: Toy, sync: GradientSync, rank: int, step: int, scale: float = 1.0, micro: int = MICRO
) -> None:
    sync.start(micro, scale)
    for m in range(micro):
        (loss_of(model, rank, step, m) * scale).backward()
    sync.finish()


def gradients(sync: GradientSync) -> dict[str, Tensor]:
    """The mean gradient of every parameter, gathered if it is sharded."""
    found = {}
    for bucket in sync.buckets:
        whole = bucket.grad
        if sync.sharded and sync.group is not None and sync.group.size() > 1:
            parts = [torch.empty_like(bucket.grad) for _ in range(sync.group.size())]
            dist.all_gather(parts, bucket.grad)
            whole = torch.cat(parts)
        found |= {m.name: whole[m.begin : m.end].clone() for m in bucket.members}
    return found


def sums(model: Toy, rank: int, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    """A rank's gradients without a sync: fp32 sums over the micro-batches."""
    total = {n: torch.zeros(p.numel()) for n, p in model.named_parameters() if p.requires_grad}
    for micro in range(MICRO):
        model.zero_grad()
        (loss_of(model, rank, step, micro) * scale).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] += p.grad.float().view(-1)
    model.zero_grad()
    return total


def plain_groups(world: int) -> Iterator[dist.ProcessGroup]:
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    yield groups(init_mesh({"dp": world}, "none"))["dp"]


def _plain(rank: int, world: int, report: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for scale in (1.0, 1024.0):
            expected = [sums(Toy(dtype), r, 0, scale) for r in range(world)]
            for group in plain_groups(world):
                for sharded in (False, True):
                    model = Toy(dtype)
                    sync = make(model, group, sharded=sharded)
                    backward(model, sync, rank, 0, scale)
                    for name, grad in gradients(sync).items():
                        # Two terms: no order of additions to differ by.
                        mean = (expected[0][name] + expected[1][name]) / (2 * scale)
                        assert same(grad, mean), f"{name} {dtype} scale={scale} sharded={sharded}"
                    assert all(p.grad is None for p in model.parameters())


def test_none_is_plain_averaging_bit_for_bit() -> None:
    run_ranks(_plain, 2, timeout=TIMEOUT_S)


def test_one_rank_needs_no_group() -> None:
    for sharded in (False, True):
        model = Toy()
        expected = sums(Toy(), 0, 0)
        sync = make(model, None, sharded=sharded)
        backward(model, sync, 0, 0)
        for name, grad in gradients(sync).items():
            assert same(grad, expected[name])
        with torch.no_grad():
            for bucket in sync.buckets:
                bucket.master -= bucket.grad
        sync.gather()
        assert torch.allclose(
            model.second.bias, Toy().second.bias - expected["second.bias"], rtol=0, atol=1e-6
        )


def test_buckets_hold_every_parameter_once_one_label_and_one_dtype_each() -> None:
    model = Toy()
    model.second.bfloat16()
    sync = make(model, None, sharded=False, bucket_bytes=600)
    names = [m.name for b in sync.buckets for m in b.members]
    assert sorted(names) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    for bucket in sync.buckets:
        assert {"bias" in m.name for m in bucket.members} == {bucket.label}
        assert {m.parameter.dtype for m in bucket.members} == {bucket.dtype}
        assert [m.begin for m in bucket.members] == [0, *(m.end for m in bucket.members[:-1])]
        assert bucket.master.dtype == bucket.grad.dtype == torch.float32
        for member in bucket.members:
            part = bucket.master[member.begin : member.end]
            assert torch.equal(part, member.parameter.detach().float().view(-1))
    # The last layers' gradients come first, and a bucket is sent when its last one is there.
    order = {name: i for i, (name, _) in enumerate(reversed(list(model.named_parameters())))}
    last = [order[b.members[-1].name] for b in sync.buckets]
    assert last == sorted(last)
    assert all(4 * b.members[-1].begin < 600 for b in sync.buckets)


def test_a_backward_too_many_is_an_error() -> None:
    model = Toy()
    sync = make(model, None, sharded=False)
    sync.start(1)
    loss_of(model, 0, 0, 0).backward()
    with pytest.raises(UnsupportedError, match=r"got a gradient more than 1 time\(s\).*start\(backwards\)"):
        loss_of(model, 0, 0, 1).backward()


def test_a_closed_sync_lets_go_of_the_parameters() -> None:
    model = Toy()
    make(model, None, sharded=False).close()
    loss_of(model, 0, 0, 0).backward()
    assert model.second.bias.grad is not None


def step(model: Toy, sync: GradientSync, rank: int, index: int, lr: float = 0.2) -> float:
    backward(model, sync, rank, index)
    with torch.no_grad():
        for bucket in sync.buckets:
            bucket.master -= lr * bucket.grad
    sync.commit()
    sync.gather()
    with torch.no_grad():
        return float(loss_of(model, 1, index, 1))


def parameters(model: Toy) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _lossy(rank: int, world: int, report: Any) -> list[Tensor]:
    """Ranks end with the same parameters, near those of an exact run."""
    results = []
    for sharded in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            model = Toy(dtype)
            sync = make(model, groups(init_mesh({"dp": world}, INT4))["dp"], sharded=sharded)
            for i in range(3):
                step(model, sync, rank, i)
            results += parameters(model)
    return results


def test_all_ranks_hold_the_same_parameters() -> None:
    results = run_ranks(_lossy, 3, timeout=TIMEOUT_S)
    for other in results[1:]:
        assert all(map(same, results[0], other))


def test_a_dropped_sync_is_collected_and_gradients_stay_with_the_parameters() -> None:
    model = Toy()
    sync = make(model, None, sharded=False)
    backward(model, sync, 0, 0)
    dropped = weakref.ref(sync)
    del sync
    gc.collect()
    assert dropped() is None
    loss_of(model, 0, 0, 0).backward()
    assert model.second.bias.grad is not None
    dropped_model = weakref.ref(model)
    del model
    gc.collect()
    assert dropped_model() is None


def _padding(rank: int, world: int, report: Any) -> int:
    """ZFP decodes the zeros beside other values to something else."""
    chosen = policy("zfp:rate=8", "zfp:rate=8", feedback=False)
    model = Toy()
    sync = make(model, groups(init_mesh({"dp": world}, chosen))["dp"], sharded=True)
    padded = 0
    for i in range(3):
        step(model, sync, rank, i)
        for bucket in sync.buckets:
            end = max(bucket.members[-1].end - rank * bucket.master.numel(), 0)
            assert not bucket.grad[end:].any()
            assert not bucket.master[end:].any()
            padded += bucket.master[end:].numel()
    return padded


def test_padding_stays_zero_through_a_codec_that_does_not_keep_zeros() -> None:
    assert sum(run_ranks(_padding, 3, timeout=TIMEOUT_S)) > 0


def _skip(rank: int, world: int, report: Any) -> None:
    for sharded in (False, True):
        model = Toy()
        group = groups(init_mesh({"dp": world}, INT4))["dp"]
        sync = make(model, group, sharded=sharded, rollback=True)
        step(model, sync, rank, 0)
        before = {n: t.clone() for n, t in sync.state_dict().items() if n != "calls"}
        assert any(t.any() for n, t in before.items() if "@dp" in n)
        backward(model, sync, rank, 1)
        changed = sync.state_dict()
        assert any(not same(before[n], changed[n]) for n in before if "@dp" in n)
        sync.skip()
        assert all(same(before[n], t) for n, t in sync.state_dict().items() if n != "calls")
        # A gradient that overflowed, and the next step is finite again.
        sync.start(MICRO)
        (loss_of(model, rank, 2, 0) * torch.inf).backward()
        sync.finish()
        assert not all(torch.isfinite(b.grad).all() for b in sync.buckets)
        sync.skip()
        step(model, sync, rank, 3)
        assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_skipped_step_leaves_no_trace() -> None:
    run_ranks(_skip, 2, timeout=TIMEOUT_S)


def _resume(rank: int, world: int, report: Any) -> None:
    for chosen in (INT4, STOCHASTIC):
        for sharded in (False, True):
            model = Toy()
            sync = make(model, groups(init_mesh({"dp": world}, chosen, seed=7))["dp"], sharded=sharded)
            for i in range(3):
                step(model, sync, rank, i)
            saved = {n: t.clone() for n, t in sync.state_dict().items()}
            weights = {n: t.clone() for n, t in model.state_dict().items()}
            for i in range(3, 6):
                step(model, sync, rank, i)

            again = Toy()
            again.load_state_dict(weights)
            resumed = make(again, groups(init_mesh({"dp": world}, chosen, seed=7))["dp"], sharded=sharded)
            resumed.load_state_dict(saved)
            for i in range(3, 6):
                step(again, resumed, rank, i)
            assert all(map(same, parameters(model), parameters(again)))
            live = resumed.state_dict()
            assert all(torch.equal(t, live[n]) for n, t in sync.state_dict().items())

            for broken in (
                {n: t for n, t in saved.items() if n != "bucket0.master"},
                saved | {"bucket0.master": saved["calls"]},
            ):
                with pytest.raises(CheckpointError, match=r"bucket0\.master"):
                    resumed.load_state_dict(broken)


def test_resume_is_bit_exact() -> None:
    run_ranks(_resume, 2, timeout=TIMEOUT_S)


def _difference(rank: int, world: int, report: Any) -> float:
    codec, model = parse("int4:block=32"), Toy()
    exact_reduce = policy("mpc:dim=1", "int4:block=32", feedback=False)
    sync = make(model, groups(init_mesh({"dp": world}, exact_reduce))["dp"], sharded=True)
    worst = 0.0
    for i in range(12):
        before = [bucket_parameters(sync, b) for b in range(len(sync.buckets))]
        step(model, sync, rank, i)
        for b, bucket in enumerate(sync.buckets):
            size = bucket.master.numel()
            mine = slice(rank * size, (rank + 1) * size)
            meant, held = bucket.master - before[b][mine], bucket_parameters(sync, b)[mine]
            bound = codec.error_bound(meant)
            assert bound is not None
            # Forming the difference and adding it round once each, at values below 4.
            assert ((held.double() - bucket.master.double()).abs() <= bound + 2 * 2.0**-23 * 4).all()
            worst = max(worst, float((held - bucket.master).abs().max()))
    return worst


def bucket_parameters(sync: GradientSync, index: int) -> Tensor:
    bucket = sync.buckets[index]
    flat = torch.zeros_like(bucket.flat)
    for m in bucket.members:
        flat[m.begin : m.end] = m.parameter.detach().view(-1)
    return flat


def test_gathered_differences_stay_within_one_encoding_of_the_masters() -> None:
    assert max(run_ranks(_difference, 2, timeout=TIMEOUT_S)) > 0, "int4 loses something"


def _values(rank: int, world: int, report: Any) -> None:
    codec, model = parse("int8:block=32"), Toy()
    chosen = policy("mpc:dim=1", "int8:block=32", feedback=False, difference=False)
    sync = make(model, groups(init_mesh({"dp": world}, chosen))["dp"], sharded=True)
    for i in range(4):
        step(model, sync, rank, i)
        for b, bucket in enumerate(sync.buckets):
            size = bucket.master.numel()
            held = bucket_parameters(sync, b)[rank * size : (rank + 1) * size]
            bound = codec.error_bound(bucket.master)
            assert bound is not None
            padding = torch.arange(rank * size, (rank + 1) * size) >= bucket.members[-1].end
            assert ((held - bucket.master).abs() <= bound)[~padding].all()


def test_gathered_values_are_the_masters_after_one_encoding() -> None:
    run_ranks(_values, 2, timeout=TIMEOUT_S)


def _converge(rank: int, world: int, report: Any) -> list[float]:
    final = []
    for chosen in ("none", INT4):
        model = Toy()
        sync = make(model, groups(init_mesh({"dp": world}, chosen))["dp"], sharded=True)
        losses = [step(model, sync, rank, i, lr=0.3) for i in range(80)]
        final.append(sum(losses[-20:]) / 20)
    return final


def test_int4_with_feedback_learns_as_well_as_exact() -> None:
    exact, lossy = run_ranks(_converge, 2, timeout=TIMEOUT_S)[0]
    with torch.no_grad():
        start = float(loss_of(Toy(), 1, 0, 1))
    assert exact < 0.5 * start
    assert lossy < 1.05 * exact


def _accounts(rank: int, world: int, report: Any) -> None:
    """Everything that was a gradient is either in the averages or in a residual."""
    for sharded in (False, True):
        model = Toy()
        group = groups(init_mesh({"dp": world}, policy("int4:block=32")))["dp"]
        sync = make(model, group, sharded=sharded)
        names = [m.name for b in sync.buckets for m in b.members]
        given = {
            n: torch.zeros(p.numel(), dtype=torch.float64) for n, p in model.named_parameters() if n in names
        }
        taken = {n: torch.zeros_like(t) for n, t in given.items()}
        for i in range(4):
            for r in range(world):
                for name, grad in sums(Toy(), r, i).items():
                    given[name] += grad.double()
            backward(model, sync, rank, i)
            for name, grad in gradients(sync).items():
                taken[name] += world * grad.double()
        for bucket in sync.buckets:
            assert bucket.feedback is not None
            left = bucket.feedback.sender.double()
            if not sharded:
                chunks = Chunks.of(left.numel(), world, 32)
                left[slice(*chunks.bounds(rank))] += bucket.feedback.owner.double()
            dist.all_reduce(left)
            for m in bucket.members:
                error = given[m.name] - taken[m.name] - left[m.begin : m.end]
                # fp32 roundings of values below 8 in 4 steps: of a sum, a residual, a mean, on each rank.
                assert error.abs().max() < 4 * 2 * world * 4 * 8 * 2.0**-24, m.name


def test_no_gradient_is_lost_with_feedback() -> None:
    run_ranks(_accounts, 2, timeout=TIMEOUT_S)


def test_labels_default_to_one_bucket_per_dtype() -> None:
    assert len(GradientSync(Toy().named_parameters(), None).buckets) == 1

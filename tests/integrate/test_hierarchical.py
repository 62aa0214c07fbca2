"""Error feedback in levels: DDP and GradientSync over ranks of two hosts, lossy between hosts and inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from support import TIMEOUT_S, gaussian, same
from thinwire import GradientSync, GroupOptions, compress_ddp
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")
WORLD, HOSTS = 4, "aabb"


def group_of(codec: str, inside: str, feedback: bool = True) -> dist.ProcessGroup:
    tables = {
        "dp": {"reduce": codec, "feedback": feedback, "min_nbytes": 0},
        "zero": {"gather": "int8:block=32", "min_nbytes": 0, "difference": True, "algorithm": "hierarchical"},
        "dp@intra": {"reduce": inside},
    }
    options = GroupOptions(
        from_dict({"axis": tables}, "test"),
        op_axes={"all_gather": "zero"},
        feedback_by_caller=True,
        host=HOSTS[dist.get_rank()],
    )
    return dist.new_group(backend="thinwire", pg_options=options)


def make() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 8))


def backward(model: nn.Module, rank: int, number: int) -> None:
    (model(gaussian(100 * number + rank, 4 * 32).view(4, 32)).square().mean()).backward()


def _ddp(rank: int, inside: str) -> list[Tensor]:
    """What is lost in one step is sent in later ones, so sums over steps stay as near as one step's error."""

    def wrapped(group: dist.ProcessGroup | None) -> DistributedDataParallel:
        return DistributedDataParallel(make(), process_group=group, bucket_cap_mb=0.004)

    models = (
        wrapped(None),
        wrapped(group_of("int2", inside)),
        wrapped(group_of("int2", inside, feedback=False)),
    )
    compression = compress_ddp(models[1])
    compress_ddp(models[2])
    sums = [[torch.zeros_like(p) for p in model.parameters()] for model in models]
    for _ in range(12):
        for total, model in zip(sums, models, strict=True):
            model.zero_grad()
            backward(model, rank, 0)
            for into, p in zip(total, model.parameters(), strict=True):
                into += p.grad
    near, blind = (sum(float((a - b).norm()) for a, b in zip(sums[0], s, strict=True)) for s in sums[1:])
    assert near < blind / 3, (inside, near, blind)
    assert any(bool(t.any()) for name, t in compression.state_dict().items() if "@" in name)
    return sums[1]


def _sync(rank: int, inside: str, sharded: bool) -> list[Tensor]:
    """Steps; then back to the checkpoint of the first two, and on: the same bits."""
    model = make()
    sync = GradientSync(
        model.named_parameters(), group_of("int2", inside), sharded=sharded, bucket_bytes=4096, rollback=True
    )

    def step(number: int) -> None:
        sync.start()
        backward(model, rank, number)
        sync.finish()
        for bucket in sync.buckets:
            bucket.master.sub_(bucket.grad, alpha=0.1)
        sync.commit()
        sync.gather()

    for number in range(2):
        step(number)
    saved = {k: t.clone() for k, t in sync.state_dict().items()}
    parameters = [p.detach().clone() for p in model.parameters()]
    ends = []
    for _ in range(2):
        for number in range(2, 4):
            step(number)
        ends.append([p.detach().clone() for p in model.parameters()])
        with torch.no_grad():
            for p, value in zip(model.parameters(), parameters, strict=True):
                p.copy_(value)
        sync.load_state_dict(saved)
    assert all(map(same, *ends)), "resume"
    assert any(bool(t.any()) for name, t in saved.items() if "@dp" in name), "residuals are in the checkpoint"
    return ends[0]


def _all(rank: int, world: int, report: Any) -> list[Tensor]:
    results: list[Tensor] = []
    for inside in ("none", "int4:block=32"):
        results += _ddp(rank, inside)
        for sharded in (True, False):
            results += _sync(rank, inside, sharded)
    return results


def test_feedback_in_levels() -> None:
    ranks = run_ranks(_all, WORLD, timeout=TIMEOUT_S)
    for other in ranks[1:]:
        assert all(map(same, ranks[0], other))

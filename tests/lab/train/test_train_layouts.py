"""Every layout, schedule and ZeRO stage trains as one process does.

Tolerance 1e-6, relative: the layouts differ in the order of fp32 sums (unit roundoff 6e-8) over at most a few
hundred terms, whose errors mostly cancel; what is seen is 1e-7. The gradient norm is over the clip limit in every
step, so that a wrong norm would also show in the next loss.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from train_runs import PRELOAD, Curve, run_curves, settings

from thinwire.lab.train import TrainConfig, Trainer, build_mesh
from thinwire.launch import run_ranks

TOLERANCE = 1e-6


def _config(text: str) -> TrainConfig:
    layout, zero, schedule = text.split()
    changes = {"micro_batch": 2} if layout in ("tp=4", "pp=4", "tp=2,pp=2") else {}
    return settings(layout, zero=int(zero[-1]), schedule=schedule, **changes)


FOUR = [
    "dp=4 zero=0 1f1b",
    "dp=4 zero=1 1f1b",
    "tp=4 zero=1 1f1b",
    "pp=4 zero=1 1f1b",
    "dp=2,tp=2 zero=0 1f1b",
    "dp=2,tp=2 zero=1 1f1b",
    "dp=2,tp=2 zero=3 1f1b",
    "dp=2,pp=2 zero=1 1f1b",
    "dp=2,pp=2 zero=1 interleaved",
    "dp=2,pp=2 zero=2 zbv",
    "tp=2,pp=2 zero=1 gpipe",
    "tp=2,pp=2 zero=1 zero-bubble",
    "tp=2,pp=2 zero=1 zbv",
]
TWO = ["dp=2 zero=1 1f1b", "tp=2 zero=1 1f1b", "pp=2 zero=1 1f1b"]
EIGHT = ["dp=2,tp=2,pp=2 zero=1 1f1b"]
EIGHT_SLOW = [
    "dp=2,tp=2,pp=2 zero=0 gpipe",
    "dp=2,tp=2,pp=2 zero=1 zero-bubble",
    "dp=2,tp=2,pp=2 zero=2 zbv",
    "dp=2,tp=2,pp=2 zero=3 interleaved",
]


@pytest.fixture(scope="module")
def reference() -> Curve:
    return run_curves([settings()])[0][0]


def _check(ranks: list[Curve], reference: Curve) -> None:
    assert all(curve == ranks[0] for curve in ranks)  # bit for bit on every rank
    assert ranks[0].losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert ranks[0].norms == pytest.approx(reference.norms, rel=TOLERANCE)
    assert ranks[0].evaluation == pytest.approx(reference.evaluation, rel=TOLERANCE)


@pytest.fixture(
    scope="module", params=[TWO, pytest.param(FOUR, marks=pytest.mark.slow), EIGHT], ids=["2", "4", "8"]
)
def runs(request: pytest.FixtureRequest) -> dict[str, list[Curve]]:
    names: list[str] = request.param
    return dict(zip(names, run_curves([_config(n) for n in names]), strict=True))


def test_the_clip_limit_is_active(reference: Curve) -> None:
    assert min(reference.norms) > settings().optimizer.clip


def test_layouts_train_as_one_process(runs: dict[str, list[Curve]], reference: Curve) -> None:
    for name, ranks in runs.items():
        try:
            _check(ranks, reference)
        except AssertionError as e:
            e.add_note(name)
            raise


@pytest.mark.slow
def test_eight_ranks_in_all_three_dimensions(reference: Curve) -> None:
    for ranks in run_curves([_config(n) for n in EIGHT_SLOW], timeout=220):
        _check(ranks, reference)


def _under_policies(rank: int, world: int, report: Any) -> tuple[list[Curve], bool]:
    warnings.simplefilter("ignore", FutureWarning)
    results = []
    for policy in (None, "none", "balanced"):
        config = settings("dp=2,tp=2")
        trainer = Trainer(config, build_mesh(config.layout, policy))
        results.append(Curve([trainer.step().loss for _ in range(3)], [], trainer.evaluate()))
    # Parameters that tp does not split must not drift apart, whatever each dp group's codec does.
    weights = trainer.weights()
    copies = torch.cat([weights[n].flatten() for n, p in weights.items() if not isinstance(p, DTensor)])
    everyone = [torch.empty_like(copies) for _ in range(world)]
    dist.all_gather(everyone, copies)
    return results, all(torch.equal(copies, other) for other in everyone)


def test_under_thinwires_groups(reference: Curve) -> None:
    ranks = run_ranks(_under_policies, 4, timeout=100, preload=PRELOAD)
    for results, same_copies in ranks:
        torchs, none, balanced = results
        assert none == torchs  # bit for bit
        assert balanced.losses != torchs.losses
        assert balanced.losses == pytest.approx(torchs.losses, rel=0.01)
        assert results == ranks[0][0]
        assert same_copies

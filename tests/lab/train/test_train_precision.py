"""bf16 and fp16: close to fp32, and an overflow skips the step on every rank or on none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from train_runs import PRELOAD, run_curves, settings

from thinwire.lab.train import StepRecord, Trainer, build_mesh
from thinwire.lab.train.config import LossScaleConfig
from thinwire.launch import run_ranks

# bf16 has a unit roundoff of 2^-9. A logit passes about 20 roundings in 4 layers, which add up like a random walk, and
# is of order 5: 2^-9 * sqrt(20) * 5 nats.
BF16_NATS = 0.044


@pytest.mark.slow
def test_bf16_is_close_to_fp32() -> None:
    fp32, buckets, fsdp = run_curves(
        [
            settings("dp=2,tp=2"),
            settings("dp=2,tp=2", precision="bf16"),
            settings("dp=2,tp=2", precision="bf16", zero=3),
        ]
    )
    for ranks in (buckets, fsdp):
        assert all(curve == ranks[0] for curve in ranks)
        assert ranks[0].losses == pytest.approx(fp32[0].losses, abs=BF16_NATS)
        assert ranks[0].losses != fp32[0].losses


def _overflow(
    rank: int, world: int, zero: int, report: Any
) -> tuple[list[StepRecord], list[float], list[float]]:
    warnings.simplefilter("ignore", FutureWarning)
    # The first scales are far too large for fp16's 65504.
    config = settings(
        "dp=2,pp=2", precision="fp16", zero=zero, loss_scale=LossScaleConfig(initial=2.0**24, interval=1000)
    )
    trainer = Trainer(config, build_mesh(config.layout))
    records, evaluations, scales = [], [trainer.evaluate()], []
    while len(records) < 20 and (len(records) < 3 or records[-1].skipped):
        records.append(trainer.step())
        evaluations.append(trainer.evaluate())
        scales.append(trainer.loss_scale)
    return records, evaluations, scales


@pytest.mark.parametrize("zero", [1, 2])
def test_an_fp16_overflow_skips_the_step_everywhere(zero: int) -> None:
    results = run_ranks(_overflow, 4, zero, timeout=100, preload=PRELOAD)
    records, evaluations, scales = results[0]
    skipped = [r.skipped for r in records]
    assert skipped[0]
    assert not skipped[-1]
    for other, other_evaluations, other_scales in results:
        assert [r.skipped for r in other] == skipped
        assert (other_evaluations, other_scales) == (evaluations, scales)
    for i, skip in enumerate(skipped):
        assert (evaluations[i + 1] == evaluations[i]) == skip  # parameters moved if and only if it was taken
    assert scales == [2.0 ** (24 - sum(skipped[: i + 1])) for i in range(len(skipped))]

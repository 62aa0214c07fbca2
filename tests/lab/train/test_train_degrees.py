"""The trainer with degrees of its own for parameters, gradients and optimizer state: it trains, resumes and refuses."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
from train_runs import PRELOAD, STEPS, Curve, run_curves, settings

from thinwire import Ladder, ShardingDegrees
from thinwire.errors import LayoutError, SpecError
from thinwire.lab.train import TrainConfig, Trainer, build_mesh
from thinwire.lab.train.layout import Layout
from thinwire.lab.train.sharded import build_ladder, sharding_of
from thinwire.lab.wiring import Wiring
from thinwire.launch import run_ranks

TOLERANCE = 1e-6  # as between layouts: sums in another order
WIRING = Wiring(ranks_per_host=2)


def make(spec: str, degrees: ShardingDegrees | None = None, **changes: Any) -> tuple[Trainer, Ladder]:
    warnings.simplefilter("ignore", FutureWarning)
    config = settings("dp=4", micro_batch=1, **changes)
    found = sharding_of(spec, degrees, config.layout, WIRING.ranks_per_host)
    assert found is not None
    ladder = build_ladder(found, WIRING, config.seed)
    config = dataclasses.replace(config, degrees=found.degrees)
    return Trainer(config, build_mesh(config.layout), ladder=ladder), ladder


def _curve(trainer: Trainer) -> Curve:
    records = [trainer.step() for _ in range(STEPS - 1)]
    evaluation = trainer.evaluate()  # between steps: it must not disturb the next one
    records.append(trainer.step())
    return Curve([r.loss for r in records], [r.grad_norm for r in records], evaluation)


Runs = tuple[tuple[str, ShardingDegrees | None], ...]
FAST: Runs = (("none", ShardingDegrees(1, 2, 4)), ("zeropp", None), ("sdp4", None))
SLOW: Runs = (
    ("none", ShardingDegrees(2, 2, 2)),
    ("none", ShardingDegrees(4, 4, 4, secondary=2)),
    ("zero1", None),
)


def _curves(rank: int, world: int, runs: Runs, report: Any) -> dict[str, Curve]:
    found = {}
    for spec, degrees in runs:
        trainer, ladder = make(spec, degrees)
        found[f"{spec} {degrees}"] = _curve(trainer)
        ladder.close()
    return found


@pytest.mark.parametrize("runs", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["three", "others"])
def test_degrees_train_as_replicas(runs: Runs) -> None:
    reference = run_curves([settings()])[0][0]
    every = run_ranks(_curves, 4, runs, timeout=150, preload=PRELOAD)
    assert all(found == every[0] for found in every)  # bit for bit on every rank
    for name, curve in every[0].items():
        exact = name.startswith(("none", "zero1"))
        tolerance = TOLERANCE if exact else 5e-3
        assert curve.losses == pytest.approx(reference.losses, rel=tolerance), name
        assert curve.evaluation == pytest.approx(reference.evaluation, rel=tolerance), name
        if exact:
            assert curve.norms == pytest.approx(reference.norms, rel=TOLERANCE), name


def _resume(rank: int, world: int, folder: Path, report: Any) -> list[tuple[Any, Any]]:
    results = []
    for i, (spec, changes) in enumerate(
        (("zeropp", {}), ("sdp4", {"precision": "bf16"}), ("zero1:balanced", {"precision": "fp16"}))
    ):
        found = []
        for resume in (False, True):
            trainer, ladder = make(spec, **changes)
            if resume:
                trainer.load(folder / str(i))
            else:
                for _ in range(2):
                    trainer.step()
                trainer.save(folder / str(i))
            losses = [trainer.step().loss for _ in range(2)]
            found.append((losses, trainer.evaluate(), trainer.loss_scale))
            ladder.close()
        results.append((found[0], found[1]))
    return results


@pytest.mark.slow
def test_resume_is_bit_exact(tmp_path: Path) -> None:
    for results in run_ranks(_resume, 4, tmp_path, timeout=200, preload=PRELOAD):
        for expected, resumed in results:
            assert resumed == expected


def _save(rank: int, world: int, folder: Path, report: Any) -> float:
    trainer, _ = make("none", ShardingDegrees(2, 4, 4))
    trainer.step()
    trainer.save(folder)
    return trainer.evaluate()


def _load(rank: int, world: int, folder: Path, report: Any) -> float:
    trainer, _ = make("none", ShardingDegrees(1, 1, 2))
    trainer.load(folder, weights_only=True)
    before = trainer.evaluate()
    trainer.step()
    assert abs(trainer.evaluate() - before) < 0.5
    return before


@pytest.mark.slow
def test_weights_load_into_other_degrees(tmp_path: Path) -> None:
    saved = run_ranks(_save, 4, tmp_path, timeout=60, preload=PRELOAD)
    loaded = run_ranks(_load, 4, tmp_path, timeout=60, preload=PRELOAD)
    assert loaded == [pytest.approx(saved[0], rel=TOLERANCE)] * 4


def test_degrees_from_toml() -> None:
    config = TrainConfig.from_toml(
        'layout = "dp=8"\nzero = {params = 2, grads = 4, optim = 8, secondary = 1}'
    )
    assert config.degrees == ShardingDegrees(2, 4, 8, 1)
    with pytest.raises(LayoutError, match="unknown key 'gradients'"):
        TrainConfig.from_toml("zero = {gradients = 4}")


def test_what_does_not_fit() -> None:
    layout = Layout(dp=8)
    with pytest.raises(LayoutError, match="does not divide grads=1"):
        settings("dp=8", micro_batch=1, degrees=ShardingDegrees(2, 1, 8)).check(8)
    with pytest.raises(LayoutError, match="over dp alone"):
        settings("dp=4,tp=2", degrees=ShardingDegrees(2, 2, 4)).check(8)
    with pytest.raises(LayoutError, match="over dp alone"):
        sharding_of("zeropp", None, Layout(dp=4, tp=2), 2)
    with pytest.raises(LayoutError, match="degrees of its own"):
        sharding_of("zeropp", ShardingDegrees(), layout, 2)
    with pytest.raises(LayoutError, match="not inside a host"):
        sharding_of("none", ShardingDegrees(8, 8, 8, secondary=4), layout, 2)
    with pytest.raises(SpecError, match="ddp"):
        settings("dp=8", zero=0, ddp=True, degrees=ShardingDegrees())

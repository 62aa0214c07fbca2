"""The trainer under a low-rank policy: it learns, ranks agree, ZeRO-0 and 1 agree, and a checkpoint holds what is needed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from train_runs import PRELOAD, settings

from thinwire.lab.train import TrainConfig, Trainer, build_mesh
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

LOW_RANK = from_dict(
    {"axis": {"dp": {"reduce": "lowrank:rank=2", "feedback": True, "min_nbytes": 0}}}, "low-rank"
)
STEPS = 12


def _train(rank: int, world: int, folder: Path, configs: list[TrainConfig], report: Any) -> list[Any]:
    warnings.simplefilter("ignore", FutureWarning)
    results = []
    for i, config in enumerate(configs):
        trainer = Trainer(config, build_mesh(config.layout, LOW_RANK))
        losses = [trainer.step().loss for _ in range(STEPS)]
        trainer.save(folder / str(i))
        after = [trainer.step().loss for _ in range(2)]
        resumed = Trainer(config, build_mesh(config.layout, LOW_RANK))
        resumed.load(folder / str(i))
        assert [resumed.step().loss for _ in range(2)] == after
        results.append(losses)
    return results


def test_it_learns_and_resumes(tmp_path: Path) -> None:
    configs = [settings("dp=2", zero=zero, steps=STEPS + 2) for zero in (0, 1)]
    first, second = run_ranks(_train, 2, tmp_path, configs, timeout=200, preload=PRELOAD)
    assert first == second
    replicas, sharded = first
    assert replicas == sharded
    assert replicas[-1] < replicas[0] - 0.2

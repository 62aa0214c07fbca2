"""What the trainer's tests share: small settings, and rank functions that train with them."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

from thinwire.lab.train import Layout, ModelConfig, TrainConfig, Trainer, build_mesh
from thinwire.lab.train.config import DataConfig
from thinwire.launch import run_ranks

PRELOAD = ("thinwire.lab.train",)
STEPS = 4


def settings(layout: str = "", **changes: Any) -> TrainConfig:
    base = TrainConfig(
        model=ModelConfig.preset("tiny"),
        layout=Layout.parse(layout),
        data=DataConfig(max_bytes=1 << 17),
        global_batch=8,
        micro_batch=1,
        bucket_bytes=1 << 16,  # several buckets
        eval_batches=1,
    )
    return dataclasses.replace(base, **changes)


@dataclass(frozen=True)
class Curve:
    losses: list[float]
    norms: list[float]
    evaluation: float


def curve(config: TrainConfig) -> Curve:
    trainer = Trainer(config, build_mesh(config.layout))
    records = [trainer.step() for _ in range(STEPS - 1)]
    evaluation = trainer.evaluate()  # between steps: it must not disturb the next one
    records.append(trainer.step())
    return Curve([r.loss for r in records], [r.grad_norm for r in records], evaluation)


def curves(rank: int, world: int, configs: list[TrainConfig], report: Any) -> list[Curve]:
    warnings.simplefilter("ignore", FutureWarning)
    return [curve(config) for config in configs]


def run_curves(configs: list[TrainConfig], timeout: float = 120) -> list[list[Curve]]:
    """The curve of each configuration on each rank, all in one set of processes."""
    by_rank = run_ranks(curves, configs[0].layout.world, configs, timeout=timeout, preload=PRELOAD)
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]

"""``thinwire train``: one training run, its log and its checkpoints in a folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...integrate.mesh import groups, init_mesh
from ...presets import load
from ..wiring import Wiring
from .config import TrainConfig
from .mesh import build_mesh
from .sharded import build_ladder, sharding_of
from .trainer import Trainer

Report = Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Job:
    """A run: its settings, its policy, its folder, and where to resume from (None: from the start)."""

    config: TrainConfig
    policy: str
    out: str
    resume: str | None = None
    save_every: int = 100
    eval_every: int = 100


def train_rank(rank: int, world: int, job: Job, wiring: Wiring, report: Report) -> dict[str, Any]:
    """Train in one rank. Rank 0 writes ``log.jsonl`` and reports ``("step", {...})``; returns the summary."""
    config, out = job.config, Path(job.out)
    scheme = sharding_of(job.policy, config.degrees, config.layout, wiring.ranks_per_host)
    if scheme is None:
        mesh = init_mesh(
            config.layout.mesh_sizes(),
            load(job.policy),
            seed=config.seed,
            backend=wiring.backend,
            options=wiring.options,
        )
        ladder, used = None, groups(mesh)
    else:
        config = dataclasses.replace(config, degrees=scheme.degrees)
        mesh, ladder = build_mesh(config.layout), build_ladder(scheme, wiring, config.seed)
        used = ladder.groups()
    trainer = Trainer(config, mesh, out / "cache", ladder=ladder)
    if job.resume is not None:
        trainer.load(job.resume)
    loss = None
    log = (out / "log.jsonl").open("a") if rank == 0 else None
    try:
        while trainer.steps_done < config.steps:
            record = dataclasses.asdict(trainer.step())
            last = trainer.steps_done == config.steps
            if last or trainer.steps_done % job.eval_every == 0:
                record["val_loss"] = loss = trainer.evaluate()
            if last or trainer.steps_done % job.save_every == 0:
                trainer.save(out / "checkpoints")
            if log is not None:
                log.write(json.dumps(record) + "\n")
                log.flush()
                report(("step", record))
    finally:
        if log is not None:
            log.close()
    by_axis: dict[str, dict[str, float]] = {}
    for group in used.values():
        for axis, sums in group.traffic.by_axis().items():
            into = by_axis.setdefault(axis, dict.fromkeys(sums, 0.0))
            for key, value in sums.items():
                into[key] = into.get(key, 0.0) + value
    return {"steps": trainer.steps_done, "val_loss": loss, "traffic": by_axis}

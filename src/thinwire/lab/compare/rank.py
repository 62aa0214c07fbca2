"""What each rank of a comparison does: all policies' trainers side by side, taking turns."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...collectives.traffic import Entry, Message, Traffic
from ...integrate.ladder import Ladder
from ...integrate.mesh import groups
from .. import zero_comm
from ..cluster import interface_tx_bytes
from ..train.config import TrainConfig
from ..train.mesh import build_mesh
from ..train.sharded import build_ladder, is_sharding
from ..train.trainer import Trainer
from ..wiring import Wiring
from .plan import Plan
from .scheme import Scheme, scheme

Report = Callable[[Any], None]


@dataclass
class Track:
    """What one rank has measured of one policy. Only timed steps count in ``seconds``, traffic and interface."""

    train_loss: list[float] = field(default_factory=list)
    val_curve: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    entries: dict[Message, Entry] = field(default_factory=dict)
    interface_bytes: int | None = None


class Contestant:
    """A scheme in training: its groups, its trainer, its track."""

    def __init__(self, scheme: Scheme, config: TrainConfig, wiring: Wiring) -> None:
        self.scheme = scheme
        self.ladder: Ladder | None = None
        sharding = scheme.sharding(config, wiring)
        if sharding is None:
            self.mesh = scheme.mesh(config, wiring)
        else:
            config = dataclasses.replace(config, degrees=sharding.degrees)
            self.mesh, self.ladder = build_mesh(config.layout), build_ladder(sharding, wiring, config.seed)
        self.trainer = Trainer(config, self.mesh, hook=scheme.hook, ladder=self.ladder)
        self.track = Track()

    @property
    def _traffics(self) -> list[Traffic]:
        used = groups(self.mesh) if self.ladder is None else self.ladder.groups()
        return [group.traffic for group in used.values()]

    def run(self, steps: range, interface: str, *, timed: bool) -> None:
        """Train the steps of a block; the ranks start and end it together."""
        for traffic in self._traffics:
            traffic.reset()
        dist.barrier()
        before = interface_tx_bytes(interface)
        last = time.perf_counter()
        seconds = []
        for _ in steps:
            self.track.train_loss.append(self.trainer.step().loss)
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        dist.barrier()
        if not timed:
            return
        self.track.seconds += seconds
        after = interface_tx_bytes(interface)
        if before is not None and after is not None:
            self.track.interface_bytes = (self.track.interface_bytes or 0) + after - before
        for traffic in self._traffics:
            for message, entry in traffic.entries().items():
                into = self.track.entries.setdefault(message, Entry())
                into.calls += entry.calls
                into.raw_bytes += entry.raw_bytes
                into.tally.add(entry.tally)

    def evaluate(self) -> None:
        """One more point of the validation curve."""
        self.track.val_curve.append((self.trainer.steps_done, self.trainer.evaluate()))

    def save(self, folder: Path, rank: int) -> None:
        """Checkpoint of the trainer and of this rank's track; the track is found by the trainer's step."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(vars(self.track), self._track_file(folder, rank))
        dist.barrier()
        self.trainer.save(folder)

    def load(self, folder: Path, rank: int) -> None:
        """Go on from the checkpoint in ``folder``, if there is one."""
        if not (folder / "latest").exists():
            return
        self.trainer.load(folder)
        values = torch.load(self._track_file(folder, rank), weights_only=False)
        self.track = Track(**values)

    def close(self) -> None:
        """End the groups of this scheme."""
        if self.ladder is not None:
            self.ladder.close()
        for name in self.mesh.mesh_dim_names or ():
            group = self.mesh.get_group(name)
            if group is not dist.group.WORLD:  # a plain mesh over all ranks has the world's own
                dist.destroy_process_group(group)

    def _track_file(self, folder: Path, rank: int) -> Path:
        return folder / f"track-{self.trainer.steps_done}-{rank}.pt"


def compare_rank(
    rank: int,
    world: int,
    plan: Plan,
    todo: dict[int, tuple[str, ...]],
    state: str,
    wiring: Wiring,
    interface: str,
    report: Report,
) -> None:
    """Run every seed of ``todo`` (seed -> policies); rank 0 reports ``("run", {...})`` for each finished one."""
    total = sum(plan.config.steps * len(names) for names in todo.values())
    done = 0
    for seed, names in todo.items():
        config = dataclasses.replace(plan.config, seed=seed)
        folder = Path(state) / f"seed{seed}"
        contestants = {name: Contestant(scheme(name), config, wiring) for name in names}
        # The limit of schemes that all cut state by degrees is one that does so, too.
        limit = "zero3" if all(is_sharding(name) for name in plan.policies) else "none"
        zero = Contestant(
            scheme(limit), config, Wiring(zero_comm.BACKEND, ranks_per_host=wiring.ranks_per_host)
        )
        if plan.resumable:
            for name, contestant in contestants.items():
                contestant.load(folder / _file_name(name), rank)
        for index, steps in plan.blocks():
            if plan.zero_block(index):
                zero.run(steps, interface, timed=index > 0)
            for name in plan.order(index, names):
                contestant = contestants[name]
                done += len(steps)
                if contestant.trainer.steps_done >= steps.stop:
                    continue
                contestant.run(steps, interface, timed=index > 0)
                if (
                    steps.stop // plan.eval_every > steps.start // plan.eval_every
                    or steps.stop == config.steps
                ):
                    contestant.evaluate()
                if rank == 0:
                    report(("progress", done, total, f"seed {seed}, {name}, step {steps.stop}"))
            if plan.resumable and (index + 1) % plan.save_every == 0:
                for name, contestant in contestants.items():
                    contestant.save(folder / _file_name(name), rank)
        for contestant in contestants.values():
            _report_run(contestant, zero, config, rank, report)
        for contestant in (*contestants.values(), zero):
            contestant.close()
        # A group's threads wake up now and then for as long as it exists: those of the last seed would slow the next.
        del contestants, contestant, zero
        gc.collect()


def _report_run(
    contestant: Contestant, zero: Contestant, config: TrainConfig, rank: int, report: Report
) -> None:
    """Collect the ranks' tracks at rank 0 and report them as one run. Every rank calls it."""
    tracks: list[Track | None] = [None] * dist.get_world_size()
    dist.all_gather_object(tracks, contestant.track)
    if rank == 0:
        body = {
            "policy": contestant.scheme.name,
            "description": contestant.scheme.description,
            "seed": config.seed,
            "zero_seconds": zero.track.seconds,
            "tracks": tracks,
        }
        report(("run", body))


def _file_name(policy: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in policy)


def message_totals(tracks: list[Track]) -> dict[Message, Entry]:
    """Entries summed over ranks."""
    sums: dict[Message, Entry] = defaultdict(Entry)
    for track in tracks:
        for message, entry in track.entries.items():
            into = sums[message]
            into.calls += entry.calls
            into.raw_bytes += entry.raw_bytes
            into.tally.add(entry.tally)
    return dict(sorted(sums.items()))

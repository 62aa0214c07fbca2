"""Resuming is bit-exact; whatever ends a save early leaves the checkpoint before it."""

from __future__ import annotations

import ctypes
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from train_runs import PRELOAD, settings

from thinwire.collectives.traffic import Message
from thinwire.errors import CheckpointError, RankError
from thinwire.group import ThinwireGroup
from thinwire.integrate.mesh import groups
from thinwire.lab.train import TrainConfig, Trainer, build_mesh
from thinwire.launch import run_ranks
from thinwire.policy import Policy, from_dict

# What FSDP2 sends: residuals, and rounding that depends on the step.
SHARDED = from_dict(
    {
        "axis": {
            "dp": {"reduce": "int4:block=128,round=stochastic", "feedback": True},
            "zero": {"gather": "int8:block=128,round=stochastic"},
        }
    },
    "sharded",
)


def make_trainer(
    config: TrainConfig, policy: Policy | str | None = None, mesh: DeviceMesh | None = None
) -> Trainer:
    warnings.simplefilter("ignore", FutureWarning)
    return Trainer(config, mesh or build_mesh(config.layout, policy))


def losses(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.step().loss for _ in range(steps)]


def _resume(
    rank: int, world: int, folder: Path, runs: list[tuple[TrainConfig, Policy | str | None]], report: Any
) -> list[Any]:
    results = []
    for i, (config, policy) in enumerate(runs):
        found = []
        for resume in (False, True):
            mesh = build_mesh(config.layout, policy)
            trainer = make_trainer(config, mesh=mesh)
            if resume:
                trainer.load(folder / str(i))
            else:
                losses(trainer, 2)
                trainer.save(folder / str(i))
            for group in groups(mesh).values():
                group.traffic.reset()
            losses_after = losses(trainer, 2)
            sent = {axis: wire_bytes(group) for axis, group in groups(mesh).items()}
            found.append((losses_after, sent, trainer.evaluate(), trainer.loss_scale))
        results.append(tuple(found))
    return results


def wire_bytes(group: ThinwireGroup) -> dict[Message, int]:
    """Of each kind of message with floats: what comes before the first of a kind is sent anew by a resumed run."""
    entries = group.traffic.entries()
    return {m: entry.tally.wire_bytes for m, entry in entries.items() if "float" in m.dtype}


@pytest.mark.slow
def test_resume_is_bit_exact(tmp_path: Path) -> None:
    # DeepSpeed 4851, DeepSpeed 7164, DeepSpeed 7606, Megatron 4563, Megatron 5236
    runs = [
        (settings("dp=2,tp=2"), "lossless"),
        (settings("dp=2,pp=2", precision="fp16", schedule="zbv"), None),
        (settings("dp=2,tp=2", zero=3, precision="bf16"), SHARDED),
        (settings("dp=2,tp=2"), "balanced"),
        (settings("dp=2,pp=2", zero=0), "balanced"),
        (settings("dp=2,pp=2", zero=2, precision="fp16", schedule="zbv"), SHARDED),
    ]
    for results in run_ranks(_resume, 4, tmp_path, runs, timeout=200, preload=PRELOAD):
        for expected, resumed in results:
            assert resumed == expected


def _save(rank: int, world: int, folder: Path, config: TrainConfig, report: Any) -> float:
    trainer = make_trainer(config)
    losses(trainer, 2)
    trainer.save(folder)
    return trainer.evaluate()


def _weights_only(rank: int, world: int, folder: Path, config: TrainConfig, report: Any) -> float:
    trainer = make_trainer(config)
    trainer.load(folder, weights_only=True)
    before = trainer.evaluate()
    trainer.step()  # the masters were set too: one step changes the loss by little
    assert abs(trainer.evaluate() - before) < 0.5
    return before


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (settings("dp=2,tp=2"), settings("dp=2,pp=2", zero=2)),
        pytest.param(
            settings("dp=2,tp=2", zero=3), settings("tp=2,pp=2", micro_batch=2), marks=pytest.mark.slow
        ),
    ],
    ids=["buckets-to-fsdp", "fsdp-to-buckets"],
)
def test_weights_load_into_another_layout(tmp_path: Path, before: TrainConfig, after: TrainConfig) -> None:
    saved = run_ranks(_save, 4, tmp_path, before, timeout=60, preload=PRELOAD)
    loaded = run_ranks(_weights_only, 4, tmp_path, after, timeout=60, preload=PRELOAD)
    assert loaded == [pytest.approx(saved[0], rel=1e-6)] * 4  # the layouts' tolerance


def _errors(rank: int, world: int, folder: Path, report: Any) -> list[str]:
    """What loading says of no checkpoint, of another run's, and of incomplete ones."""
    messages = []

    def attempt(trainer: Trainer, where: Path = folder) -> None:
        with pytest.raises(CheckpointError) as caught:
            trainer.load(where)
        messages.append(str(caught.value))

    config = settings("dp=2")
    trainer = make_trainer(config)
    attempt(trainer, folder / "none")
    path = trainer.save(folder)
    attempt(make_trainer(settings("dp=2", seed=1, zero=0)))
    for name in (".metadata", "run.json"):
        trainer.evaluate()  # both ranks are past their attempt
        if rank == 0:
            (path / name).unlink()
        trainer.evaluate()
        attempt(trainer)
    return messages


def test_checkpoints_that_cannot_be_resumed(tmp_path: Path) -> None:
    ranks = run_ranks(_errors, 2, tmp_path, timeout=60, preload=PRELOAD)
    assert ranks[0] == ranks[1]
    none, other, no_metadata, no_record = ranks[0]
    assert "no checkpoint" in none
    assert "seed was 0, is 1; zero was 1, is 0" in other
    assert "is incomplete: .metadata" in no_metadata
    assert "is incomplete: run.json" in no_record


def _killed_while_saving(rank: int, world: int, folder: Path, report: Any) -> None:
    trainer = make_trainer(settings("dp=2"))
    losses(trainer, 1)
    trainer.save(folder)
    report((losses(trainer, 1), trainer.evaluate()))
    if rank == 0:  # the data is written, its index is not
        FileSystemWriter.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    trainer.save(folder)


def _resume_after_kill(rank: int, world: int, folder: Path, report: Any) -> tuple[list[float], float]:
    trainer = make_trainer(settings("dp=2"))
    trainer.load(folder)
    result = (losses(trainer, 1), trainer.evaluate())
    trainer.save(folder)  # and what the kill left over is cleared away
    return result


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    reports: list[Any] = []
    with pytest.raises(RankError, match="rank 0 of 2 failed"):
        run_ranks(
            _killed_while_saving,
            2,
            tmp_path,
            timeout=60,
            preload=PRELOAD,
            on_message=lambda _, message: reports.append(message),
        )
    assert list(tmp_path.glob("*.partial"))
    resumed = run_ranks(_resume_after_kill, 2, tmp_path, timeout=60, preload=PRELOAD)
    assert resumed == reports
    assert not list(tmp_path.glob("*.partial"))


def _full_disk(rank: int, world: int, folder: Path, report: Any) -> tuple[str, bool]:
    trainer = make_trainer(settings("dp=2"))
    losses(trainer, 1)
    trainer.save(folder)
    expected = losses(trainer, 1)
    with pytest.raises(CheckpointError) as caught:
        trainer.save(folder)
    resumed = make_trainer(settings("dp=2"))
    resumed.load(folder)
    return str(caught.value), losses(resumed, 1) == expected


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # Room for one checkpoint of about 0.9 MB, not for two.
    if libc.mount(b"tmpfs", os.fsencode(tmp_path), b"tmpfs", 0, b"size=1400k") != 0:
        pytest.skip(f"cannot mount a small file system: {os.strerror(ctypes.get_errno())}")
    try:
        results = run_ranks(_full_disk, 2, tmp_path, timeout=60, preload=PRELOAD)
        assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000001"]
    finally:
        libc.umount2(os.fsencode(tmp_path), 2)
    for message, same in results:
        assert "No space left on device" in message
        assert same


def _keep(rank: int, world: int, folder: Path, report: Any) -> list[list[str]]:
    trainer = make_trainer(settings())
    kept = []
    for keep in (2, 2, 2, 1):
        trainer.save(folder, keep)
        kept.append(sorted(p.name for p in folder.glob("step-*")))
        assert (folder / "latest").read_text() == kept[-1][-1]
        if len(kept) != 2:
            trainer.step()
    return kept


def test_old_checkpoints_go_and_a_second_one_of_a_step_does_not_touch_the_first(tmp_path: Path) -> None:
    assert run_ranks(_keep, 1, tmp_path, timeout=60, preload=PRELOAD)[0] == [
        ["step-00000000"],
        ["step-00000000", "step-00000001"],
        ["step-00000001", "step-00000001.1"],
        ["step-00000002"],
    ]

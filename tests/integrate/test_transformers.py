"""A Trainer under compression: ranks stay alike, bytes are fewer, the loss is that of a plain run, resume is bit-exact."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from support import TIMEOUT_S
from thinwire.errors import CheckpointError, UnsupportedError
from thinwire.launch import run_ranks

from . import language_models as models

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("kernels")


STEPS = 10


def trainer(kind: str, folder: Path, rank: int, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    os.environ |= {"LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}  # as torchrun does; the group is made
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        **settings,
    }
    data = [{"input_ids": piece, "labels": piece} for piece in models.pieces(128)]
    made = Trainer(models.make(kind), TrainingArguments(**arguments), train_dataset=data)
    made.remove_callback(PrinterCallback)
    return made


def losses(made: Any) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, models.parameters(a.model), models.parameters(b.model)))


def _trains(rank: int, world: int, kind: str, folder: Path, settings: dict[str, Any], report: Any) -> Any:
    from thinwire.integrate.transformers import compress

    plain = trainer(kind, folder / "plain", rank, **settings)
    plain.train()
    kept = folder / "compressed"
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2, **settings}
    compressed = trainer(kind, kept, rank, **saving)
    compression = compress(compressed, models.policy("int4:block=32,round=stochastic"))
    compressed.train()
    middle = kept / f"checkpoint-{STEPS // 2}"
    assert (middle / f"thinwire_{rank}.pt").is_file()

    expected, found = losses(plain), losses(compressed)
    assert found[0] == pytest.approx(expected[0], rel=1e-3), "the first loss is of the same model"
    assert expected[0] - expected[-1] > 1.0
    assert abs(found[-1] - expected[-1]) < 0.05, (
        "int4 with feedback follows the plain run within a twentieth of that"
    )

    (sent,) = [m for m in compression.stats().messages if m.compressed]
    assert (sent.axis, sent.op, sent.role) == ("dp", "all_reduce", "gradient")
    trained = sum(p.numel() for p in compressed.model.parameters())
    assert sent.raw_bytes > 0.95 * STEPS * 4 * trained, "the gradients of all steps"
    assert sent.ratio > 6, "int4 and a scale of 4 bytes for 32 values: 6.4, but for the heads of frames"
    assert not plain.model_wrapped._comm_hooks

    if kind == "neox":
        # transformers 5.24 writes GPT-NeoX's head as embed_out and does not load it again, with compression or without.
        return models.parameters(compressed.model)
    resumed = trainer(kind, kept, rank, **saving)
    again = compress(resumed, models.policy("int4:block=32,round=stochastic"))
    resumed.train(resume_from_checkpoint=str(middle))
    assert same(compressed, resumed)
    states = [c.models[-1].state_dict() for c in (compression, again)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    return models.parameters(compressed.model)

    if kind != "gpt2":
        return models.parameters(compressed.model)
    with pytest.raises(UnsupportedError, match="a model is prepared already"):
        compress(compressed)
    (middle / f"thinwire_{rank}.pt").unlink()
    with pytest.raises(CheckpointError, match=f"thinwire_{rank}.pt is missing: .*resume_without_residuals"):
        resumed.train(resume_from_checkpoint=str(middle))
    return models.parameters(compressed.model)


def check(kind: str, folder: Path, **settings: Any) -> None:
    first, second = run_ranks(_trains, 2, kind, folder, settings, timeout=TIMEOUT_S)
    assert all(map(torch.equal, first, second)), "all ranks have the same parameters"


def test_a_trainer_with_gpt2(tmp_path: Path) -> None:
    check("gpt2", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("neox", {}),
        ("llama", {}),
        ("neox", {"ddp_find_unused_parameters": False}),  # DDP makes its buckets anew
        ("llama", {"ddp_find_unused_parameters": False, "gradient_checkpointing": True}),
        ("llama", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
        ("neox", {"bf16": True}),
    ],
)
def test_a_trainer(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    check(kind, tmp_path, **settings)


EXAMPLES = Path(thinwire.__file__).parents[2] / "examples"


def run(script: str, *args: str, under: tuple[str, ...] = ("-m", "torch.distributed.run")) -> str:
    source = Path(thinwire.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, *under, "--nproc-per-node", "2", str(EXAMPLES / script), *args],
        env={**os.environ, "PYTHONPATH": str(source), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


UNMODIFIED = ("-m", "thinwire.cli", "run", "--policy", "balanced")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "args"),
    [
        ("hf_trainer.py", ("--steps", "10", "--batch", "4", "--model", "gpt2")),
        ("hf_trainer.py", ("--steps", "10", "--batch", "4", "--model", "neox", "--accumulate", "2")),
        ("hf_trainer.py", ("--steps", "10", "--batch", "4", "--model", "llama", "--bf16")),
        ("accelerate_loop.py", ("--steps", "10", "--batch", "4")),
        ("accelerate_loop.py", ("--steps", "10", "--batch", "4", "--accumulate", "2", "--precision", "bf16")),
    ],
)
def test_an_unmodified_script_under_thinwire_run(script: str, args: tuple[str, ...], tmp_path: Path) -> None:
    if script == "hf_trainer.py":
        args = (*args, "--out", str(tmp_path))
    said = run(script, *args, under=UNMODIFIED)
    assert "DistributedDataParallel over axis dp, 2 ranks: with error feedback" in said
    (row,) = [line.split() for line in said.splitlines() if line.split()[:4] == ROW]
    assert int(row[4]) >= 10
    assert float(row[7]) > 5


ROW = ["dp", "all_reduce", "int4:block=128,round=nearest", "gradient"]


@pytest.mark.slow
def test_the_example_resumes(tmp_path: Path) -> None:
    words = ("--policy", "balanced", "--batch", "4", "--out", str(tmp_path))
    assert "times smaller" in run("hf_trainer.py", *words, "--steps", "20")
    assert (tmp_path / "checkpoint-20" / "thinwire_1.pt").is_file()
    assert "times smaller" in run("hf_trainer.py", *words, "--steps", "22", "--resume")

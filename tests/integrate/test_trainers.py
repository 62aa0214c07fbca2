"""Scripts of trainers that reduce gradients themselves, unchanged, under ``thinwire run``."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import thinwire

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.slow]
ROOT = Path(thinwire.__file__).parents[2]


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("deepspeed", ("examples/deepspeed_zero.py", "--stage", "2")),
        ("megatron.core", ("examples/megatron_ddp.py",)),
    ],
)
def test_gradients_travel_compressed(package: str, words: tuple[str, ...]) -> None:
    try:
        found = bool(find_spec(package))
    except ModuleNotFoundError:
        found = False
    if not found:
        pytest.skip(f"{package} is not installed")
    policy = "examples/without_feedback.toml"
    done = subprocess.run(
        [sys.executable, "-m", "thinwire.cli", "run", "--policy", policy, "--nproc-per-node=2", *words],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "GLOO_SOCKET_IFNAME": "lo",
            "DS_ACCELERATOR": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if ": loss " in line]
    assert losses[-1] < 0.85 * losses[0]
    rows = [line.split() for line in done.stderr.splitlines() if "all_reduce  int8" in line]
    (row,) = rows
    assert float(row[7]) > 3.5, "raw bytes over wire bytes"

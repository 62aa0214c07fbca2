"""``thinwire run`` from the outside: an unmodified script in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from thinwire.errors import LayoutError
from thinwire.run.command import main

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.timeout(150)]

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import neighbour

dist.init_process_group(*sys.argv[1].split())
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(rank)
losses = []
for _ in range(15):
    x = torch.randn(32, 64, generator=generator)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
sub = dist.new_group([0, 1], backend="gloo")
dist.all_reduce(torch.ones(8192), group=sub)
if rank == 0:
    print("LOSSES", losses[0], losses[-1], flush=True)
    print("GROUPS", type(dist.group.WORLD).__name__, type(sub).__name__, dist.get_backend(sub), flush=True)
if rank == int(sys.argv[2]):
    raise ValueError("the script's own reason")
dist.destroy_process_group()
"""


def run(
    folder: Path, script: str, *words: str, args: tuple[str, ...] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    (folder / "neighbour.py").touch()
    path = folder / "train.py"
    path.write_text(script)
    source = Path(thinwire.__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-m", "thinwire.cli", "run", "--policy", "balanced", *words, str(path), *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(source), "GLOO_SOCKET_IFNAME": "lo", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_unmodified_script_is_compressed(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT, "--nproc-per-node", "2", "--log", "sent.jsonl", args=("", "-1"))
    assert done.returncode == 0, done.stderr
    said = {words[0]: words[1:] for line in done.stdout.splitlines() if (words := line.split())}
    first, last = map(float, said["LOSSES"])
    assert last < 0.95 * first
    assert said["GROUPS"] == ["LaunchedGroup", "LaunchedGroup", "gloo"]
    assert "group default_pg: axis dp, 2 ranks over gloo" in done.stderr
    assert "DistributedDataParallel over axis dp, 2 ranks: with error feedback" in done.stderr
    (row,) = [line.split() for line in done.stderr.splitlines() if line.split()[:4] == ROW]
    assert int(row[4]) >= 15
    assert float(row[7]) > 3
    assert row[-2:] == ["error", "feedback"]
    assert "WITHOUT error feedback" in done.stderr, "of the script's plain all_reduce"
    for rank in range(2):
        (line,) = (tmp_path / f"sent.rank{rank}.jsonl").read_text().splitlines()
        assert json.loads(line)["rank"] == rank


ROW = ["dp", "all_reduce", "int4:block=128,round=nearest", "gradient"]


@pytest.mark.slow
def test_a_script_that_fails(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT, "--nproc-per-node=2", args=("gloo", "1"))
    assert done.returncode == 1
    assert "ValueError: the script's own reason" in done.stderr
    assert "rank 0 sent under policy balanced" in done.stderr or "Root Cause" in done.stderr


def test_a_rank_that_slurm_has_started(tmp_path: Path) -> None:
    script = """
import os, signal, sys
import torch.distributed as dist
dist.init_process_group()
os.kill(os.getpid(), signal.SIGUSR1)
sys.exit(5 + dist.get_world_size())
"""
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "MASTER_PORT": "0"}
    done = run(tmp_path, script, **environ)
    assert done.returncode == 6, done.stderr
    assert "policy balanced, group default_pg: axis dp, 1 ranks" in done.stderr
    assert done.stderr.count("rank 0 sent under policy balanced") == 2, (
        "asked for by the signal, and at the end"
    )


def test_what_is_wrong_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('started')")
    for name, value in {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LayoutError, match="Slurm has started 2 ranks"):
        main([str(script)])

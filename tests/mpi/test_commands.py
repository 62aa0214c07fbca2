"""The commands over MPI: training under mpirun, and the benchmark, on this host and on emulated ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from thinwire.errors import LayoutError
from thinwire.lab.bench.collective import OPS
from thinwire.lab.commands import command
from thinwire.lab.mpirun import Mpirun

pytestmark = pytest.mark.usefixtures("kernels")


def bench(mpirun: Mpirun, out: Path, *more: str) -> dict[tuple[str, str], dict[str, float]]:
    """Rows of ``thinwire bench collective --transport mpi`` by (op, contender)."""
    arguments = ["bench", "collective", "--transport", "mpi", "--mpirun", mpirun.path, "--codec", "int8"]
    arguments += ["--size", "1MiB", "--repeats", "3", "--warmup", "1", "--check", "--out", str(out), *more]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    read = json.loads((out / "result.json").read_text())
    assert read["mpirun"] == mpirun.kind
    assert read["broken_promises"] == []
    return {(row["op"], row["contender"]): row for row in read["rows"]}


@pytest.mark.slow
def test_bench_on_this_host(mpirun: Mpirun, tmp_path: Path) -> None:
    rows = bench(mpirun, tmp_path, "--ranks", "3")
    assert {name for _, name in rows} == {"plain", "plain bf16", "none", "int8"}
    assert {op for op, _ in rows} == set(OPS)
    for (op, name), row in rows.items():
        assert row["rel_l2"] < (1e-6 if name in ("plain", "none") else 2e-2), (op, name)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.usefixtures("netlab")
def test_bench_on_emulated_hosts(mpirun: Mpirun, tmp_path: Path) -> None:
    places = ("--ranks", "3", "--hosts", "3", "--rate", "200mbit")
    rows = bench(mpirun, tmp_path, *places, "--op", "all_reduce", "--gloo")
    for name in ("plain", "gloo", "gloo bf16", "none", "int8"):
        # Nothing is faster than its link: no shared memory, no other way round.
        assert rows["all_reduce", name]["x_link"] > 0.95, name
    assert rows["all_reduce", "int8"]["us"] < rows["all_reduce", "plain"]["us"]


@pytest.mark.slow
def test_train_under_mpirun(mpirun: Mpirun, tmp_path: Path) -> None:
    arguments = [
        "--transport",
        "mpi",
        "--layout",
        "dp=2,tp=2",
        "--model",
        "tiny",
        "--steps",
        "3",
        "--batch",
        "4",
    ]
    program = [sys.executable, "-m", "thinwire.cli", "train", *arguments, "--out", str(tmp_path / "run")]
    line = mpirun.command(4, program, [], tmp_path)
    done = subprocess.run(
        line,
        env={**os.environ, **mpirun.environment()},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = [json.loads(text) for text in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2, 3]
    assert (tmp_path / "run" / "checkpoints").exists()


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*arguments: str) -> None:
        CliRunner().invoke(command, [*arguments, "--out", str(tmp_path)], catch_exceptions=False)

    with pytest.raises(LayoutError, match="--hosts emulates a network"):
        run("train", "--transport", "mpi", "--hosts", "2")
    with pytest.raises(LayoutError, match="is for --transport mpi"):
        run("bench", "collective", "--mpirun", "/x/mpirun")
    with pytest.raises(LayoutError, match="--gloo is for --transport mpi"):
        run("bench", "collective", "--gloo")
    monkeypatch.setenv("PMI_SIZE", "8")
    with pytest.raises(
        LayoutError, match=r"MPICH's mpirun \(PMI_SIZE\) has started 8 .* add --transport mpi"
    ):
        run("train")

"""A rank that is lost under mpirun: the others are told which one, and all processes end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mpi import jobs
from thinwire.errors import RankError
from thinwire.lab.mpirun import Mpirun, run_mpi_ranks

pytestmark = pytest.mark.usefixtures("kernels")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_fault(
    what: str, codec: str, mpirun: Mpirun, timeout: float = 60.0
) -> tuple[str, dict[int, str], float]:
    """The error, what the ranks reported before they ended, and the seconds from the fault to the end of all."""
    pids: dict[int, int] = {}
    saw: dict[int, str] = {}
    started = 0.0

    def hear(rank: int, message: Any) -> None:
        nonlocal started
        if isinstance(message, int):
            pids[rank] = message
            started = time.monotonic()
        else:
            saw[rank] = message

    with pytest.raises(RankError) as error:
        run_mpi_ranks(jobs.fault, 3, what, codec, mpirun=mpirun, timeout=timeout, on_message=hear)
    took = time.monotonic() - started
    assert len(pids) == 3
    assert not [pid for pid in pids.values() if alive(pid)], "an orphan"
    return str(error.value), saw, took


def test_a_rank_that_raises(mpirun: Mpirun) -> None:
    text, saw, took = run_fault("raise", "none", mpirun)
    assert "ValueError: rank 1 has had enough" in text
    for rank in (0, 2):
        assert "rank(s) 1 left the MPI job" in saw[rank]
    assert took < 20


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_rank_that_exits_early(mpirun: Mpirun, codec: str) -> None:
    _, saw, took = run_fault("exit", codec, mpirun)
    # The one that is told first tells the other.
    assert any("rank(s) 1 left the MPI job" in said for said in saw.values())
    assert set(saw) == {0, 2}
    assert all("PeerError" in said for said in saw.values())
    assert took < 25


@pytest.mark.slow
def test_a_rank_that_is_killed(mpirun: Mpirun) -> None:
    text, _, took = run_fault("kill", "int8", mpirun)
    assert "no answer from rank(s)" in text or "rank 1" in text
    assert took < 20


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_rank_that_does_not_come_in_time(mpirun: Mpirun, codec: str) -> None:
    _, saw, took = run_fault("late", codec, mpirun)
    assert set(saw) == {0, 2}
    assert any("not done within 5 s" in said for said in saw.values())
    assert took < 40


@pytest.mark.slow
def test_launcher_and_library_of_different_mpis(mpich: Mpirun, openmpi: Mpirun) -> None:
    mixed = Mpirun(mpich.path, mpich.kind, openmpi.library)
    with pytest.raises(
        RankError, match=r"has started 2 processes, but Open MPI .* sees 1: launcher and library"
    ):
        run_mpi_ranks(jobs.rank_and_size, 2, mpirun=mixed)

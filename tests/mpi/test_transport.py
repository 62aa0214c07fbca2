"""Over MPI everything is as over gloo: every op, every kind of codec, the same bits and the same bytes."""

from __future__ import annotations

import pytest

from mpi import jobs
from thinwire.errors import RankError
from thinwire.lab.mpirun import Mpirun, run_mpi_ranks

pytestmark = pytest.mark.usefixtures("kernels")


def test_every_op_of_the_inner_group_and_with_codecs_against_gloo(mpirun: Mpirun) -> None:
    for differ in run_mpi_ranks(jobs.both, 4, mpirun=mpirun, timeout=150.0):
        assert differ == []


@pytest.mark.slow
def test_more_codecs_against_gloo(mpirun: Mpirun) -> None:
    for differ in run_mpi_ranks(jobs.against_gloo, 4, jobs.MORE, mpirun=mpirun, timeout=150.0):
        assert differ == []


@pytest.mark.slow
def test_fsdp2_ends_with_the_same_bits_as_over_gloo(mpirun: Mpirun) -> None:
    assert run_mpi_ranks(jobs.fsdp_against_gloo, 3, mpirun=mpirun, timeout=150.0) == [True] * 3


@pytest.mark.slow
def test_without_thread_multiple_calls_take_turns(mpirun: Mpirun) -> None:
    environ = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
    levels = run_mpi_ranks(jobs.level, 4, mpirun=mpirun, environ=environ, timeout=150.0)
    # A library may give more than it was asked for.
    assert levels == [0] * 4 or levels == [1] * 4


@pytest.mark.slow
def test_a_level_without_threads_is_refused(mpirun: Mpirun) -> None:
    environ = {"MPI4PY_RC_THREAD_LEVEL": "funneled"}
    try:
        run_mpi_ranks(jobs.level, 4, mpirun=mpirun, environ=environ, timeout=150.0)
    except RankError as e:
        assert "MPI_THREAD_FUNNELED; thinwire's worker threads need MPI_THREAD_MULTIPLE" in str(e)  # noqa: PT017

"""An mpirun of each MPI that is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thinwire.errors import UnsupportedError
from thinwire.lab.mpirun import Mpirun


def found(kind: str) -> Mpirun:
    """That of a kind; skips the test where there is none."""
    beside = Path(sys.prefix) / "mpich" / "bin" / "mpirun"
    try:
        mpirun = Mpirun.find(str(beside) if kind == "MPICH" and beside.exists() else None)
    except UnsupportedError as e:
        pytest.skip(str(e))
    if mpirun.kind != kind:
        pytest.skip(f"no {kind} here")
    return mpirun


@pytest.fixture(params=["Open MPI", pytest.param("MPICH", marks=pytest.mark.slow)])
def mpirun(request: pytest.FixtureRequest) -> Mpirun:
    return found(request.param)


@pytest.fixture
def openmpi() -> Mpirun:
    return found("Open MPI")


@pytest.fixture
def mpich() -> Mpirun:
    return found("MPICH")

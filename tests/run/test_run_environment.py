"""Ranks that torchrun, Open MPI or Slurm have started."""

from __future__ import annotations

import pytest

from thinwire.errors import LayoutError
from thinwire.run.environment import rank_variables

MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize("environ", [TORCHRUN, SLURM, MPI], ids=["torchrun", "slurm", "mpi"])
def test_each_launcher_is_understood(environ: dict[str, str]) -> None:
    # report 21
    assert rank_variables({**environ, **MASTER}) == {**TORCHRUN, **MASTER}
    assert rank_variables({**environ, "MASTER_ADDR": "node0"}) == {
        **TORCHRUN,
        **MASTER,
        "MASTER_PORT": "29500",
    }


def test_who_is_innermost_wins() -> None:
    batch_step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "9", "SLURM_LOCALID": "0"}
    assert rank_variables({**batch_step, **MPI, **MASTER}) == {**TORCHRUN, **MASTER}
    other = dict.fromkeys(MPI, "0") | {"OMPI_COMM_WORLD_SIZE": "1"}
    assert rank_variables({**other, **batch_step, **TORCHRUN, **MASTER}) == {**TORCHRUN, **MASTER}


@pytest.mark.parametrize("environ", [{}, MASTER, {"SLURM_NTASKS": "4"}, {"RANK": "0"}])
def test_who_is_no_rank(environ: dict[str, str]) -> None:
    assert rank_variables(environ) is None


def test_one_rank_needs_no_master() -> None:
    found = rank_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    assert found == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_sizes_of_uneven_hosts_are_left_out() -> None:
    found = rank_variables({**SLURM, "SLURM_NTASKS_PER_NODE": "2(x3)", **MASTER})
    assert found is not None
    assert "LOCAL_WORLD_SIZE" not in found


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (SLURM, r"Slurm has started 4 ranks .*MASTER_ADDR is not set.*scontrol"),
        (MPI, "Open MPI has started 4 ranks .*MASTER_ADDR"),
        ({**TORCHRUN, **MASTER, "RANK": "4"}, "RANK=4 is not a rank of WORLD_SIZE=4"),
        ({**SLURM, **MASTER, "SLURM_NTASKS": "many"}, "SLURM_NTASKS='many' is not a whole number"),
    ],
)
def test_what_cannot_be(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        rank_variables(environ)

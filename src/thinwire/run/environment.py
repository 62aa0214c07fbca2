"""Ranks that others have started: their variables, turned into those of ``env://``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import LayoutError

_PORT = "29500"  # torchrun's own default


@dataclass(frozen=True)
class _Names:
    """A launcher's names for what a rank is."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_LAUNCHERS = (
    # The innermost first: mpirun in a Slurm job passes on the job's variables, torchrun those of both.
    _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def rank_variables(environ: Mapping[str, str]) -> dict[str, str] | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (and LOCAL_WORLD_SIZE, if it is told) of a rank.

    environ: the process's variables. None: nothing says that this process is a rank; it takes rank and size of torchrun,
    Open MPI (``mpirun``) or Slurm (``srun``). MASTER_PORT is 29500 where it is not given. Raises LayoutError for a value
    that is no rank or size, and without MASTER_ADDR if there is more than one rank.
    """
    for names in _LAUNCHERS:
        if names.rank in environ and names.size in environ:
            return _translated(names, environ)
    return None


def _translated(names: _Names, environ: Mapping[str, str]) -> dict[str, str]:
    rank, size = _number(names.rank, environ), _number(names.size, environ)
    if not 0 <= rank < size:
        raise LayoutError(
            f"{names.rank}={rank} is not a rank of {names.size}={size}; these are {names.launcher}'s"
        )
    found = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    if names.local_rank in environ:
        found["LOCAL_RANK"] = str(_number(names.local_rank, environ))
    elif size == 1:
        found["LOCAL_RANK"] = "0"
    # Slurm gives "4(x2)" or nothing where hosts differ or nobody asked; env:// does not need it.
    if environ.get(names.local_size, "").isdigit():
        found["LOCAL_WORLD_SIZE"] = environ[names.local_size]
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if size == 1 else "")
    if not address:
        raise LayoutError(
            f"{names.launcher} has started {size} ranks ({names.size}), but MASTER_ADDR is not set: set it to the host of "
            f"rank 0 for all of them (and MASTER_PORT, if not {_PORT}), e.g. in a Slurm script "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    return {**found, "MASTER_ADDR": address, "MASTER_PORT": environ.get("MASTER_PORT") or _PORT}


def _number(name: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise LayoutError(f"{name}={environ[name]!r} is not a whole number") from None

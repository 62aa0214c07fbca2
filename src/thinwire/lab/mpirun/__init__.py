"""Ranks that are started by an ``mpirun``: here, or on the hosts of an emulated network.

command: which mpirun, and its arguments. rank: what each process does. run: start, watch, gather.
"""

from .command import Mpirun
from .run import run_mpi_ranks

__all__ = ["Mpirun", "run_mpi_ranks"]

"""Find MPI through mpi4py, and say plainly what is wrong where there is none, or more than one."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from ..errors import MismatchError, UnsupportedError

_INSTALL = (
    'pip install "thinwire[mpi]" installs mpi4py and Open MPI; "pip install mpi4py mpich" takes MPICH instead; a library of '
    "the distribution or of the cluster is found by its name, or told to mpi4py by MPI4PY_LIBMPI"
)
_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's mpirun",
    "MPI_LOCALNRANKS": "an mpirun",
}
"""Variables in which launchers tell how many processes they have started. They explain errors, and decide nothing."""


@cache
def load() -> Any:
    """``mpi4py.MPI``, initialised. Raises UnsupportedError where there is no MPI, or one that threads cannot use, and
    MismatchError where two MPI libraries meet in this process."""
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as e:
        if e.name != "mpi4py":
            raise
        raise UnsupportedError(f"backend mpi needs mpi4py, which is not installed; {_INSTALL}") from e
    except (ImportError, RuntimeError) as e:
        raise UnsupportedError(f"mpi4py finds no MPI library: {e}\n{_INSTALL}") from e
    if not MPI.Is_initialized():
        # mpi4py does it on import, unless mpi4py.rc says otherwise.
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    found = loaded_libraries()
    if len(found) > 1:
        raise MismatchError(
            f"two MPI libraries meet in this process: {', '.join(found)}; something else has loaded one before mpi4py found "
            "the other. Let both use the same one: tell mpi4py by MPI4PY_LIBMPI, or uninstall one"
        )
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        level = "MPI_THREAD_FUNNELED" if MPI.Query_thread() == MPI.THREAD_FUNNELED else "MPI_THREAD_SINGLE"
        raise UnsupportedError(
            f"{version(MPI)} was initialised with {level}; thinwire's worker threads need MPI_THREAD_MULTIPLE, or at least "
            "MPI_THREAD_SERIALIZED. mpi4py asks for MULTIPLE unless mpi4py.rc.thread_level says otherwise"
        )
    return MPI


def version(MPI: Any) -> str:
    """The library in a few words: ``Open MPI v5.0.11``."""
    text = str(MPI.Get_library_version()).replace("\t", " ").strip("\x00\n ")
    words = re.match(r"(Open MPI v[\w.]+|MPICH Version: +[\w.]+|Intel\S* MPI Library [\w.]+)", text)
    return re.sub(r" +", " ", words.group(0)) if words else text.splitlines()[0][:80]


def loaded_libraries() -> list[str]:
    """Files of MPI libraries that this process has loaded; empty where the system does not tell."""
    found = set()
    with suppress(OSError), open("/proc/self/maps") as lines:
        for line in lines:
            path = line.rstrip("\n").partition("/")[2]
            if re.match(r"libmpi(ch|_abi)?\.so", path.rpartition("/")[2]):
                found.add(os.path.realpath("/" + path))
    return sorted(found)


def launched_size(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """How many processes a launcher's variables say it has started, and which launcher; None: no variables."""
    for name, launcher in _SIZES.items():
        if environ.get(name, "").isdigit():
            return int(environ[name]), f"{launcher} ({name})"
    return None


def check_launch(MPI: Any, environ: Mapping[str, str]) -> None:
    """Raise MismatchError where the launcher is another MPI's: then each process is alone in a world of its own."""
    told = launched_size(environ)
    size = MPI.COMM_WORLD.Get_size()
    if told is not None and told[0] > 1 and size == 1:
        where = ", ".join(loaded_libraries()) or "an unknown path"
        raise MismatchError(
            f"{told[1]} has started {told[0]} processes, but {version(MPI)} ({where}), which mpi4py found, sees 1: launcher "
            "and library are of different MPIs. Use this library's mpirun, or that mpirun's library (MPI4PY_LIBMPI)"
        )


@cache
def takes_cuda() -> bool:
    """Whether the library says that it takes pointers to a CUDA device's memory. If not, messages go through the host."""
    library = ctypes.CDLL(load().__file__)
    # An extension of Open MPI and MPICH; a library without it is not asked.
    with suppress(AttributeError):
        return bool(library.MPIX_Query_cuda_support())
    return False

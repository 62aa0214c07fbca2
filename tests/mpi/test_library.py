"""What is said where MPI is missing, or where two of them meet; no MPI is started here."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.errors import MismatchError, UnsupportedError
from thinwire.inner import inner_devices
from thinwire.lab.mpirun import Mpirun
from thinwire.launch import Place
from thinwire.mpi import library
from thinwire.mpi.communicator import _world_ranks


@pytest.fixture
def fresh() -> Any:
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def fake(level: int = 3) -> Any:
    return SimpleNamespace(
        Is_initialized=lambda: True,
        Query_thread=lambda: level,
        Get_library_version=lambda: "Open MPI v5.0.11, package: Open MPI",
        THREAD_SINGLE=0,
        THREAD_FUNNELED=1,
        THREAD_SERIALIZED=2,
        THREAD_MULTIPLE=3,
        COMM_WORLD=SimpleNamespace(Get_size=lambda: 1),
    )


def test_no_mpi4py(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UnsupportedError, match=r"pip install \"thinwire\[mpi\]\""):
        library.load()


def test_no_library(monkeypatch: pytest.MonkeyPatch, fresh: None, tmp_path: Path) -> None:
    # As mpi4py's own module does where it finds none.
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UnsupportedError, match="finds no MPI library: cannot load"):
        library.load()
    for name in [n for n in sys.modules if n.split(".")[0] == "mpi4py"]:
        del sys.modules[name]


@pytest.mark.parametrize(("level", "name"), [(0, "MPI_THREAD_SINGLE"), (1, "MPI_THREAD_FUNNELED")])
def test_no_threads(monkeypatch: pytest.MonkeyPatch, fresh: None, level: int, name: str) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=fake(level)))
    with pytest.raises(UnsupportedError, match=rf"v5.0.11 was initialised with {name}"):
        library.load()


def test_two_libraries_in_a_process(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=fake()))
    monkeypatch.setattr(library, "loaded_libraries", lambda: ["/a/libmpi.so.12", "/b/libmpi.so.40"])
    with pytest.raises(MismatchError, match=r"two MPI libraries meet .*/a/libmpi.so.12, /b/libmpi.so.40"):
        library.load()


def test_a_launcher_of_another_mpi() -> None:
    library.check_launch(fake(), {})
    library.check_launch(fake(), {"PMI_SIZE": "1"})
    with pytest.raises(
        MismatchError, match=r"MPICH's mpirun \(PMI_SIZE\) has started 4 processes, but Open MPI"
    ):
        library.check_launch(fake(), {"PMI_SIZE": "4"})


def test_ranks_that_are_not_of_one_job() -> None:
    def card(rank: int, size: int, mpi: str) -> str:
        return json.dumps({"rank": rank, "size": size, "mpi": mpi})

    assert _world_ranks([card(3, 4, "A"), card(1, 4, "A")]) == [3, 1]
    with pytest.raises(MismatchError, match=r"rank 1: B, process 1 of 4"):
        _world_ranks([card(0, 4, "A"), card(1, 4, "B")])
    with pytest.raises(MismatchError, match=r"rank 0: A, process 0 of 1 .*\n.*rank 1: A, process 0 of 1"):
        _world_ranks([card(0, 1, "A"), card(0, 1, "A")])


def test_the_backend_is_known() -> None:
    assert [d.type for d in inner_devices("mpi")] == ["cpu", "cuda"]


def test_an_mpirun_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no mpirun at"):
        Mpirun.find(str(tmp_path / "mpirun"))
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho something else\n")
    program.chmod(0o700)
    with pytest.raises(UnsupportedError, match="'something else': neither Open MPI nor MPICH"):
        Mpirun.find(str(program))


def test_hosts_are_reached_by_an_agent(tmp_path: Path) -> None:
    places = [
        Place("a", "eth0", "10.77.0.1"),
        Place("a", "eth0", "10.77.0.1"),
        Place("b", "eth0", "10.77.0.2"),
    ]
    for kind in ("Open MPI", "MPICH"):
        command = Mpirun("/x/mpirun", kind).command(3, ["program"], places, tmp_path)
        assert command[:2] == [str(tmp_path / "agent"), "10.77.0.1"], "as the daemons of the other hosts"
        words = shlex.split(command[2])
        assert words[:2] == ["exec", "/x/mpirun"]
        assert "10.77.0.1:2,10.77.0.2:1" in words
        assert words[-3:] == ["-n", "3", "program"]
    agent = (tmp_path / "agent").read_text()
    assert "10.77.0.2) space=b ;;" in agent

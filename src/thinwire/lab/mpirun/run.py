"""Start ranks by mpirun, listen to them, and say which one failed and why: ``run_ranks`` for MPI."""

from __future__ import annotations

import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from ...errors import RankError
from ...launch import Place, failure
from .command import JOB, SOCKET, STORE, Mpirun

_ENDS_S = 10.0  # for mpirun to end its processes
_FOLLOW_S = 2.0  # for processes to end when mpirun has


def run_mpi_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60.0,
    collective_timeout: float | None = None,
    mpirun: Mpirun | None = None,
    places: Sequence[Place] | None = None,
    on_message: Callable[[int, Any], None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(rank, world, *args, report)`` in ``world`` processes of one mpirun; their results in rank order.

    As :func:`thinwire.launch.run_ranks`, but the default group is thinwire's over MPI. mpirun: None: :meth:`Mpirun.find`.
    places: on hosts of an emulated network. environ: more variables for the processes. Raises RankError as soon as
    mpirun has ended without all results, or the time is up.
    """
    mpirun = mpirun if mpirun is not None else Mpirun.find()
    with tempfile.TemporaryDirectory(prefix="thinwire-mpi-") as name:
        folder = Path(name)
        # In an emulated network nobody answers for the names of hosts, which PyTorch's TCP store asks for; files are shared.
        meet_at = f"file://{folder / STORE}" if places else "mpi://"
        (folder / JOB).write_bytes(pickle.dumps((fn, args, collective_timeout or timeout, meet_at)))
        program = [sys.executable, "-m", f"{__package__}.rank", name]
        command = mpirun.command(world, program, places or (), folder)
        with Listener(str(folder / SOCKET), family="AF_UNIX", backlog=world) as listener:
            ears = _Ears(listener, world)
            with open(folder / "output", "w+b") as output:
                job = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={
                        **os.environ,
                        **_paths(),
                        **_gloo(places),
                        **mpirun.environment(),
                        **(environ or {}),
                    },
                    start_new_session=True,
                )
                try:
                    late = not ears.listen(job, timeout, on_message)
                finally:
                    _stop(job, ears.processes)
                output.seek(0)
                text = output.read().decode(errors="replace")
    return _results(ears, world, job.returncode, text, timeout if late else None)


class _Ears:
    """What the ranks say."""

    def __init__(self, listener: Listener, world: int) -> None:
        self.results: dict[int, Any] = {}
        self.errors: list[tuple[int, str, str]] = []
        self.processes: list[int] = []  # file descriptors: numbers of processes are used again
        self._said: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._accept, args=(listener, world), daemon=True).start()

    def listen(self, job: subprocess.Popen[bytes], timeout: float, on_message: Any) -> bool:
        """Until mpirun has ended and all has been heard. False: the time is up."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            running = job.poll() is None
            try:
                rank, kind, body = self._said.get(timeout=0.05)
            except queue.Empty:
                if not running:
                    return True
                continue
            if kind == "result":
                self.results[rank] = body
            elif kind == "error":
                self.errors.append((rank, *body))
            elif on_message is not None:
                on_message(rank, body)
        return False

    def _accept(self, listener: Listener, world: int) -> None:
        with suppress(OSError, EOFError):  # closed: the run is over
            for _ in range(world):
                connection = listener.accept()
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: Connection) -> None:
        with suppress(OSError, EOFError):
            rank, pid = pickle.loads(connection.recv_bytes())
            with suppress(ProcessLookupError):
                self.processes.append(os.pidfd_open(pid))
            while True:
                self._said.put((rank, *pickle.loads(connection.recv_bytes())))


def _gloo(places: Sequence[Place] | None) -> dict[str, str]:
    """Where groups over gloo, which a job may have beside those over MPI, send their messages."""
    return {"GLOO_SOCKET_IFNAME": (places[0] if places else Place()).interface}


def _paths() -> dict[str, str]:
    """What lets the processes import what this one can: a job's function may be a test's."""
    return {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def _stop(job: subprocess.Popen[bytes], processes: Sequence[int]) -> None:
    """End mpirun and the processes that it has started; none is left when this returns."""
    if job.poll() is None:
        job.terminate()  # mpirun ends its processes
        with suppress(subprocess.TimeoutExpired):
            job.wait(_ENDS_S)
    if job.poll() is None:
        job.kill()
        job.wait()
    end = time.monotonic() + _FOLLOW_S
    for process in processes:
        try:
            ended, _, _ = select.select([process], [], [], max(end - time.monotonic(), 0.0))
            if not ended:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                select.select([process], [], [])
        finally:
            os.close(process)


def _results(ears: _Ears, world: int, status: int, output: str, timeout: float | None) -> list[Any]:
    missing = sorted(set(range(world)) - set(ears.results))
    if not missing and timeout is None:
        return [ears.results[rank] for rank in range(world)]
    tail = "\n".join(output.splitlines()[-40:])
    if ears.errors:
        found = failure(ears.errors, world)
        raise RankError(f"{found}\nmpirun said:\n{tail}", found.rank, found.traceback)
    why = (
        f"within {timeout:g} s; all were stopped"
        if timeout is not None
        else f"; mpirun ended with status {status}"
    )
    raise RankError(
        f"no answer from rank(s) {missing or 'that had to end'} {why}. mpirun said:\n{tail}",
        missing[0] if missing else 0,
    )

"""What all communicators of a process share: who makes MPI progress, what ranks tell each other of failures, and the end.

MPI moves large messages only while somebody calls it, has no time-outs, and waits for ever for a rank that does not come.
So: a thread tests what is under way whenever nobody waits for it; a rank that gives up, or leaves, tells its peers in a
*notice*, a small message on MPI_COMM_WORLD that every wait looks out for; and a process that has failed, or whose peers
have, ends the whole job with MPI_Abort instead of hanging in MPI_Finalize.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from .library import load, version

_NOTICE_TAG = 0x7477
_LOOK_S = 0.01
GRACE_S = 2.0
"""Between the notice of a rank that has left in peace and the end of calls that wait for it: its last ones may arrive."""
_LAST_WORDS_S = 8.0
"""Between a failure and the end of the job: the time in which others find out, ask each other, and say what they saw."""
_EAGER_S, _SHARED_S = 1e-4, 2e-3


class Polled(Protocol):
    """Something under way."""

    def poll(self) -> bool:
        """Whether it is over; gives MPI an opportunity to go on. Does not raise."""


class Process:
    """This process's MPI. One per process: :func:`process`.

    left: peers that have left, with the time of their notice. failed: communicator id -> what a peer said of its failure.
    crowded: ranks of this machine outnumber its cores, so that one that waits had better let others run.
    """

    def __init__(self) -> None:
        self.mpi: Any = load()
        self.rank: int = self.mpi.COMM_WORLD.Get_rank()
        self.size: int = self.mpi.COMM_WORLD.Get_size()
        self.version = version(self.mpi)
        self.left: dict[int, float] = {}
        self.failed: dict[int, str] = {}
        self.peers: set[int] = set()
        self.patience_s = 0.0
        self.crowded = False
        self.store: Any = None  # others read it until they have left, whatever this rank destroys before
        self._own_failure = False
        serial = self.mpi.Query_thread() < self.mpi.THREAD_MULTIPLE
        # Every call made through `call` returns at once, so that one lock is all that MPI_THREAD_SERIALIZED takes.
        self._serial = threading.Lock() if serial else None
        self._looked = 0.0
        self._looking = threading.Lock()
        self._under_way: list[Polled] = []
        self._changed = threading.Condition()
        self._waiting = 0
        self._counting = threading.Lock()
        self._sent: list[tuple[Any, bytes]] = []
        self._ended = False
        self._thread = threading.Thread(target=self._make_progress, name="thinwire-mpi", daemon=True)
        self._thread.start()
        atexit.register(self._end)  # runs before mpi4py's MPI_Finalize, which was registered earlier

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call MPI, alone where the library cannot have several threads in it (MPI_THREAD_SERIALIZED)."""
        if self._serial is None:
            return function(*args)
        with self._serial:
            return function(*args)

    # Progress.

    def watch(self, operation: Polled) -> None:
        """Test an operation until it is over, for as long as nobody waits for it."""
        with self._changed:
            self._under_way.append(operation)
            self._changed.notify()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this thread tests an operation itself, by which all of them go on."""
        with self._counting:
            self._waiting += 1
        try:
            yield
        finally:
            with self._counting:
                self._waiting -= 1

    def _make_progress(self) -> None:
        while not self._ended:
            with self._changed:
                while not self._under_way and not self._ended:
                    self._changed.wait()
                now = list(self._under_way)
            over = [operation for operation in now if operation.poll()]
            if over:
                with self._changed:
                    self._under_way = [o for o in self._under_way if not any(o is x for x in over)]
            del now, over  # do not keep tensors alive while there is nothing to do
            time.sleep(_SHARED_S if self._waiting > 0 else _EAGER_S)

    # Notices.

    def tell(self, ranks: set[int], **notice: Any) -> None:
        """Send a notice to ranks of MPI_COMM_WORLD. Does not wait."""
        text = json.dumps(notice).encode()
        for rank in ranks - {self.rank}:
            request = self.call(
                self.mpi.COMM_WORLD.Isend, [text, len(text), self.mpi.BYTE], rank, _NOTICE_TAG
            )
            self._sent.append((request, text))

    def look(self) -> None:
        """Read the notices that have arrived; at most a hundred times a second."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S or not self._looking.acquire(blocking=False):
            return
        try:
            self._looked = now
            while (message := self._probe()) is not None:
                source, notice = message
                if notice.get("left"):
                    self.left[source] = now - GRACE_S if notice["bad"] else now
                if "group" in notice:
                    self.failed.setdefault(notice["group"], notice["text"])
        finally:
            self._looking.release()

    def _probe(self) -> tuple[int, dict[str, Any]] | None:
        MPI, status = self.mpi, self.mpi.Status()
        message = self.call(MPI.COMM_WORLD.Improbe, MPI.ANY_SOURCE, _NOTICE_TAG, status)
        if message is None:
            return None
        buffer = bytearray(status.Get_count(MPI.BYTE))
        self.call(message.Recv, [buffer, len(buffer), MPI.BYTE])
        return status.Get_source(), json.loads(buffer)

    # The end.

    def join(self, ranks: set[int], patience_s: float) -> None:
        """These ranks share a communicator with this one: none of them ends without telling the others."""
        self.peers |= ranks - {self.rank}
        self.patience_s = max(self.patience_s, patience_s)

    def fail(self) -> None:
        """This process cannot finalize MPI any more: requests are left under way."""
        self._own_failure = True

    def _end(self) -> None:
        """Leave together with all peers; if one of them has failed, end the job."""
        MPI = self.mpi
        self._ended = True
        with self._changed:
            self._changed.notify()
        self._thread.join(1.0)
        if not self.peers or MPI.Is_finalized():
            return
        # The interpreter keeps an exception that nobody has caught here.
        failed = self._own_failure or getattr(sys, "last_value", None) is not None
        self.tell(self.peers, left=True, bad=failed)
        end = time.monotonic() + (_LAST_WORDS_S if failed else self.patience_s)
        while (missing := self.peers - set(self.left)) and time.monotonic() < end:
            self.look()
            time.sleep(_LOOK_S)
        if failed or missing:
            why = (
                "has failed"
                if failed
                else f"waits in vain for rank(s) {sorted(missing)} of MPI_COMM_WORLD to end"
            )
            print(
                f"thinwire: rank {self.rank} of MPI_COMM_WORLD {why}; it ends the MPI job (MPI_Abort)",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
            MPI.COMM_WORLD.Abort(1)
        for request, _ in self._sent:
            request.Wait()  # all of them were received: their receivers have left in the same way


@cache
def process() -> Process:
    """This process's MPI, started at the first call. Raises as :func:`.library.load`."""
    return Process()

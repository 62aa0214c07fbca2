"""A call under way: MPI's requests with the time-out that MPI lacks, and an eye on peers that leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import PeerError
from .process import GRACE_S

if TYPE_CHECKING:
    from .communicator import Communicator

_SPIN_S = 10e-3
"""How long a wait tests without a pause; the kernel's shortest sleep is a tenth of the time of a message of 1 MiB."""
_YIELD_S = 2e-3
"""Where ranks outnumber cores: how long it only yields after each test."""
_OVERSHOOT = 64
"""After that it sleeps a part of the time that it has waited: at most 2 % late, and the cores are free for others."""
_LONGEST_S = 1e-3


class Operation:
    """One call of a communicator. Over when its requests are, or when it has failed.

    what: the call in words, with its peer. peers: ranks of the group without which it cannot end. finish: runs once, in
    whichever thread finds the requests done, before anybody is told. keep: buffers that must outlive the requests.
    expected: bytes that must have come, for a receive; ``source`` is then the rank that has sent them. awaited: the caller
    waits at once, so nobody else need look after it.
    """

    def __init__(
        self,
        communicator: Communicator,
        requests: Sequence[Any],
        what: str,
        *,
        peers: Sequence[int],
        keep: Any = None,
        finish: Callable[[], None] | None = None,
        expected: int | None = None,
        awaited: bool = False,
    ) -> None:
        self.source = -1
        self._communicator = communicator
        self._process = communicator.process
        self._requests = list(requests)
        self._what = what
        self._peers = peers
        self._keep = keep
        self._finish = finish
        self._expected = expected
        self._received = 0
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._over = False
        self._error: Exception | None = None
        self._callbacks: list[Callable[[Exception | None], None]] = []
        if not self.poll() and not awaited:
            self._process.watch(self)

    def poll(self, *, waiting: bool = False) -> bool:
        """Whether it is over; lets MPI go on. Does not raise.

        waiting: this thread has nothing else to do than to wait for another one that polls at the same moment. One that
        spun instead would keep the interpreter's lock from it.
        """
        if self._over:
            return True
        if not self._lock.acquire(blocking=waiting):
            return False
        try:
            if not self._over:
                self._advance()
            callbacks: list[Callable[[Exception | None], None]] = []
            if self._over:
                callbacks, self._callbacks = self._callbacks, []
        finally:
            self._lock.release()
        for callback in callbacks:
            callback(self._error)
        return self._over

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when it is over; raise PeerError if a peer was lost, has given up, or the time is up.

        timeout: of this wait alone; after it the call goes on.
        """
        if not self._over:
            with self._process.waiting():
                self._wait(None if timeout is None else timeout.total_seconds())
        if self._error is not None:
            raise self._error

    def wait_for(self, peer: int) -> None:
        """As ``wait``."""
        self.wait()

    def on_over(self, callback: Callable[[Exception | None], None]) -> None:
        """Call ``callback(error)`` once it is over, from the thread that finds out, or now."""
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback(self._error)

    def _wait(self, limit_s: float | None) -> None:
        start = time.monotonic()
        while not self.poll(waiting=True):
            waited = time.monotonic() - start
            if limit_s is not None and waited > limit_s:
                raise PeerError(f"{self._what}: not done within the {limit_s:g} s of this wait; it goes on")
            if waited > (_YIELD_S if self._process.crowded else _SPIN_S):
                time.sleep(min(waited / _OVERSHOOT, _LONGEST_S))
            elif self._process.crowded:
                time.sleep(0)

    def _advance(self) -> None:
        MPI = self._process.mpi
        try:
            self._requests = [r for r in self._requests if not self._is_done(r)]
        except MPI.Exception as e:
            self._fail(f"{self._what} failed: {e}")
            return
        if not self._requests:
            short = self._expected is not None and self._received != self._expected
            text = f"{self._what} failed: {self._received} bytes came, {self._expected} were expected"
            self._end(PeerError(text) if short else None)
            return
        self._process.look()
        given_up = self._communicator.given_up()
        if given_up is not None:
            self._fail(f"{self._what} failed: {given_up}")
            return
        now = time.monotonic()
        gone = [p for p in self._peers if now - self._communicator.left_at(p) >= GRACE_S]
        if gone:
            self._fail(f"{self._what} failed: rank(s) {', '.join(map(str, gone))} left the MPI job")
        elif now - self._start > self._communicator.timeout_s:
            self._fail(f"{self._what} failed: not done within {self._communicator.timeout_s:g} s")

    def _is_done(self, request: Any) -> bool:
        if self._expected is None:
            return bool(self._process.call(request.Test))
        status = self._process.mpi.Status()
        done = bool(self._process.call(request.Test, status))
        if done:
            self.source = status.Get_source()
            self._received += status.Get_count(self._process.mpi.BYTE)
        return done

    def _fail(self, text: str) -> None:
        # MPI cannot take the requests back, and may write to their buffers until the end of the process.
        self._communicator.abandon(self, text)
        self._end(PeerError(text))

    def _end(self, error: Exception | None) -> None:
        if error is None and self._finish is not None:
            try:
                self._finish()
            except Exception as e:
                error = e
        if error is None:
            self._keep = None
        self._finish = None
        self._error = error
        self._over = True

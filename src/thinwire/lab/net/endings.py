"""Turn the signals that end a process into exceptions, so that what it made is taken down."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def ending_signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit(128 + number) inside, where they would have killed the process.

    A handler that the program installed itself stays. Outside the main thread this does nothing: Python
    allows handlers only there. (SIGINT raises KeyboardInterrupt by itself.)
    """
    changed = []
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _raise_exit)
                changed.append(number)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def ending_signals_wait() -> Iterator[None]:
    """Hold ending signals back inside and deliver them after: for taking down.

    By handlers and not by a signal mask: any thread may receive the signal, the main thread handles it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in _HELD_BACK}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not installed by Python, cannot be put back
                signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])

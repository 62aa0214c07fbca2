"""How far a run is: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Update = Callable[[int, int | None, str], None]
"""(steps done, steps in all or None, what is going on)"""

_LOG_EVERY_S = 30.0


@contextmanager
def steps_progress(
    console: Console, *, log_every_s: float = _LOG_EVERY_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[Update]:
    """Shows steps until the context ends. Where the console is no terminal, a line at most every ``log_every_s``."""
    if not console.is_terminal:
        yield _log(console, log_every_s, clock)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting ranks", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


def _log(console: Console, every_s: float, clock: Callable[[], float]) -> Update:
    last = -float("inf")

    def update(done: int, total: int | None, text: str) -> None:
        nonlocal last
        if done != total and clock() - last < every_s:
            return
        last = clock()
        console.print(
            f"{done}/{total if total is not None else '?'} steps: {text}", highlight=False, soft_wrap=True
        )

    return update

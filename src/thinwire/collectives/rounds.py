"""Pairs of ranks that exchange large messages one after the other, so that no two of them share a link.

An all-to-all whose messages all leave at once fills every link from several sides: senders lose frames to each other, and
what is left of the slowest pair goes over a link that is otherwise idle. In rounds, in which every rank sends to the one
d places back and receives from the one d places on, each link carries one message in each direction. Four hosts with links
of 200 Mbit/s, 8 MiB: 1.44 times the time that the bytes take at the link's rate when all leave at once, 1.10 in rounds.

A gather is a ring: in every round each rank hands on what came in the round before. What has come is decoded while the
next round is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

_AT_ONCE_NBYTES = 128 << 10
"""Rounds of so few bytes together need not wait for each other: there is little to lose on a link, and latency to gain."""


class Waits(Protocol):
    """Anything under way."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Round:
    """One exchange of pairs. start: starts both transfers. nbytes: the larger of what is sent and received; None: not before
    all earlier rounds are done, however small, for it sends what they bring."""

    nbytes: int | None
    start: Callable[[], Iterable[Waits]]


class Rounds:
    """The rounds of one group, in the order of ``add``. For one thread."""

    def __init__(self) -> None:
        self._due: deque[tuple[Round, RoundsPending]] = deque()
        self._under_way: deque[tuple[int, list[Waits], RoundsPending]] = deque()
        self._nbytes = 0  # under way

    def add(self, rounds: Iterable[Round]) -> RoundsPending:
        """Queue the rounds of an exchange, and start what may start. They go on when somebody waits."""
        pending = RoundsPending(self)
        for each in rounds:
            pending.count += 1
            self._due.append((each, pending))
        self._start()
        return pending

    def finish_one(self) -> None:
        """Wait for the oldest round, then start the next."""
        nbytes, works, pending = self._under_way.popleft()
        for work in works:
            work.wait()
        self._nbytes -= nbytes
        pending.done += 1
        self._start()

    def _start(self) -> None:
        while self._due:
            each, pending = self._due[0]
            nbytes = _AT_ONCE_NBYTES + 1 if each.nbytes is None else each.nbytes
            if self._under_way and self._nbytes + nbytes > _AT_ONCE_NBYTES:
                return
            self._due.popleft()
            self._under_way.append((nbytes, list(each.start()), pending))
            self._nbytes += nbytes


class RoundsPending:
    """The rounds of one exchange: how many there are, and how many are done."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.count = self.done = 0

    def wait(self, number: int | None = None) -> None:
        """Return when the first ``number`` of them (None: all) are done, and with them all that were added before."""
        while self.done < (self.count if number is None else number):
            self._rounds.finish_one()

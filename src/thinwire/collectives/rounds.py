"""Pairs of ranks that exchange large messages one after the other, so that no two of them share a link.

An all-to-all whose messages all leave at once fills every link from several sides: senders lose frames to each other, and
what is left of the slowest pair goes over a link that is otherwise idle. In rounds, in which every rank sends to the one
d places back and receives from the one d places on, each link carries one message in each direction. Four hosts with links
of 200 Mbit/s, 2 MiB for each rank: 1.44 times the time that the bytes take at the link's rate when all leave at once, 1.10
in rounds. Each round ends with a wait for the slowest pair, so that small messages are better sent at once: rounds that are
small together are one. Each rank may decide that by its own messages. Of all transfers that are not done, take those over
the smallest distance: both of their ends have done with all smaller ones, so both have started them, and they end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

_AT_ONCE_NBYTES = 512 << 10


def shared_rounds(nbytes: Sequence[int], at_once: int = _AT_ONCE_NBYTES) -> list[list[int]]:
    """The distances 1, 2, ... in their order, those of each round. nbytes: of each distance, in one direction.

    Those of a round are under ``at_once`` bytes together, or only one.
    """
    rounds: list[list[int]] = []
    total = 0
    for distance, size in enumerate(nbytes, 1):
        if rounds and total + size < at_once:
            rounds[-1].append(distance)
            total += size
        else:
            rounds.append([distance])
            total = size
    return rounds


class Waits(Protocol):
    """Anything under way."""

    def wait(self) -> object: ...


Start = Callable[[], Iterable[Waits]]
"""Starts the transfers of a round."""


class Rounds:
    """The rounds of one group, in the order of ``add``, one at a time. For one thread."""

    def __init__(self) -> None:
        self._due: deque[tuple[Start, RoundsPending]] = deque()
        self._under_way: tuple[list[Waits], RoundsPending] | None = None

    def add(self, rounds: Iterable[Start]) -> RoundsPending:
        """Queue the rounds of an exchange, and start the first if none is under way. They go on when somebody waits."""
        pending = RoundsPending(self)
        for start in rounds:
            pending.count += 1
            self._due.append((start, pending))
        if self._under_way is None:
            self._start()
        return pending

    def finish_one(self) -> None:
        """Wait for the round that is under way, then start the next."""
        assert self._under_way is not None, "an exchange that is not done has a round under way"
        works, pending = self._under_way
        for work in works:
            work.wait()
        pending.done += 1
        self._start()

    def _start(self) -> None:
        self._under_way = None
        if self._due:
            start, pending = self._due.popleft()
            self._under_way = list(start()), pending


class RoundsPending:
    """The rounds of one exchange: how many there are, and how many are done."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.count = self.done = 0

    def wait(self, number: int | None = None) -> None:
        """Return when the first ``number`` of them (None: all) are done, and with them all that were added before."""
        while self.done < (self.count if number is None else number):
            self._rounds.finish_one()


class AtOnce:
    """An exchange whose messages are all under way. arriving: (peer, message), leaving: messages; of none: it is over."""

    def __init__(self, arriving: Iterable[tuple[int, Waits]] = (), leaving: Iterable[Waits] = ()) -> None:
        self._arriving, self._leaving = list(arriving), list(leaving)

    def wait(self) -> None:
        for _, message in self._arriving:
            message.wait()
        for message in self._leaving:
            message.wait()

    def wait_for(self, peer: int) -> None:
        for source, message in self._arriving:
            if source == peer:
                message.wait()


class Paired:
    """An exchange in rounds. number: peer -> how many of them until its message is there."""

    def __init__(self, pending: RoundsPending, number: Callable[[int], int]) -> None:
        self._pending, self._number = pending, number

    def wait(self) -> None:
        self._pending.wait()

    def wait_for(self, peer: int) -> None:
        self._pending.wait(self._number(peer))


def pairs_in_rounds(
    rounds: Rounds,
    me: int,
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    recv: Callable[[Tensor, int], Waits],
    send: Callable[[Tensor, int], Waits],
) -> Paired:
    """Send ``ins[p]`` to each rank p and receive ``outs[p]`` from it, in rounds; ``me``: this rank."""
    size = len(outs)
    outs[me].copy_(ins[me])

    def start(distances: Sequence[int]) -> list[Waits]:
        under_way: list[Waits] = []
        for distance in distances:
            source, to = (me + distance) % size, (me - distance) % size
            # Empty messages do not travel: both ends know the sizes.
            if outs[source].numel():
                under_way.append(recv(outs[source], source))
            if ins[to].numel():
                under_way.append(send(ins[to], to))
        return under_way

    def nbytes(distance: int) -> int:
        return max(outs[(me + distance) % size].numel(), ins[(me - distance) % size].numel())

    shared = shared_rounds([nbytes(distance) for distance in range(1, size)])
    number = {distance: turn for turn, distances in enumerate(shared, 1) for distance in distances}
    added = rounds.add(partial(start, distances) for distances in shared)
    return Paired(added, lambda peer: number.get((peer - me) % size, 0))

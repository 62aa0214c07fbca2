"""Rounds go one after the other, across exchanges. (That they change no result is in test_reduce_scatter.)"""

from collections.abc import Callable
from functools import partial

from thinwire.collectives.rounds import Rounds


class Log:
    def __init__(self) -> None:
        self.events: list[str] = []

    def round(self, name: str) -> Callable[[], list["Transfer"]]:
        return partial(self._start, name)

    def _start(self, name: str) -> list["Transfer"]:
        self.events.append(f"start {name}")
        return [Transfer(self, name)]


class Transfer:
    def __init__(self, log: Log, name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.events.append(f"end {self._name}")


def test_rounds_go_one_after_the_other() -> None:
    log, rounds = Log(), Rounds()
    first = rounds.add(log.round(f"a{i}") for i in range(2))
    second = rounds.add(log.round(f"b{i}") for i in range(2))
    assert log.events == ["start a0"]
    first.wait(1)
    assert log.events == ["start a0", "end a0", "start a1"]
    first.wait()
    assert log.events[3:] == ["end a1", "start b0"]
    second.wait()
    second.wait()  # again: nothing is left to do
    assert log.events[5:] == ["end b0", "start b1", "end b1"]


def test_waiting_for_a_later_exchange_finishes_the_earlier_ones() -> None:
    log, rounds = Log(), Rounds()
    first = rounds.add([log.round("a")])
    rounds.add([log.round("b")]).wait()
    assert log.events == ["start a", "end a", "start b", "end b"]
    first.wait()
    rounds.add([]).wait()

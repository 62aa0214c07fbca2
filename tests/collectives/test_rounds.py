"""The order in which rounds start: one large one at a time, small ones together, across exchanges."""

from thinwire.collectives.rounds import Round, Rounds

LARGE, SMALL = 1 << 20, 1 << 10


class Log:
    def __init__(self) -> None:
        self.events: list[str] = []

    def round(self, name: str, nbytes: int | None) -> Round:
        def start() -> list["Transfer"]:
            self.events.append(f"start {name}")
            return [Transfer(self, name)]

        return Round(nbytes, start)


class Transfer:
    def __init__(self, log: Log, name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.events.append(f"end {self._name}")


def test_large_rounds_go_one_after_the_other() -> None:
    log, rounds = Log(), Rounds()
    first = rounds.add(log.round(f"a{i}", LARGE) for i in range(2))
    second = rounds.add(log.round(f"b{i}", LARGE) for i in range(2))
    assert log.events == ["start a0"]
    first.wait()
    assert log.events == ["start a0", "end a0", "start a1", "end a1", "start b0"]
    second.wait()
    assert log.events[5:] == ["end b0", "start b1", "end b1"]


def test_small_rounds_start_at_once() -> None:
    log, rounds = Log(), Rounds()
    pending = rounds.add(log.round(str(i), SMALL) for i in range(3))
    assert log.events == ["start 0", "start 1", "start 2"]
    pending.wait()
    pending.wait()  # again: nothing is left to do
    assert log.events[3:] == ["end 0", "end 1", "end 2"]


def test_waiting_for_a_later_exchange_finishes_the_earlier_ones() -> None:
    log, rounds = Log(), Rounds()
    first = rounds.add([log.round("a", LARGE)])
    rounds.add([log.round("b", LARGE)]).wait()
    assert log.events == ["start a", "end a", "start b", "end b"]
    first.wait()
    rounds.add([]).wait()


def test_a_round_that_forwards_waits_for_the_one_before() -> None:
    log, rounds = Log(), Rounds()
    pending = rounds.add(log.round(str(i), None) for i in range(3))
    assert log.events == ["start 0"]
    pending.wait(1)
    assert log.events == ["start 0", "end 0", "start 1"]
    pending.wait(0)
    assert len(log.events) == 3
    pending.wait()
    assert log.events[3:] == ["end 1", "start 2", "end 2"]

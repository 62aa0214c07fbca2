"""Rounds go one after the other, across exchanges. (That they change no result is in test_reduce_scatter.)"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support import gaussian, meter, run_threads, same
from thinwire import CallOptions, parse
from thinwire.collectives import all_to_all
from thinwire.collectives.rounds import Rounds, shared_rounds


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


def test_small_rounds_are_one() -> None:
    assert shared_rounds([100, 100, 100], at_once=300) == [[1, 2], [3]]
    assert shared_rounds([100, 99, 100], at_once=300) == [[1, 2, 3]]
    assert shared_rounds([300, 0, 0, 900, 1], at_once=300) == [[1], [2, 3], [4], [5]]
    assert shared_rounds([]) == []


def test_ranks_that_share_rounds_in_different_ways_get_what_they_were_sent() -> None:
    large = 150_000  # 600 kB of fp32: a round by itself

    def numel(sender: int, receiver: int) -> int:
        return large if (sender, receiver) in ((0, 1), (2, 0), (2, 1)) else 10 + sender

    def run(group: dist.ProcessGroup) -> list[torch.Tensor]:
        me, size = group.rank(), group.size()
        ins = [gaussian(10 * me + peer, numel(me, peer)) for peer in range(size)]
        outs = [torch.empty(numel(peer, me)) for peer in range(size)]
        for _ in range(3):
            all_to_all(ins, outs, parse("none"), meter(group), CallOptions())
        return outs

    for me, outs in enumerate(run_threads(run, 4)):
        assert all(same(out, gaussian(10 * peer + me, out.numel())) for peer, out in enumerate(outs))


@pytest.mark.parametrize("rounds_nbytes", [0, 1 << 20])
def test_equal_messages_go_in_rounds_from_a_size_on(rounds_nbytes: int) -> None:
    def run(group: dist.ProcessGroup) -> tuple[list[torch.Tensor], list[bool]]:
        me, size, transport = group.rank(), group.size(), meter(group)
        seen, send = [], transport.all_to_all

        def noted(*args: Any, in_rounds: bool = False) -> Any:
            seen.append(in_rounds)
            return send(*args, in_rounds=in_rounds)

        transport.all_to_all = noted  # type: ignore[method-assign]
        ins = [gaussian(10 * me + peer, 100) for peer in range(size)]
        outs = [torch.empty(100) for _ in range(size)]
        options = CallOptions(rounds_nbytes=rounds_nbytes)
        all_to_all(ins, outs, parse("none"), transport, options, even=True)
        return outs, seen

    for me, (outs, seen) in enumerate(run_threads(run, 3)):
        assert seen == [rounds_nbytes == 0]
        assert all(same(out, gaussian(10 * peer + me, 100)) for peer, out in enumerate(outs))

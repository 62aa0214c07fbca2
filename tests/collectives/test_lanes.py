"""Lanes: what runs side by side, what that must not change, and that they fail together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support import TIMEOUT_S, gaussian, run_threads, same
from thinwire import ErrorMonitor, GroupOptions, ThinwireGroup
from thinwire.collectives.lanes import Lanes
from thinwire.collectives.monitor import Monitors
from thinwire.collectives.torch_transport import TorchTransport
from thinwire.collectives.traffic import Message, Traffic
from thinwire.errors import CheckpointError, MismatchError, PeerError, PolicyError
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")
N = 3000
MESSAGE = Message("dp", "all_reduce", "gradient", "int8", "float32", 4 * N)


def lanes_of(group: dist.ProcessGroup, **options: Any) -> Lanes:
    """Two lanes over one group: of one rank, so that they send nothing."""
    return Lanes([TorchTransport(group)] * 2, Traffic(), device=torch.device("cpu"), **options)


def group_of(
    inner: dist.ProcessGroup, store: Any, lanes: int, *, monitor: ErrorMonitor | None = None, **table: Any
) -> ThinwireGroup:
    policy = from_dict({"axis": {"dp": {"min_nbytes": 0, **table}}}, "test").monitored(monitor)
    options = GroupOptions(policy=policy, axis="dp", lanes=lanes, seed=5)
    store = dist.PrefixStore(f"{lanes} {policy}", store)
    return ThinwireGroup(store, inner.rank(), inner.size(), options, timedelta(seconds=TIMEOUT_S))


def test_a_call_goes_on_while_one_of_another_lane_waits() -> None:
    def rank(group: dist.ProcessGroup) -> None:
        lanes, gate, order = lanes_of(group), threading.Event(), []

        def call(name: str, event: threading.Event | None = None) -> Callable[[Any], None]:
            def run(_: Any) -> None:
                if event is not None:
                    event.wait()
                order.append(name)

            return run

        first = lanes.submit(MESSAGE, 0.0, call("first", gate), None)
        second = lanes.submit(MESSAGE, 0.0, call("second"), None)
        third = lanes.submit(MESSAGE, 0.0, call("third"), None, lane=4)
        assert second.wait()
        assert not first.is_completed()
        assert not third.is_completed(), "a lane keeps its order"
        gate.set()
        assert third.wait()
        assert order == ["second", "first", "third"]
        lanes.close()

    run_threads(rank, 1)


def _many_calls(inner: dist.ProcessGroup, store: Any, lanes: int) -> tuple[list[torch.Tensor], bytes]:
    """Results of calls of several codecs that are all queued before the first is waited for; what monitors know then."""
    rank, results, states = inner.rank(), [], []
    specs = ("int4:block=32,round=stochastic", "exponent:reuse=8", "int2:block=32")
    groups = []
    for spec in specs:
        monitor = ErrorMonitor(every=3, limit=0.4, action="exact")
        group = group_of(inner, store, lanes, monitor=monitor, all=spec)
        groups.append(group)
        works = []
        for call in range(8):
            x = gaussian(10 * call + rank, N)
            if call % 2 == 0:
                works.append(group.allreduce([x]))
                results.append(x)
            else:
                out = torch.empty(N * inner.size())
                works.append(group.all_gather_single(out, x))
                results.append(out)
        for work in works:
            work.wait()
        assert group._lanes is not None
        states.append(group._lanes.monitors.dump())
    inner.barrier().wait()
    for group in groups:
        group.shutdown()
    return results, repr(states).encode()


def test_results_do_not_depend_on_the_number_of_lanes() -> None:
    one, two, three = (run_threads(_many_calls, 3, dist.HashStore(), lanes) for lanes in (1, 2, 3))
    assert b"True" in one[0][1], "a monitor has passed its limit"
    for several in (two, three):
        for (expected, judged), (found, alike) in zip(one, several, strict=True):
            assert all(map(same, found, expected))
            assert alike == judged


def _resumes(inner: dist.ProcessGroup, store: Any, lanes: int) -> None:
    def call(group: ThinwireGroup, turn: int) -> tuple[torch.Tensor, int]:
        group.traffic.reset()
        x = gaussian(10 * turn + inner.rank(), N)
        group.allreduce([x]).wait()
        return x, sum(e.tally.wire_bytes for m, e in group.traffic.entries().items() if m.role != "control")

    whole = group_of(inner, store, lanes, all="exponent:reuse=8")
    for turn in range(3):
        call(whole, turn)
    resumed = group_of(inner, dist.PrefixStore("again", store), lanes, all="exponent:reuse=8")
    resumed.load_codec_states(whole.codec_states())
    assert resumed.codec_states() == whole.codec_states()
    for turn in range(3, 6):
        (expected, nbytes), (found, as_many) = call(whole, turn), call(resumed, turn)
        assert same(found, expected)
        assert as_many == nbytes
    other = group_of(inner, store, lanes + 1, all="exponent:reuse=8")
    with pytest.raises(
        CheckpointError, match=rf"states of {lanes} lane\(s\), this group has {lanes + 1}; make"
    ):
        other.load_codec_states(whole.codec_states())
    plain = (group_of(inner, store, n, all="int8:block=32") for n in (lanes, lanes + 1))
    first, second = plain
    call(first, 0)
    second.load_codec_states(first.codec_states())
    inner.barrier().wait()
    for group in (whole, resumed, other, first, second):
        group.shutdown()


def test_states_go_on_with_as_many_lanes_and_others_are_refused() -> None:
    run_threads(_resumes, 2, dist.HashStore(), 2)


def test_after_a_failure_all_lanes_refuse_their_calls() -> None:
    def rank(group: dist.ProcessGroup) -> None:
        lanes = lanes_of(group)

        def fail(_: Any) -> None:
            raise ValueError("first")

        with pytest.raises(ValueError, match="first"):
            lanes.submit(MESSAGE, 0.0, fail, None).wait()
        for _ in range(2):
            with pytest.raises(ValueError, match="first"):
                lanes.submit(MESSAGE, 0.0, lambda _: pytest.fail("must not run"), None).wait()
        lanes.close()

    run_threads(rank, 1)


def test_a_call_that_waits_for_a_sampled_one_fails_with_it() -> None:
    def rank(group: dist.ProcessGroup) -> None:
        lanes = lanes_of(group, monitors={"dp": ErrorMonitor(every=1, limit=0.1)})
        gate = threading.Event()

        def fail(_: Any) -> None:
            gate.wait()
            raise ValueError("first")

        works = [lanes.submit(MESSAGE, 0.0, fail, None) for _ in range(5)]
        gate.set()
        for work in works:
            with pytest.raises(ValueError, match="first"):
                work.wait()
        lanes.close()

    run_threads(rank, 1)


def _torn(inner: dist.ProcessGroup, store: Any) -> list[str]:
    """Ranks that differ on one lane, while a call of rank 0 waits on the other for one that rank 1 never makes."""
    group = group_of(inner, store, 2, all="int8:block=32")
    sizes = [N, N] if inner.rank() == 0 else [2 * N]
    works = [group.allreduce([torch.ones(numel)]) for numel in sizes]
    found = []
    for work in works:
        with pytest.raises((MismatchError, PeerError)) as error:
            work.wait()
        found.append(str(error.value))
    inner.barrier().wait()
    group.shutdown()
    return found


def test_ranks_that_differ_on_one_lane_are_told_on_all() -> None:
    for texts in run_threads(_torn, 2, dist.HashStore()):
        for text in texts:
            assert "rank 0: all_reduce, unknown, int8:block=32,round=nearest, float32, 12000 bytes" in text
            assert "rank 1: all_reduce, unknown, int8:block=32,round=nearest, float32, 24000 bytes" in text


def test_what_lanes_can_be() -> None:
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(PolicyError, match=r"lanes = .*: a number of lanes, 1 or more, is needed"):
            GroupOptions(lanes=wrong)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="lanes = 2 with inline"):
        GroupOptions(lanes=2, inline=True)
    assert GroupOptions(inline=True).lane_count() == GroupOptions(backend="nccl").lane_count() == 1
    assert GroupOptions(lanes=3).lane_count() == 3
    assert "lanes 3" in GroupOptions(lanes=3).text(), "ranks that differ in it are told"


def test_a_call_obeys_the_calls_before_it_and_none_after() -> None:
    """However late it runs: the other ranks may have run it earlier."""
    monitors = Monitors({"dp": ErrorMonitor(every=2, limit=0.1, action="exact")})
    turns = [monitors.turn(MESSAGE, "collectives") for _ in range(6)]
    assert turns[0].watch().sampled
    turns[0].end()
    due = next(n for n in (2, 3) if turns[n].watch().sampled)
    watch = turns[due].watch()
    watch.before(torch.ones(4))
    watch.after(torch.ones(4))
    watch.conclude(watch.row(torch.device("cpu")), speak=False)
    for n in range(due, 6):
        turns[n].end()
    assert [turns[n].watch().exact for n in range(6)] == [n > due for n in range(6)]

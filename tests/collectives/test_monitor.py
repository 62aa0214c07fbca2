"""Error monitors: what they measure, that all ranks come to the same end in the same call, and what a checkpoint keeps."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from support import TIMEOUT_S, inputs, run_threads, same
from thinwire import Codec, ErrorMonitor, MessageStats, ThinwireGroup, parse
from thinwire import collectives as c
from thinwire.collectives.endpoint import Endpoint
from thinwire.collectives.lanes import Lanes
from thinwire.collectives.monitor import Monitors
from thinwire.collectives.options import CallOptions
from thinwire.collectives.torch_transport import TorchTransport
from thinwire.collectives.traffic import PASS_THROUGH, Errors, Message, Traffic
from thinwire.collectives.transport import Metered
from thinwire.errors import CheckpointError, SpecError
from thinwire.group import GroupOptions
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")
CODEC = parse("int2:block=32")
N, OPTIONS = 960, CallOptions()


def message(op: str = "all_reduce", codec: object = CODEC, dtype: str = "float32") -> Message:
    return Message("dp", op, "gradient", str(codec), dtype, 4 * N)


def decoded(x: Tensor, codec: Codec = CODEC) -> Tensor:
    payload = torch.empty(codec.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    out = torch.empty_like(x)
    codec.decode(payload[: codec.encode(x, payload)], out)
    return out


def relative(pieces: Sequence[Tensor]) -> float:
    lost = sum(float((x.double() - decoded(x).double()).square().sum()) for x in pieces)
    return math.sqrt(lost / sum(float(x.double().square().sum()) for x in pieces))


# What is measured.


def _all_reduce(x: Tensor, t: Metered) -> None:
    c.all_reduce(x.clone(), CODEC, t, OPTIONS)


def _chunks(world: int) -> c.Chunks:
    return c.Chunks.of(N, world, CODEC.granule)


def _reduce_scatter(x: Tensor, t: Metered) -> None:
    c.reduce_scatter(x, CODEC, t, _chunks(t.size), OPTIONS)


def _ring(x: Tensor, t: Metered) -> None:
    c.ring_reduce_scatter(x, CODEC, t, _chunks(t.size), OPTIONS)


def _all_gather(x: Tensor, t: Metered) -> None:
    c.all_gather(x, [torch.empty(N) for _ in range(t.size)], CODEC, t, OPTIONS)


def _broadcast(x: Tensor, t: Metered) -> None:
    c.broadcast(x.clone(), CODEC, t, 1, OPTIONS)


def _all_to_all(x: Tensor, t: Metered) -> None:
    c.all_to_all(x.chunk(t.size), [torch.empty(N // t.size) for _ in range(t.size)], CODEC, t, OPTIONS)


def part(x: Tensor, owner: int) -> Tensor:
    start, stop = _chunks(3).bounds(owner)
    return x[start:stop].clone()


# The first sample of three ranks takes the frame for the first other rank; a ring's first hop goes to the next rank.
FIRST_OTHER = [1, 0, 0]
MEASURED: dict[str, tuple[Callable[[Tensor, Metered], None], Callable[[list[Tensor]], list[Tensor]]]] = {
    "reduce_scatter": (_reduce_scatter, lambda xs: [part(x, FIRST_OTHER[r]) for r, x in enumerate(xs)]),
    "ring": (_ring, lambda xs: [part(x, (r - 1) % 3) for r, x in enumerate(xs)]),
    "all_gather": (_all_gather, lambda xs: xs),
    "broadcast": (_broadcast, lambda xs: [xs[1]]),
    "all_to_all": (_all_to_all, lambda xs: [part(x, FIRST_OTHER[r]) for r, x in enumerate(xs)]),
}


def _watched(group: dist.ProcessGroup, calls: Any, monitor: ErrorMonitor) -> list[Any]:
    """The errors that an endpoint counts for calls (message, values -> call) made one after the other."""
    end = Endpoint(TorchTransport(group), monitors=Monitors({"dp": monitor}))
    for told, call in calls(end.rank):
        end.run(told, 0.0, call)
    return [e.errors for m, e in end.traffic.entries().items() if m.role != "control"]


def test_of_each_collective_what_its_ranks_have_encoded() -> None:
    xs = inputs(3, N)

    def calls(rank: int) -> list[Any]:
        ops = ((op, call) for op, (call, _) in MEASURED.items())
        # As roles, so that each is a stream of its own.
        return [
            (Message("dp", op, "gradient", str(CODEC), "float32", 4 * N), lambda t, f=call: f(xs[rank], t))
            for op, call in ops
        ]

    found = run_threads(_watched, 3, calls, ErrorMonitor(every=1))
    expected = {op: relative(pieces(xs)) for op, (_, pieces) in MEASURED.items()}
    for rank in found:
        for op, errors in zip(sorted(MEASURED), rank, strict=True):
            assert errors.last == pytest.approx(expected[op], rel=1e-9), op
            assert (errors.sampled, errors.nonfinite, errors.max) == (1, 0, errors.last)
    assert [e.last for e in found[0]] == [e.last for e in found[1]] == [e.last for e in found[2]]


@pytest.mark.parametrize("world", [2, 3])
def test_an_all_reduce_shows_the_larger_of_its_encodings(world: int) -> None:
    xs = inputs(world, N)
    calls = lambda rank: [(message(), lambda t: _all_reduce(xs[rank], t))]  # noqa: E731
    found = run_threads(_watched, world, calls, ErrorMonitor(every=1))
    if world == 2:
        expected = relative(xs)
    else:
        first = relative([part(x, FIRST_OTHER[r]) for r, x in enumerate(xs)])
        sums = []
        for owner in range(3):
            terms = [part(x, owner) for x in xs]
            total = torch.zeros_like(terms[owner])
            for rank, term in enumerate(terms):
                total += term if rank == owner else decoded(term)
            sums.append(total)
        expected = max(first, relative(sums))
    assert {rank[0].last for rank in found} == {found[0][0].last}
    assert found[0][0].last == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_16_bit_messages_and_of_padded_frames(dtype: torch.dtype) -> None:
    codec, xs = parse("int2:block=32|huffman"), inputs(2, N, dtype)

    def calls(rank: int) -> list[Any]:
        outs, options = [torch.empty(N, dtype=dtype) for _ in range(2)], CallOptions(padded=True)
        told = message("all_gather", codec, str(dtype).removeprefix("torch."))
        return [(told, lambda t: c.all_gather(xs[rank], outs, codec, t, options))]

    found = run_threads(_watched, 2, calls, ErrorMonitor(every=1))
    assert found[0][0].last == found[1][0].last == pytest.approx(relative(xs), rel=1e-6)


def test_with_feedback_it_is_the_error_of_the_compensated_message() -> None:
    xs = inputs(2, N)

    def calls(rank: int) -> list[Any]:
        residual = torch.zeros(N)

        def call(t: Metered) -> None:
            c.reduce_scatter(xs[rank], CODEC, t, _chunks(2), OPTIONS, residual=residual)

        return [(message("reduce_scatter"), call)] * 2

    found = run_threads(_watched, 2, calls, ErrorMonitor(every=1))
    sent = [x[slice(*_chunks(2).bounds(1 - rank))] for rank, x in enumerate(xs)]
    second = [x + (x - decoded(x)) for x in sent]
    assert found[0][0].last == found[1][0].last == pytest.approx(relative(second), rel=1e-6)
    assert found[0][0].max == pytest.approx(max(relative(sent), relative(second)), rel=1e-6)


def test_lossless_and_passed_messages_are_not_measured() -> None:
    monitors = Monitors({"dp": ErrorMonitor(every=1)})
    for codec in ("exponent", "mpc:dim=1", "none", PASS_THROUGH):
        assert not monitors.turn(message(codec=codec), "collectives").watch().sampled
    other_axis = Message("tp", "all_reduce", "unknown", str(CODEC), "float32", N)
    assert not monitors.turn(other_axis, "collectives").watch().sampled
    assert monitors.turn(message(), "collectives").watch().sampled
    assert monitors.dump() == {f"dp all_reduce gradient {CODEC} float32 collectives": [1, False, False]}


# Special values.


def _special(value: float, codec: Codec, rank_with: int = 1) -> Errors:
    xs = inputs(2, N)
    xs[rank_with][5] = value

    def calls(rank: int) -> list[Any]:
        outs = [torch.empty(N) for _ in range(2)]
        told = message("all_gather", codec)
        return [(told, lambda t: c.all_gather(xs[rank], outs, codec, t, OPTIONS))]

    found = run_threads(_watched, 2, calls, ErrorMonitor(every=1, limit=1.5, action="exact"))
    assert found[0][0].last == found[1][0].last
    return found[0][0]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_counted_and_has_no_error(value: float) -> None:
    errors = _special(value, CODEC)
    assert (errors.sampled, errors.nonfinite, errors.last, errors.max) == (1, 1, None, None)


def test_finite_values_that_decode_to_infinity_have_the_largest_error() -> None:
    watch = Monitors({"dp": ErrorMonitor(every=1, limit=1.0)}).turn(message(), "collectives").watch()
    watch.before(torch.ones(4))
    watch.after(torch.tensor([0.0, math.inf, 0.0, 0.0]))
    watch.conclude(watch.row(torch.device("cpu")), speak=False)
    assert (watch.nonfinite, watch.error) == (False, sys.float_info.max)
    json.dumps(watch.error, allow_nan=False)


@pytest.mark.parametrize("numel", [0, 1, N])
def test_zeros_and_nothing_have_no_error(numel: int) -> None:
    zeros = lambda rank: [(message(), lambda t: _all_reduce(torch.zeros(numel), t))]  # noqa: E731
    for (errors,) in run_threads(_watched, 3, zeros, ErrorMonitor(every=1, limit=0.1, action="exact")):
        assert (errors.sampled, errors.nonfinite, errors.last) == (1, 0, None)


# Which calls are sampled.


def test_one_call_in_every_so_many_is_sampled() -> None:
    ends = [Monitors({"dp": ErrorMonitor(every=7)}) for _ in range(2)]
    sampled = [[end.turn(message(), "collectives").watch().sampled for _ in range(70)] for end in ends]
    assert sampled[0] == sampled[1]
    windows = [sampled[0][at : at + 7] for at in range(0, 70, 7)]
    assert all(sum(window) == 1 for window in windows)
    assert windows[0][0], "the first call"
    assert len({window.index(True) for window in windows}) > 3, "buckets that alternate all get their turn"


def test_both_ends_of_a_send_sample_the_same_calls() -> None:
    ends = [Monitors({"dp": ErrorMonitor(every=5)}) for _ in range(2)]
    told = (message("send"), "send-1"), (message("recv"), "recv-0")
    sampled = [[end.turn(*m).watch().sampled for _ in range(40)] for end, m in zip(ends, told, strict=True)]
    assert sampled[0] == sampled[1]


# What happens above the limit, in a group.


def group_of(inner: dist.ProcessGroup, store: Any, monitor: ErrorMonitor, **entries: Any) -> ThinwireGroup:
    table = {"all": str(CODEC), "min_nbytes": 0, **entries}
    policy = from_dict({"axis": {"dp": table}}, "test").monitored(monitor)
    options = GroupOptions(policy=policy, axis="dp")
    return ThinwireGroup(store, inner.rank(), inner.size(), options, timedelta(seconds=TIMEOUT_S))


def rows(group: ThinwireGroup) -> dict[tuple[str, str], MessageStats]:
    return {(m.op, m.codec.split(":")[0]): m for m in thinwire.stats(group).messages if m.role != "control"}


def _falls_back(inner: dist.ProcessGroup, store: Any) -> tuple[list[Tensor], Any, bytes]:
    """Rank 1 alone encodes what is lost almost whole; the others' messages have no error."""
    group = group_of(inner, store, ErrorMonitor(every=3, limit=0.1, action="exact"))
    easy = torch.ones(N)
    hard = torch.full((N,), 0.3)
    hard[::32] = 1.0
    results = []
    for call in range(7):
        # All calls are queued before the first has run: what is decided must not depend on when it is known.
        x = hard.clone() if inner.rank() == 1 and call >= 1 else easy.clone()
        results.append((x, group.allreduce([x])))
    for _, work in results:
        work.wait()
    found = [x for x, _ in results], rows(group), group.codec_states()
    inner.barrier().wait()
    group.shutdown()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_fall_back_in_the_same_call(world: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "thinwire"):
        ranks = run_threads(_falls_back, world, dist.HashStore())
    hard = torch.full((N,), 0.3)
    hard[::32] = 1.0
    exact = hard + (world - 1)
    for results, stats, states in ranks:
        assert all(map(same, results, ranks[0][0])), "the same bits on every rank"
        assert states == ranks[0][2]
        lossy = [not same(x, exact) for x in results[1:]]
        assert lossy[0]
        assert not lossy[-1]
        # The sampled call itself is lossy still; none after it is.
        assert lossy == sorted(lossy, reverse=True)
        assert stats["all_reduce", "int2"].calls == 1 + sum(lossy)
        assert stats["all_reduce", "none"].calls == 6 - sum(lossy)
        assert stats["all_reduce", "none"].ratio < 1.01
        assert (
            stats["all_reduce", "int2"].max_relative_error == stats["all_reduce", "int2"].relative_error > 0.1
        )
    assert len(caplog.records) == 1, "one rank speaks for all"
    assert "axis dp, all_reduce" in caplog.text
    assert "above the monitor's limit 0.1; from now on" in caplog.text


def _warns(inner: dist.ProcessGroup, store: Any) -> dict[tuple[str, str], MessageStats]:
    group = group_of(inner, store, ErrorMonitor(every=1, limit=0.1))
    bad, good = torch.full((N,), 0.3), torch.ones(N)
    bad[::32] = 1.0
    for x in (bad, bad, good, bad, bad):
        group.allreduce([x.clone()]).wait()
    found = rows(group)
    inner.barrier().wait()
    group.shutdown()
    return found


def test_a_warning_comes_once_for_each_time_the_limit_is_passed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "thinwire"):
        ranks = run_threads(_warns, 2, dist.HashStore())
    assert len(caplog.records) == 2
    (stats,) = ranks[0].values()
    assert (stats.calls, stats.sampled, stats.nonfinite) == (5, 5, 0)
    assert stats.monitor_s > 0


def _to_peers(inner: dist.ProcessGroup, store: Any) -> Any:
    group = group_of(inner, store, ErrorMonitor(every=2, limit=0.1, action="exact"))
    hard = torch.full((N,), 0.3)
    hard[::32] = 1.0
    rank = inner.rank()
    received = []
    for _ in range(3):
        if rank == 0:
            group.send([hard], 1).wait()
        else:
            x = torch.empty(N)
            group.recv([x], 0).wait()
            received.append(same(x, hard))
    found = rows(group)
    inner.barrier().wait()
    group.shutdown()
    return received, found


def test_a_send_falls_back_with_its_receiver() -> None:
    (_, sender), (received, receiver) = run_threads(_to_peers, 2, dist.HashStore())
    assert received == [False, True, True]
    assert (sender["send", "int2"].calls, sender["send", "none"].calls) == (1, 2)
    assert (receiver["recv", "int2"].calls, receiver["recv", "none"].calls) == (1, 2)
    assert sender["send", "int2"].relative_error == receiver["recv", "int2"].relative_error > 0.1


def test_low_rank_reductions_are_measured_and_fall_back() -> None:
    xs = [x.clone() for x in inputs(2, 40 * 24 + 10)]

    def rank(group: dist.ProcessGroup) -> tuple[list[Any], bool]:
        end = Endpoint(
            TorchTransport(group),
            monitors=Monitors({"dp": ErrorMonitor(every=1, limit=0.1, action="exact")}),
        )
        compressor: Any = thinwire.codecs.LowRank(rank=2)
        matrix = c.Matrix(0, 40, 24, compressor.first_q(24, 3))
        residual = torch.zeros_like(xs[0])
        told = Message("dp", "all_reduce", "gradient", str(compressor), "float32", xs[0].nbytes)
        outs = []
        for kept in (residual, residual):
            x = xs[end.rank].clone()

            def call(t: Metered, x: Tensor = x, kept: Tensor = kept) -> None:
                c.low_rank_all_reduce(x, [matrix], t, OPTIONS, residual=kept)

            end.run(told, 0.0, call)
            outs.append(x)
        lossless = torch.allclose(outs[0] + outs[1], 2 * (xs[0] + xs[1]), rtol=1e-5, atol=1e-5)
        return [e.errors for m, e in end.traffic.entries().items() if m.role != "control"], lossless

    for errors, lossless in run_threads(rank, 2):
        # The row of the exact call comes second.
        assert [e.sampled for e in errors] == [1, 0]
        assert 0.1 < errors[0].last < 1
        assert lossless, "the exact call sent what the residual held"


# Checkpoints.


def _resumes(inner: dist.ProcessGroup, store: Any, others: Any) -> None:
    monitor = ErrorMonitor(every=4, limit=0.1, action="exact")
    first, second = (group_of(inner, s, monitor) for s in (store, others))
    hard = torch.full((N,), 0.3)
    hard[::32] = 1.0
    for group in (first, second):
        for x in (hard, hard):
            group.broadcast([x.clone()]).wait()  # has fallen back
        group.allreduce([torch.ones(N)]).wait()  # has not
    states = first.codec_states()
    table = json.loads(states)["monitors"]
    assert sorted(entry[1] for entry in table.values()) == [False, True]
    resumed = group_of(inner, dist.PrefixStore("again", store), monitor)
    resumed.load_codec_states(states)
    assert resumed.codec_states() == states
    for _ in range(8):
        for group in (first, resumed):
            group.allreduce([torch.ones(N)]).wait()
            x = hard.clone()
            group.broadcast([x]).wait()
            assert same(x, hard)
    assert resumed.codec_states() == first.codec_states()
    inner.barrier().wait()
    for group in (first, second, resumed):
        group.shutdown()


def test_a_checkpoint_goes_on_with_the_same_calls_and_as_exact() -> None:
    run_threads(_resumes, 2, dist.HashStore(), dist.HashStore())


@pytest.mark.parametrize(
    "dumped",
    [
        b"",
        b"[]",
        b"{}",
        b'{"codecs": []}',
        b'{"codecs": [], "calls": -1, "monitors": {}}',
        b'{"codecs": [], "calls": 0, "monitors": {"x": [1, 2, 3]}}',
    ],
)
def test_damaged_states_are_refused_whole(dumped: bytes) -> None:
    def rank(group: dist.ProcessGroup) -> None:
        end = Lanes([TorchTransport(group)], Traffic(), device=torch.device("cpu"))
        before = end.dump_states()
        with pytest.raises(CheckpointError):
            end.load_states(dumped)
        assert end.dump_states() == before

    run_threads(rank, 1)


# What it is told.


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"every": 0}, "every = 0"),
        ({"every": True}, "every = True"),
        ({"limit": -1.0}, "limit = -1.0"),
        ({"limit": math.inf}, "limit = inf"),
        ({"limit": "0.1"}, "limit = '0.1'"),
        ({"action": "stop"}, "must be one of warn, exact"),
        ({"action": "exact"}, "needs a limit"),
    ],
)
def test_what_a_monitor_refuses(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        ErrorMonitor(**wrong)

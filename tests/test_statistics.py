"""``thinwire.stats``: numbers of one group or of all, as rows and as scalars."""

from __future__ import annotations

import gc
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import thinwire
from support import TIMEOUT_S, gaussian, run_threads
from thinwire import GroupOptions, ThinwireGroup
from thinwire.collectives.traffic import PASS_THROUGH, Message, Tally, Traffic
from thinwire.errors import UnsupportedError
from thinwire.group import MessageStats, Stats
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")


def sample() -> Traffic:
    traffic = Traffic()
    for dtype in ("float32", "bfloat16"):
        message = Message("dp", "all_reduce", "gradient", "int4:block=128", dtype, 4000)
        traffic.add(message, 4000.0, Tally(wire_bytes=500, encode_s=0.5, two_phase=1))
    traffic.add(Message("dp", "all_reduce", "unknown", PASS_THROUGH, "int64", 8), 8.0, Tally(wire_bytes=8))
    traffic.add(Message("tp", "recv", "unknown", "bf16", "float32", 8), 0.0, Tally(wire_s=2.0))
    return traffic


def test_sums_over_dtypes_sizes_and_groups() -> None:
    found = Stats.of([sample(), sample()])
    assert [(m.axis, m.op, m.role, m.codec, m.calls) for m in found.messages] == [
        ("dp", "all_reduce", "gradient", "int4:block=128", 4),
        ("dp", "all_reduce", "unknown", PASS_THROUGH, 2),
        ("tp", "recv", "unknown", "bf16", 2),
    ]
    first = found.messages[0]
    assert (first.raw_bytes, first.wire_bytes, first.ratio, first.encode_s, first.two_phase) == (
        16000,
        2000,
        8,
        2.0,
        4,
    )
    assert (first.compressed, found.messages[1].compressed) == (True, False)
    assert found.messages[2].ratio == 1, "a receiver sends nothing"


def test_sums_by_fields() -> None:
    sums = Stats.of([sample()]).by("axis")
    assert set(sums) == {("dp",), ("tp",)}
    assert sums["dp",] == MessageStats(
        "dp", "all_reduce", "*", "*", calls=3, raw_bytes=8008.0, wire_bytes=1008, encode_s=1.0, two_phase=2
    )
    assert Stats().by() == {}


def test_scalars_and_dicts_are_plain() -> None:
    found = Stats.of([sample()])
    scalars = found.scalars()
    assert scalars["thinwire/dp/all_reduce/ratio"] == 8008 / 1008
    assert scalars["thinwire/tp/recv/wire_s"] == 2.0
    assert all(type(value) is float for value in scalars.values())
    assert set(found.scalars("x")) == {name.replace("thinwire", "x", 1) for name in scalars}
    assert json.loads(json.dumps(found.as_dicts()))[0]["ratio"] == 8.0
    assert hash(found) == hash(Stats.of([sample()]))


def test_errors_are_shown_once_there_are_some() -> None:
    assert not [name for name in Stats.of([sample()]).scalars() if "relative_error" in name]
    assert Stats.of([sample()]).messages[0].relative_error is None
    traffic, control = sample(), sample()
    for dtype, errors in (("float32", (0.5, 0.25)), ("bfloat16", (0.125, None))):
        for error in errors:
            told = Message("dp", "all_reduce", "gradient", "int4:block=128", dtype, 4000)
            traffic.add_error(told, error, nonfinite=error is None, seconds=0.5)
    found = Stats.of([traffic, control])
    first = found.messages[0]
    assert (first.sampled, first.nonfinite, first.monitor_s) == (4, 1, 2.0)
    assert (first.relative_error, first.max_relative_error) == (0.25, 0.5)
    assert found.messages[1].relative_error is None
    scalars = found.scalars()
    assert scalars["thinwire/dp/all_reduce/relative_error"] == 0.25
    assert scalars["thinwire/dp/all_reduce/max_relative_error"] == 0.5
    assert scalars["thinwire/dp/all_reduce/sampled"] == 4.0
    assert found.as_dicts()[0]["relative_error"] == 0.25
    json.dumps(found.as_dicts(), allow_nan=False)


def test_tensorboard_takes_the_scalars(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        for name, value in Stats.of([sample()]).scalars().items():
            writer.add_scalar(name, value, 7)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    (event,) = read.Scalars("thinwire/dp/all_reduce/ratio")
    assert (event.step, event.value) == (7, pytest.approx(8008 / 1008))
    assert set(read.Tags()["scalars"]) == set(Stats.of([sample()]).scalars())


def _one_rank(inner: dist.ProcessGroup, store: Any) -> tuple[Stats, int]:
    options = GroupOptions(
        policy=from_dict({"axis": {"dp": {"all": "int8", "min_nbytes": 0}}}, "test"), axis="dp"
    )
    group = ThinwireGroup(store, inner.rank(), inner.size(), options, timedelta(seconds=TIMEOUT_S))
    group.allreduce([gaussian(inner.rank(), 4000)]).wait()
    found = thinwire.stats(group)
    live = len(thinwire.stats().messages)
    inner.barrier().wait()
    group.shutdown()
    return found, live


def test_of_a_group_and_of_all_that_are_live() -> None:
    gc.collect()
    before = thinwire.stats()
    results = run_threads(_one_rank, 2, dist.HashStore())
    for found, live in results:
        rows = [m for m in found.messages if m.role != "control"]
        assert [(m.op, m.codec.split(":")[0], m.calls) for m in rows] == [("all_reduce", "int8", 1)]
        assert 3 < rows[0].ratio < 4
        assert live >= len(found.messages)
    assert thinwire.stats() == before, "a group that is shut down is not live"


def _other_groups(rank: int, world: int, report: Any) -> None:
    with pytest.raises(UnsupportedError, match="stats needs a thinwire group, found ProcessGroup"):
        thinwire.stats(dist.group.WORLD)
    assert thinwire.stats() == Stats()
    group = dist.new_group(backend="thinwire", pg_options=GroupOptions(policy="bf16"))
    dist.all_reduce(torch.ones(8192), group=group)
    assert thinwire.stats() == thinwire.stats(group) != Stats()
    dist.destroy_process_group(group)
    assert thinwire.stats() == Stats()


def test_groups_of_pytorch() -> None:
    run_ranks(_other_groups, 1, timeout=TIMEOUT_S)


def test_a_profiler_shows_the_parts_of_a_call() -> None:
    tally = Tally()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        with tally.encoding(), tally.waiting():
            pass
        with tally.decoding():
            pass
    assert {e.key for e in trace.key_averages()} >= {"thinwire::encode", "thinwire::wire", "thinwire::decode"}

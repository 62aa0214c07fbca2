from __future__ import annotations

import threading

import pytest

from thinwire.collectives.traffic import Message, Tally, Traffic, gloo_nbytes, raw_nbytes


def message(axis: str = "dp", op: str = "all_reduce", nbytes: int = 100) -> Message:
    return Message(axis, op, "gradient", "bf16", "float32", nbytes)


def test_entries_add_up_and_are_copies() -> None:
    traffic = Traffic()
    traffic.add(message(), 150.0, Tally(wire_bytes=10, encode_s=0.5, two_phase=1))
    traffic.add(message(), 150.0, Tally(wire_bytes=5, wire_s=0.25, padded=2))
    before = traffic.entries()
    traffic.add(message(), 150.0, Tally(wire_bytes=1))
    entry = before[message()]
    assert (entry.calls, entry.raw_bytes) == (2, 300.0)
    assert entry.tally == Tally(wire_bytes=15, encode_s=0.5, wire_s=0.25, two_phase=1, padded=2)
    assert traffic.entries()[message()].calls == 3
    traffic.reset()
    assert traffic.entries() == {}


def test_entries_are_sorted_and_sums_are_per_axis() -> None:
    traffic = Traffic()
    traffic.add(message("tp"), 1.0, Tally(wire_bytes=1))
    traffic.add(message("dp", nbytes=9), 2.0, Tally(wire_bytes=2))
    traffic.add(message("dp", op="all_gather"), 4.0, Tally(wire_bytes=4, decode_s=0.5))
    assert [(m.axis, m.op) for m in traffic.entries()] == [
        ("dp", "all_gather"),
        ("dp", "all_reduce"),
        ("tp", "all_reduce"),
    ]
    sums = traffic.by_axis()
    assert sums["dp"]["calls"] == 2
    assert sums["dp"]["raw_bytes"] == 6
    assert sums["dp"]["wire_bytes"] == 6
    assert sums["dp"]["decode_s"] == 0.5
    assert sums["tp"]["wire_bytes"] == 1


def test_counting_from_many_threads_loses_nothing() -> None:
    traffic = Traffic()

    def count() -> None:
        for _ in range(500):
            traffic.add(message(), 1.0, Tally(wire_bytes=3))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    entry = traffic.entries()[message()]
    assert (entry.calls, entry.raw_bytes, entry.tally.wire_bytes) == (4000, 4000.0, 12000)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_raw_bytes_are_the_least_that_an_op_needs(world: int) -> None:
    share = (world - 1) / world
    assert raw_nbytes("all_reduce", 800, world) == 2 * share * 800
    for op in ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter"):
        assert raw_nbytes(op, 800, world) == share * 800
    assert (raw_nbytes("send", 800, world), raw_nbytes("recv", 800, world)) == (800, 0)
    assert gloo_nbytes("reduce_scatter", 800, world) == 2 * share * 800
    assert gloo_nbytes("all_gather", 800, world) == share * 800

"""``thinwire.StatsLog``: a file of JSON lines for each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import thinwire
from thinwire import StatsLog
from thinwire.collectives.traffic import Message, Tally, Traffic
from thinwire.group import Stats


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each_call(tmp_path: Path) -> None:
    traffic = Traffic()
    log = StatsLog(
        tmp_path / "deep" / "sent.jsonl", rank=3, source=lambda: Stats.of([traffic]), policy="balanced"
    )
    assert log.path == tmp_path / "deep" / "sent.rank3.jsonl"
    assert lines(log.path) == [], "it is there from the start"
    for step in (10, 20):
        traffic.add(
            Message("dp", "all_reduce", "gradient", "bf16", "float32", 80), 80.0, Tally(wire_bytes=40)
        )
        log.log(step, loss=0.5)
    first, second = lines(log.path)
    assert (first["rank"], first["policy"], first["step"], first["loss"]) == (3, "balanced", 10, 0.5)
    assert first["seconds"] <= second["seconds"]
    (message,) = second["messages"]
    assert (message["axis"], message["op"], message["calls"], message["ratio"]) == (
        "dp",
        "all_reduce",
        2,
        2.0,
    )
    assert first["messages"][0]["calls"] == 1, "sums so far"
    StatsLog(tmp_path / "deep" / "sent.jsonl", rank=3).log()
    assert len(lines(log.path)) == 3, "a run that goes on appends"
    assert "step" not in lines(log.path)[2]


def test_without_ranks_it_is_of_this_process(tmp_path: Path) -> None:
    log = StatsLog(tmp_path / "sent")
    log.log()
    assert log.path.name == "sent.rank0.jsonl"
    assert lines(log.path)[0]["messages"] == thinwire.stats().as_dicts()


def test_what_json_lacks_leaves_the_file_whole(tmp_path: Path) -> None:
    log = StatsLog(tmp_path / "sent.jsonl")
    with pytest.raises(TypeError, match="not JSON serializable"):
        log.log(1, loss=object())
    assert lines(log.path) == []

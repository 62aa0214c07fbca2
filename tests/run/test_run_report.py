"""The texts and the log of ``thinwire run``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thinwire import ErrorMonitor
from thinwire.collectives.traffic import PASS_THROUGH, Message, Tally, Traffic
from thinwire.policy import AxisPolicy, from_dict
from thinwire.presets import load
from thinwire.run.report import Report, axis_lines
from thinwire.run.settings import RunSettings


class Group:
    """What a report asks of a group."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.options = type("Options", (), {"backend": "gloo"})()

    def axis(self, op: str = "") -> str:
        return "dp"

    def size(self) -> int:
        return 2

    def getGroupDesc(self) -> str:
        return "default_pg"


def report(rank: int = 0, **settings: Any) -> tuple[Report, Group]:
    made: Any = Group()
    found = Report(RunSettings("balanced", **settings), load("balanced"), rank)
    found.group(made)
    return found, made


def fill(traffic: Traffic) -> None:
    for role in ("gradient", "unknown"):
        message = Message("dp", "all_reduce", role, "int4:block=128", "float32", 10**6)
        traffic.add(message, 1e6, Tally(wire_bytes=125_000, encode_s=0.25))
    traffic.add(
        Message("dp", "broadcast", "unknown", PASS_THROUGH, "float32", 100), 50.0, Tally(wire_bytes=50)
    )


def test_the_start_says_which_codec_is_for_what(capsys: pytest.CaptureFixture[str]) -> None:
    said, group = report()
    said.group(group)  # type: ignore[arg-type]
    text = capsys.readouterr().err
    assert text.count("group default_pg: axis dp, 2 ranks over gloo") == 1, "once for groups that are alike"
    assert (
        "all_reduce, reduce_scatter: int4:block=128,round=nearest, error feedback under DistributedDataParallel, "
        "else WITHOUT error feedback\n" in text
    )
    assert "all_gather: int8:block=128,round=nearest\n" in text
    assert "messages under 16384 bytes pass through" in text
    assert capsys.readouterr().err == ""


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    said, _ = report(rank=1)
    with said:
        pass
    assert capsys.readouterr().err == ""


def test_the_end_says_what_went_without_feedback_and_what_passed(capsys: pytest.CaptureFixture[str]) -> None:
    # gpt-neox 128
    said, group = report()
    with said:
        fill(group.traffic)
    rows = {tuple(line.split()[:4]): line for line in capsys.readouterr().err.splitlines()}
    fed = rows["dp", "all_reduce", "int4:block=128", "gradient"]
    assert fed.split()[4:] == ["1", "1.00", "0.12", "8.00", "0.25", "0.00", "0.00", "error", "feedback"]
    assert rows["dp", "all_reduce", "int4:block=128", "unknown"].endswith("WITHOUT error feedback")
    assert rows["dp", "broadcast", PASS_THROUGH, "unknown"].endswith("0.00")
    assert any(line.startswith("  compressed") and " 2.00 " in line for line in rows.values())
    assert any(line.startswith("  passed through") for line in rows.values())


def test_errors_have_a_column_where_a_monitor_watches() -> None:
    said, group = report()
    fill(group.traffic)
    plain = said.text()
    assert "error:" not in plain
    watched = Message("dp", "all_reduce", "gradient", "int4:block=128", "float32", 10**6)
    group.traffic.add_error(watched, 0.0625, nonfinite=False, seconds=0.1)
    rows = {tuple(line.split()[:4]): line.split() for line in said.text().splitlines()}
    assert rows["axis", "op", "codec", "role"][-1] == "error"
    assert rows["dp", "all_reduce", "int4:block=128", "gradient"][-3:] == ["0.0625", "error", "feedback"]
    assert len(rows["dp", "broadcast", PASS_THROUGH, "unknown"]) == len(plain.splitlines()[4].split())
    assert "error: largest relative L2 error" in said.text()


def test_nothing_sent_is_said_too() -> None:
    # gpt-neox 128
    assert "nothing" in Report(RunSettings("bf16"), load("bf16"), 0).text()


def test_the_log_has_a_line_for_each_rank(tmp_path: Path) -> None:
    said, group = report(rank=1, log=str(tmp_path / "deep" / "sent.jsonl"))
    fill(group.traffic)
    with pytest.raises(ValueError, match="the script"), said:
        raise ValueError("the script")
    (line,) = (tmp_path / "deep" / "sent.rank1.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["rank"], record["policy"]) == (1, "balanced")
    assert [m["op"] for m in record["messages"]] == ["all_reduce", "all_reduce", "broadcast"]
    assert record["messages"][0]["ratio"] == 8.0


def test_lines_of_an_axis_without_codecs_and_with_roles() -> None:
    assert axis_lines(AxisPolicy()) == ["everything passes through"]
    policy = from_dict({"axis": {"tp": {"role": {"activation": {"all_reduce": "bf16"}}}}}, "test").axis("tp")
    assert "all_reduce of role activation" in axis_lines(policy)[0]
    assert axis_lines(replace(policy, monitor=ErrorMonitor(limit=0.3)))[1] == (
        "error monitor: every=50,limit=0.3,action=warn"
    )

"""Policies: what a message gets, what a file may say, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire import AxisPolicy, ErrorMonitor, Policy, load_policy, parse
from thinwire.codecs import LowRank
from thinwire.errors import PolicyError, SpecError
from thinwire.policy import AXES, NONE, OPS, ByDtype, from_dict, from_toml, shrinks

BIG = 1 << 20
EXAMPLE = """
description = "an example"
[axis.dp]
reduce = "int4:block=128"
gather = "int8:block=128"
feedback = true
min_nbytes = 100
[axis.tp]
all = "bf16"
all_reduce = { float32 = "zfp:rate=16", bfloat16 = "zfp:rate=12" }
algorithm = "ring"
[axis.tp.role.activation_gradient]
all_reduce = "fp16"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def one(axis: str, **entries: Any) -> AxisPolicy:
    return from_dict({"axis": {axis: entries}}, "p").axis(axis)


def test_a_file_gives_what_it_says(tmp_path: Path) -> None:
    policy = from_toml(write(tmp_path, EXAMPLE))
    assert (policy.name, policy.description) == ("mine", "an example")
    dp, tp = policy.axis("dp"), policy.axis("tp")
    assert dp.codec("all_reduce", "gradient", torch.float32, BIG) == parse("int4:block=128")
    assert dp.codec("reduce_scatter", "gradient", torch.float32, BIG) == parse("int4:block=128")
    assert dp.codec("all_gather", "parameter", torch.float32, BIG) == parse("int8:block=128")
    assert dp.codec("broadcast", "unknown", torch.float32, BIG) == NONE
    assert (dp.feedback, dp.min_nbytes, dp.algorithm) == (True, 100, "two_shot")
    assert tp.codec("all_reduce", "unknown", torch.float32, BIG) == parse("zfp:rate=16")
    assert tp.codec("all_reduce", "unknown", torch.bfloat16, BIG) == parse("zfp:rate=12")
    assert tp.codec("all_reduce", "unknown", torch.float16, BIG) == NONE
    assert tp.codec("all_reduce", "activation_gradient", torch.float32, BIG) == parse("fp16")
    assert tp.codec("all_gather", "activation_gradient", torch.float32, BIG) == parse("bf16")
    assert tp.algorithm == "ring"


def test_an_axis_that_is_not_named_is_not_compressed(tmp_path: Path) -> None:
    policy = from_toml(write(tmp_path, EXAMPLE))
    for op in OPS:
        assert policy.axis("pp").codec(op, "activation", torch.float32, BIG) == NONE
    assert not policy.axis("pp").compresses
    assert policy.axis("dp").compresses


def test_equal_files_equal_policies_and_texts(tmp_path: Path) -> None:
    a, b = from_toml(write(tmp_path, EXAMPLE)), from_toml(write(tmp_path, EXAMPLE))
    assert a == b
    assert str(a) == str(b)
    assert str(a) != str(from_toml(write(tmp_path, EXAMPLE.replace("int4", "int8"))))


@pytest.mark.parametrize(
    "key", ["block=64", "min_nbytes = 99", "feedback = false", 'algorithm = "two_shot"', "int8"]
)
def test_the_text_that_ranks_compare_shows_every_difference(tmp_path: Path, key: str) -> None:
    old = {
        "block=64": "block=128",
        "min_nbytes = 99": "min_nbytes = 100",
        "feedback = false": "feedback = true",
        'algorithm = "two_shot"': 'algorithm = "ring"',
        "int8": "int4",
    }[key]
    assert old in EXAMPLE
    a, b = from_toml(write(tmp_path, EXAMPLE)), from_toml(write(tmp_path, EXAMPLE.replace(old, key, 1)))
    assert str(a) != str(b)


def test_an_ops_own_entry_wins_over_its_group_and_over_all() -> None:
    # torchcomms 2941
    policy = one("dp", all="bf16", reduce="int8", reduce_scatter="int4")
    found = {op: str(policy.codec(op, "unknown", torch.float32, BIG)).split(":")[0] for op in OPS}
    assert found == {
        "all_reduce": "int8",
        "reduce_scatter": "int4",
        "all_gather": "bf16",
        "broadcast": "bf16",
        "all_to_all": "bf16",
        "send": "bf16",
    }


def test_small_integer_and_wide_messages_pass() -> None:
    policy = one("dp", all="bf16", min_nbytes=1000)
    assert policy.codec("all_reduce", "unknown", torch.float32, 1000) == parse("bf16")
    assert policy.codec("all_reduce", "unknown", torch.float32, 999) == NONE
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.bool, torch.float64):
        assert policy.codec("all_reduce", "unknown", dtype, BIG) == NONE


def test_one_codec_applies_only_to_the_dtypes_that_it_shrinks() -> None:
    table = ByDtype.of("zfp:rate=16")
    assert table.float32 == parse("zfp:rate=16")
    assert table.float16 == table.bfloat16 == NONE
    assert shrinks(parse("zfp:rate=12"), torch.bfloat16)
    assert not shrinks(parse("bf16"), torch.float16)
    assert shrinks(parse("mpc:dim=1"), torch.bfloat16), "lossless: may shrink"


def test_without_feedback_changes_nothing_else(tmp_path: Path) -> None:
    policy = from_toml(write(tmp_path, EXAMPLE))
    plain = policy.without_feedback()
    assert not plain.axis("dp").feedback
    assert plain.axis("dp").codecs == policy.axis("dp").codecs
    assert plain.axis("tp") == policy.axis("tp")


def test_policy_from_objects_is_possible() -> None:
    policy = Policy("mine", {"dp": AxisPolicy({"all_reduce": ByDtype.of("bf16")})})
    assert policy.axis("dp").codec("all_reduce", "gradient", torch.float32, BIG) == parse("bf16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[axis.pd]\nall = "bf16"', r"axis: unknown key 'pd'; did you mean .*'pp'"),
        ('[axes.dp]\nall = "bf16"', r"unknown key 'axes'; did you mean 'axis'"),
        ('[axis.dp]\nreduc = "bf16"', r"axis\.dp: unknown key 'reduc'; did you mean 'reduce'"),
        ('[axis.dp]\nreduce = "bf61"', r"axis\.dp\.reduce: .*unknown codec 'bf61'; did you mean 'bf16'"),
        ('[axis.dp]\nreduce = "int8:blok=64"', r"axis\.dp\.reduce: .*no parameter 'blok'.*'block'"),
        ("[axis.dp]\nreduce = 8", r"axis\.dp\.reduce: 8 is neither a codec nor a table"),
        ('[axis.dp]\nreduce = {float23 = "bf16"}', r"unknown key 'float23'; did you mean 'float32'"),
        ('[axis.dp]\nreduce = {float16 = "bf16"}', r"bf16 does not make a float16 message smaller; use none"),
        ('[axis.dp]\nreduce = "zfp:rate=32"', r"makes no message smaller; use none"),
        (
            '[axis.dp]\nreduce = {float32 = "zfp:rate=40"}',
            r"rate=40 takes float64, not float32.*at most 32 bits",
        ),
        ('[axis.dp]\nfeedback = "yes"', r"axis\.dp\.feedback: 'yes' is not a value for it"),
        ("[axis.dp]\nmin_nbytes = -1", r"axis\.dp\.min_nbytes: -1"),
        ("[axis.dp]\nmin_nbytes = true", r"axis\.dp\.min_nbytes: True"),
        ('[axis.dp]\nalgorithm = "tree"', r"axis\.dp\.algorithm: 'tree'"),
        ('[axis.dp]\nreduce = "int8"\nfeedback = true\nalgorithm = "ring"', r"axis\.dp: .*two_shot"),
        ('[axis.dp.role.gradeint]\nreduce = "bf16"', r"axis\.dp\.role: unknown key 'gradeint'.*'gradient'"),
        ("[axis.dp.role.gradient]\nfeedback = true", r"axis\.dp\.role\.gradient: unknown key 'feedback'"),
        ("axis = 3", r"axis: a table is needed, found 3"),
        ("[axis.dp", r"policy file .*mine\.toml"),
    ],
)
def test_a_wrong_file_is_told_where_and_what(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        from_toml(write(tmp_path, text))
    assert "mine.toml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.toml does not exist"):
        from_toml(tmp_path / "absent.toml")


def test_every_axis_can_be_named() -> None:
    for axis in AXES:
        assert one(axis, all="bf16").compresses


def test_used_codecs_are_those_of_all_ops_roles_and_dtypes() -> None:
    table = {"axis": {"tp": {"all_reduce": {"float32": "int8"}, "role": {"activation": {"send": "bf16"}}}}}
    assert {str(c) for c in from_dict(table, "p").used_codecs()} == {
        "none",
        "bf16",
        "int8:block=128,round=nearest",
    }


@pytest.mark.parametrize(
    "entries",
    [
        'reduce = "topk"',
        'reduce = "sign"\nfeedback = false',
        'gather = "topk"\nfeedback = true',
        'send = "topk"',
        'feedback = true\n[axis.dp.role.activation]\nall_reduce = "sign"',
    ],
)
def test_codecs_that_need_feedback(tmp_path: Path, entries: str) -> None:
    """Refused where there is none, unless it is asked for by name."""
    # DeepSpeed 5046, DeepSpeed 818
    path = tmp_path / "p.toml"
    path.write_text(f"[axis.dp]\n{entries}\n")
    with pytest.raises(SpecError, match=r"needs error feedback.*allow_without_feedback"):
        from_toml(path)
    path.write_text(f"[axis.dp]\nallow_without_feedback = true\n{entries}\n")
    assert from_toml(path).axis("dp").compresses


def test_sparse_gradients_with_feedback(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[axis.dp]\nreduce = "topk:k=64,bits=4"\nfeedback = true\n')
    codec = from_toml(path).axis("dp").codec("all_reduce", "gradient", torch.bfloat16, 1 << 20)
    assert str(codec) == "topk:k=64,bits=4"


@pytest.mark.parametrize(
    "entries",
    [
        'all = "lowrank"',
        'gather = "lowrank"',
        'broadcast = { float32 = "lowrank:rank=2" }',
        '[axis.dp.role.activation]\nall_reduce = "lowrank"',
    ],
)
def test_low_rank_is_for_gradients(tmp_path: Path, entries: str) -> None:
    """Whatever is said of feedback: other messages have no matrices that stay the same."""
    path = tmp_path / "p.toml"
    for setting in ("feedback = true", "allow_without_feedback = true"):
        path.write_text(f"[axis.dp]\n{setting}\n{entries}\n")
        with pytest.raises(SpecError, match=r"axis\.dp: .* = lowrank:rank=\d: lowrank reduces the matrices"):
            from_toml(path)


def test_low_rank_of_gradients() -> None:
    with pytest.raises(
        SpecError, match=r"lowrank:rank=4: lowrank needs error feedback.*allow_without_feedback"
    ):
        one("dp", reduce="lowrank")
    for entries in (
        {"reduce": "lowrank:rank=2", "feedback": True},
        {"reduce": "lowrank:rank=2", "allow_without_feedback": True},
        {"role": {"gradient": {"reduce": "lowrank:2"}}, "feedback": True},
    ):
        policy = one("dp", **entries)
        for op in ("all_reduce", "reduce_scatter"):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                assert policy.codec(op, "gradient", dtype, BIG) == LowRank(2)
            assert policy.codec(op, "gradient", torch.float32, 100) == NONE
    text = str(from_dict({"axis": {"dp": {"reduce": "lowrank:rank=2", "feedback": True}}}, "p"))
    assert "all_reduce=lowrank:rank=2,reduce_scatter=lowrank:rank=2,feedback=True" in text


def test_a_monitor_of_an_axis() -> None:
    policy = from_dict({"axis": {"dp": {"reduce": "int4", "monitor": {"every": 20, "limit": 0.3}}}}, "p")
    assert policy.axis("dp").monitor == ErrorMonitor(every=20, limit=0.3, action="warn")
    assert one("tp", all="bf16", monitor={}).monitor == ErrorMonitor()
    plain = from_dict({"axis": {"dp": {"reduce": "int4"}}}, "p")
    assert plain.axis("dp").monitor is None
    assert str(plain) != str(policy), "ranks that disagree on it find out"
    for table, told in (
        ({"evry": 20}, "axis.dp.monitor: unknown key 'evry'.*every"),
        ({"every": 0}, "axis.dp.monitor: every = 0"),
        ({"action": "exact"}, "axis.dp.monitor: action = 'exact' needs a limit"),
        (5, "axis.dp.monitor: a table is needed"),
    ):
        with pytest.raises(SpecError, match=told):
            one("dp", reduce="int4", monitor=table)


def test_a_preset_with_a_monitor() -> None:
    monitor = ErrorMonitor(limit=0.5)
    preset = load_policy("balanced")
    everywhere, there = preset.monitored(monitor), preset.monitored(monitor, "dp")
    assert {p.monitor for p in everywhere.axes.values()} == {monitor}
    assert [axis for axis, p in there.axes.items() if p.monitor is not None] == ["dp"]
    assert there.monitored(None) == preset
    with pytest.raises(PolicyError, match="axis 'ep' has no codec to monitor; named are"):
        preset.monitored(monitor, "ep")

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thinwire import list_presets, load_policy, parse
from thinwire.errors import SpecError
from thinwire.policy import _DTYPES, AXES, NONE, OPS, ByDtype, Policy, shrinks
from thinwire.presets import preset

BIG = 1 << 20
ARGUMENT = {"naive-zfp": "naive-zfp:8"}


@pytest.mark.parametrize("name", list(list_presets()))
def test_every_preset_loads_and_describes_itself(name: str) -> None:
    policy = load_policy(ARGUMENT.get(name, name))
    assert policy.description == list_presets()[name]
    assert policy.name == ARGUMENT.get(name, name)
    assert policy == load_policy(policy.name)
    assert set(policy.axes) <= set(AXES)


@pytest.mark.parametrize("name", list(list_presets()))
def test_no_preset_makes_a_message_larger(name: str) -> None:
    policy = load_policy(ARGUMENT.get(name, name))
    for axis in AXES:
        for op in OPS:
            for dtype in _DTYPES.values():
                assert shrinks(policy.axis(axis).codec(op, "unknown", dtype, BIG), dtype)


def at(policy: Policy, axis: str, op: str, dtype: torch.dtype = torch.float32) -> str:
    return str(policy.axis(axis).codec(op, "unknown", dtype, BIG))


def test_none_compresses_nothing() -> None:
    policy = load_policy("none")
    assert {at(policy, axis, op) for axis in AXES for op in OPS} == {"none"}


def test_naive_zfp_has_one_rate_everywhere_and_a_16_bit_form() -> None:
    for rate, half in ((8, 8), (16, 12), (24, 12)):
        policy = load_policy(f"naive-zfp:{rate}")
        assert {at(policy, axis, op) for axis in AXES for op in OPS} == {f"zfp:rate={rate}"}
        assert {at(policy, axis, op, torch.bfloat16) for axis in AXES for op in OPS} == {f"zfp:rate={half}"}


def test_hybrids_are_the_papers() -> None:
    mz, z = load_policy("mzhybrid"), load_policy("zhybrid")
    assert at(mz, "dp", "reduce_scatter") == at(z, "dp", "all_reduce") == "zfp:rate=8"
    for axis in ("tp", "pp", "zero"):
        assert parse(at(mz, axis, "all_gather")) == parse("mpc:dim=1")
        assert at(z, axis, "all_gather") == "zfp:rate=16"
    assert at(load_policy("zhybrid:24"), "tp", "all_reduce") == "zfp:rate=24"
    assert at(load_policy("mzhybrid:16"), "dp", "all_reduce") == "zfp:rate=16"
    assert mz.axis("dp").algorithm == "ring"


def test_balanced_feeds_errors_back_and_leaves_tp_alone() -> None:
    # vllm 19094, vllm 45666
    policy = load_policy("balanced")
    assert policy.axis("dp").feedback
    assert policy.axis("dp").algorithm == "two_shot"
    assert policy.axis("zero").difference
    assert all(policy.axis("tp").codecs.get(op, ByDtype()).float32 == NONE for op in OPS)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("balansed", "unknown policy 'balansed'; did you mean 'balanced'"),
        ("balanced:8", "balanced takes no rate"),
        ("naive-zfp", "needs a rate in bits per value, for instance naive-zfp:8"),
        ("naive-zfp:3", "from 4 to 31, found '3'"),
        ("naive-zfp:32", "from 4 to 31, found '32'"),
        ("zhybrid:x", "found 'x'"),
        ("zhybrid:", "found ''"),
    ],
)
def test_wrong_names(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        preset(spec)


def test_load_takes_names_files_and_policies(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[axis.tp]\nall = "bf16"\n')
    assert load_policy(path) == load_policy(str(path))
    policy = load_policy("balanced")
    assert load_policy(policy) is policy

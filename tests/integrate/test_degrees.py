"""Degrees: what nests, what does not, and the table of memory and traffic that they stand for."""

from __future__ import annotations

import pytest

from thinwire import Sharding, ShardingDegrees, list_shardings, sharding
from thinwire.errors import LayoutError, SpecError


def test_text_and_tables_give_degrees() -> None:
    expected = ShardingDegrees(2, 4, 8)
    assert ShardingDegrees.parse("optim=8, params=2,grads=4") == expected
    assert ShardingDegrees.parse(str(expected)) == expected
    assert ShardingDegrees.from_table({"params": 2, "grads": 4, "optim": 8}) == expected
    with_copy = ShardingDegrees(8, 8, 8, secondary=2)
    assert ShardingDegrees.parse(str(with_copy)) == with_copy


@pytest.mark.parametrize("text", ["params", "params=x", "params=2,params=4", "weights=2", "params=-1"])
def test_bad_text(text: str) -> None:
    with pytest.raises(LayoutError):
        ShardingDegrees.parse(text)


@pytest.mark.parametrize(
    ("degrees", "per_host", "message"),
    [
        ({"params": 2, "grads": 1, "optim": 8}, 2, "params=2 does not divide grads=1"),
        ({"params": 2, "grads": 3, "optim": 8}, 2, "params=2 does not divide grads=3"),
        ({"grads": 4, "optim": 2}, 2, "grads=4 does not divide optim=2"),
        ({"optim": 3}, 2, "optim=3 does not divide ranks=8"),
        ({"params": 0}, 2, "params=0 must be at least 1"),
        ({"params": 8, "grads": 8, "optim": 8, "secondary": 3}, 2, "secondary=3 does not divide params=8"),
        (
            {"params": 8, "grads": 8, "optim": 8, "secondary": 4},
            2,
            "secondary=4 is not inside a host, which has 2",
        ),
    ],
)
def test_degrees_that_do_not_fit_are_named(degrees: dict[str, int], per_host: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ShardingDegrees(**degrees).check(8, per_host)


def test_messages_go_inside_hosts_first_where_hosts_nest() -> None:
    assert ShardingDegrees(8, 8, 8).levels(8, 2) == [1, 2, 8]
    assert ShardingDegrees(2, 8, 64).levels(64, 8) == [1, 2, 8, 64]
    assert ShardingDegrees(3, 3, 3).levels(6, 2) == [1, 3, 6]
    # Copies of the optimizer's state are reduced in one go.
    assert ShardingDegrees(1, 1, 1).levels(8, 2) == [1, 8]


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 8), (1, 8, 8), (8, 8, 8), (2, 8, 64), (1, 8, 64)])
def test_the_table(degrees: tuple[int, int, int]) -> None:
    d = ShardingDegrees(*degrees)
    p, g, o = degrees
    w, n = 2e9, 64
    assert d.memory_nbytes(1e9) == {"params": w / p, "grads": w / g, "optim": 12e9 / o, "secondary": 0.0}
    assert d.micro_batch_nbytes(w) == {"gather": 2 * w * (1 - 1 / p), "reduce": w * (1 - 1 / g)}
    assert d.step_nbytes(w, n) == {
        "reduce": (w / g) * (1 - g / o),
        "replicas": 2 * (w / o) * (1 - o / n),
        "gather": (w / p) * (1 - p / o),
    }


def test_zeropp_halves_the_gathers_between_hosts() -> None:
    d = ShardingDegrees(64, 64, 64, secondary=8)
    assert d.micro_batch_nbytes(1.0)["gather"] == 63 / 64 + 7 / 8
    assert d.memory_nbytes(1e9)["secondary"] == 2e9 / 8


def test_schemes_are_degrees_and_policies() -> None:
    found = {name: sharding(name, 64, 8) for name in list_shardings()}
    assert str(found["zero1"].degrees) == "params=1,grads=1,optim=64"
    assert str(found["zero2"].degrees) == "params=1,grads=64,optim=64"
    assert str(found["zero3"].degrees) == "params=64,grads=64,optim=64"
    assert str(found["hsdp"].degrees) == "params=8,grads=8,optim=8"
    assert str(found["frontier"].degrees) == "params=2,grads=8,optim=64"
    assert str(found["zeropp"].degrees) == "params=64,grads=64,optim=64,secondary=8"
    assert str(found["sdp4"].degrees) == "params=8,grads=64,optim=64"
    assert found["sdp4"].policy.axis("zero").difference
    assert sharding("zero3:bf16", 8, 2).inside.name == "bf16"
    own = Sharding.of({"params": 2, "grads": 4, "optim": 8}, "bf16", "none")
    assert own.degrees == ShardingDegrees(2, 4, 8)


def test_unknown_schemes_and_ranks_that_do_not_fit() -> None:
    with pytest.raises(SpecError, match="zeropp"):
        sharding("zerop", 8)
    with pytest.raises(LayoutError, match="frontier"):
        sharding("frontier", 4)

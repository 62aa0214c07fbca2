from __future__ import annotations

import tomllib
from typing import Any

import pytest

from thinwire.errors import LayoutError, SpecError
from thinwire.lab.net import Topology


def test_ranks_are_contiguous_on_hosts() -> None:
    topology = Topology(hosts=3, ranks_per_host=(2, 0, 1))
    assert topology.world == 3
    assert topology.host_of_rank == (0, 0, 2)
    assert Topology(hosts=2, ranks_per_host=2).host_of_rank == (0, 0, 1, 1)


def test_the_slowest_link_of_a_path_counts() -> None:
    topology = Topology(hosts=4, rate=("1gbit", "800mbit", "none", "none"), groups=(2, 2), uplink="100mbit")
    assert topology.group_of_host == (0, 0, 1, 1)
    assert topology.path_bit_s(0, 1) == 800_000_000
    assert topology.path_bit_s(0, 2) == 100_000_000
    assert topology.path_bit_s(2, 3) is None
    assert topology.path_bit_s(0, 0) is None


def test_from_a_toml_table() -> None:
    text = """
    hosts = 3
    ranks_per_host = [2, 2, 4]
    rate = "200mbit"
    groups = [2, 1]
    uplink = "50mbit"
    latency_s = 0.001
    """
    topology = Topology.from_table(tomllib.loads(text))
    assert topology == Topology(3, (2, 2, 4), "200mbit", (2, 1), "50mbit", 0.001)
    assert Topology.from_table(topology.describe()) == topology


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"hosts": 0}, LayoutError),
        ({"hosts": 251}, LayoutError),
        ({"hosts": 2, "ranks_per_host": (1,)}, LayoutError),
        ({"hosts": 2, "ranks_per_host": (1, -1)}, LayoutError),
        ({"hosts": 2, "ranks_per_host": 0}, LayoutError),
        ({"hosts": 2, "rate": ("1gbit",)}, LayoutError),
        ({"hosts": 2, "rate": "quick"}, SpecError),
        ({"hosts": 3, "groups": (1, 1)}, LayoutError),
        ({"hosts": 3, "groups": (3, 0)}, LayoutError),
        ({"hosts": 2, "uplink": "1gbit"}, LayoutError),
        ({"hosts": 2, "latency_s": -1.0}, LayoutError),
        ({"hosts": 2, "latency_s": float("nan")}, LayoutError),
    ],
)
def test_numbers_that_do_not_fit_are_refused(fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Topology(**fields)


@pytest.mark.parametrize(("table", "text"), [({"host": 2}, "hosts"), ({"hosts": "two"}, "wrong type")])
def test_a_wrong_table_is_named(table: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        Topology.from_table(table)

"""Topologies: what climbs from steward to steward comes to everyone once, whatever the tree; files and their errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.collectives.topology import Topology, from_dict, from_toml
from thinwire.errors import LayoutError, SpecError

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)
RACKS = st.fixed_dictionaries({host: st.sampled_from("xy") for host in "abcd"})


@settings(max_examples=60, deadline=None)
@given(HOSTS, RACKS, st.booleans())
def test_every_value_comes_to_its_rank_once(hosts: list[str], racks: dict[str, str], three: bool) -> None:
    places = tuple((racks[host], host) if three else (host,) for host in hosts)
    topology = Topology(places, ("rack", "inter", "intra") if three else ("inter", "intra"))
    size = topology.size
    held = {rank: {d: {rank} for d in range(size)} for rank in range(size)}
    steps = [topology.steps(rank) for rank in range(size)]
    assert len({len(own) for own in steps}) == 1, "all ranks wait equally often"
    for level in range(len(steps[0])):
        given_away = {(rank, to, d) for rank in range(size) for to, d in steps[rank][level].gives}
        taken, after = set(), {rank: {} for rank in range(size)}
        for rank in range(size):
            for d, sources in steps[rank][level].takes:
                parts = [held[source][d] for source in sources]
                after[rank][d] = set().union(*parts)
                assert sum(map(len, parts)) == len(after[rank][d]), "nothing is added twice"
                taken |= {(source, rank, d) for source in sources if source != rank}
        assert given_away == taken
        for source, to, _ in taken:
            assert topology.level_between(source, to) == steps[to][level].level
        held = after
    assert held == {rank: {rank: set(range(size))} for rank in range(size)}


def test_a_value_crosses_a_hosts_link_once() -> None:
    # Hosts of 1, 3 and 2 ranks: for each rank elsewhere, one rank of the host gives.
    topology = Topology.of_hosts("abbbcc")
    for host in ((0,), (1, 2, 3), (4, 5)):
        gives = sorted(d for rank in host for _, d in topology.steps(rank)[1].gives)
        assert gives == [d for d in range(6) if d not in host]


def test_what_it_says_of_itself() -> None:
    topology = Topology.of_hosts("aabb")
    assert topology.layered
    assert topology.outermost == "inter"
    one = topology.of([0, 1])
    assert not one.layered
    assert one.outermost == "intra"
    assert Topology.of_hosts("abcd").outermost == "inter"
    assert Topology.of_hosts("a").steps(0) == ()
    assert [topology.level_between(0, rank) for rank in range(4)] == ["intra", "intra", "inter", "inter"]


def test_sizes_grow_with_the_world_not_faster() -> None:
    for size in (16, 64):
        topology = Topology.of_hosts([str(rank // 8) for rank in range(size)])
        gives = [to for step in topology.steps(9) for to, _ in step.gives]
        assert len(gives) == size - 1
        assert len(set(gives)) == 7 + size // 8 - 1, "peers: of the host, and one on each other host"


FILE = """
levels = ["rack", "inter", "intra"]
[host.a]
ranks = [0, 2]
within = ["r1"]
[host.b]
ranks = [1]
within = ["r2"]
"""


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(FILE)
    assert from_toml(path, 3) == Topology((("r1", "a"), ("r2", "b"), ("r1", "a")), ("rack", "inter", "intra"))


@pytest.mark.parametrize(
    ("table", "size", "error", "text"),
    [
        (
            {"host": {"a": {"ranks": [0]}}},
            2,
            LayoutError,
            r"2 ranks, 1 in \[host.*ranks \[1\] are on no host",
        ),
        ({"host": {"a": {"ranks": [0, 5]}}}, 1, LayoutError, r"ranks \[5\] do not exist"),
        (
            {"host": {"a": {"ranks": [0]}, "b": {"ranks": [0]}}},
            1,
            LayoutError,
            "rank 0 is on host a and on host b",
        ),
        ({"host": {"a": {"rank": [0]}}}, 1, SpecError, "host.a: unknown key 'rank'"),
        ({"host": {"a": {"ranks": 0}}}, 1, SpecError, "host.a.ranks: a list of ranks is needed, found 0"),
        ({"levels": ["intra"], "host": {"a": {"ranks": [0]}}}, 1, LayoutError, "two names or more"),
        (
            {"host": {"a": {"ranks": [0], "within": ["r"]}}},
            1,
            LayoutError,
            r"rank 0 is at \('r', 'a'\): levels inter, intra need 1",
        ),
    ],
)
def test_wrong_files(table: dict[str, object], size: int, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        from_dict(table, size)


def test_levels_that_do_not_nest() -> None:
    places = (("r1", "a"), ("r2", "a"))
    with pytest.raises(LayoutError, match="a of rank 0 is in r1, that of rank 1 in r2"):
        Topology(places, ("rack", "inter", "intra"))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        from_toml(tmp_path / "no.toml", 2)
    (tmp_path / "bad.toml").write_text("[")
    with pytest.raises(SpecError, match=r"bad\.toml"):
        from_toml(tmp_path / "bad.toml", 2)

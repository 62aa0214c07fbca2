"""Groups that know their hosts: what they find, what a file may say, what is refused; and every op in levels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support import TIMEOUT_S, gaussian, same
from thinwire import CallOptions, GroupOptions, Policy, ThinwireGroup, parse
from thinwire.collectives.choice import Crossover, measured
from thinwire.collectives.topology import Topology
from thinwire.errors import LayoutError, MismatchError, PolicyError, SpecError
from thinwire.launch import run_ranks
from thinwire.machine import network
from thinwire.policy import AxisPolicy, from_dict

pytestmark = pytest.mark.usefixtures("kernels")
WORLD, N = 4, 1200
HOSTS = "aabb"
FILE = """
[host.a]
ranks = [0, 1]
[host.b]
ranks = [2, 3]
"""


def policy(codec: str, levels: dict[str, Any] | None = None, **settings: Any) -> Policy:
    tables = {f"dp@{level}": table for level, table in (levels or {}).items()}
    return from_dict({"axis": {"dp": {"all": codec, "min_nbytes": 0, **settings}, **tables}}, "test")


LEVELS = policy("exponent", {"intra": {"all": "mpc:dim=1"}})


def new_group(chosen: Policy, **options: Any) -> ThinwireGroup:
    made = dist.new_group(backend="thinwire", pg_options=GroupOptions(policy=chosen, **options))
    assert isinstance(made, ThinwireGroup)
    return made


def refused(error: type[Exception], make: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        make()
    return str(caught.value)


def _groups(rank: int, world: int, folder: Path, report: Any) -> dict[str, str]:
    plain, host = dist.group.WORLD, HOSTS[rank]
    found = new_group(LEVELS, host=host)
    assert found.topology == Topology.of_hosts(HOSTS)
    assert new_group(LEVELS).topology == Topology.of_hosts([network()] * world), "all on this machine"
    told = new_group(LEVELS, host=host, hosts=str(folder / "hosts.toml"))
    assert told.topology == Topology.of_hosts(HOSTS)
    part = dist.new_group(
        [1, 2, 3], backend="thinwire", pg_options=GroupOptions(LEVELS, hosts=Topology.of_hosts(HOSTS))
    )
    if rank > 0:
        assert part.topology == Topology.of_hosts("abb"), "ranks of the default group, not of this one"
    assert new_group(policy("int8:block=32")).topology is None, "nobody asks"

    for group in (found, told):
        x = gaussian(rank, N)
        total, expected = x.clone(), x.clone()
        dist.all_reduce(total, group=group)
        dist.all_reduce(expected, group=plain)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
        outs = torch.empty(world * N), torch.empty(world * N)
        for out, g in zip(outs, (group, plain), strict=True):
            dist.all_gather_single(out, x, group=g)
        assert same(*outs)
        shares = torch.empty(N // world), torch.empty(N // world)
        for share, g in zip(shares, (group, plain), strict=True):
            dist.reduce_scatter_single(share, x, group=g)
        torch.testing.assert_close(*shares, rtol=1e-6, atol=1e-6)
        sent = [(p + rank) % 3 for p in range(world)]
        received = [(rank + p) % 3 for p in range(world)]
        swapped = torch.empty(sum(received) * 10), torch.empty(sum(received) * 10)
        for out, g in zip(swapped, (group, plain), strict=True):
            dist.all_to_all_single(
                out,
                gaussian(rank, sum(sent) * 10),
                [10 * n for n in received],
                [10 * n for n in sent],
                group=g,
            )
        assert same(*swapped)
    sums = [m for m in found.traffic.entries() if m.op == "all_reduce"]
    assert [m.codec for m in sums] == [str(parse("exponent"))], "the slowest level's"

    errors = {
        "level": refused(
            PolicyError, lambda: new_group(policy("bf16", {"rack": {"all": "bf16"}}), host=host)
        ),
        "inner only": refused(
            PolicyError, lambda: new_group(policy("none", {"intra": {"all": "bf16"}}), host=host)
        ),
        "file": refused(
            LayoutError, lambda: new_group(LEVELS, host="aaab"[rank], hosts=str(folder / "hosts.toml"))
        ),
        "short": refused(LayoutError, lambda: new_group(LEVELS, hosts=str(folder / "short.toml"))),
        "one rank": refused(
            LayoutError,
            lambda: new_group(
                LEVELS, host=host, hosts=str(folder / ("short" if rank == 2 else "hosts")) + ".toml"
            ),
        ),
        "others": refused(
            MismatchError, lambda: new_group(LEVELS, hosts=Topology.of_hosts(HOSTS if rank else "abbb"))
        ),
    }
    after = torch.ones(N)
    dist.all_reduce(after, group=found)
    assert same(after, torch.full((N,), float(world))), "nobody is left behind"
    return errors


def test_groups_find_their_hosts_and_refuse_what_does_not_fit_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(FILE)
    (tmp_path / "short.toml").write_text("[host.a]\nranks = [0, 1, 2]\n")
    ranks = run_ranks(_groups, WORLD, tmp_path, timeout=TIMEOUT_S)
    for errors in ranks:
        assert "policy test, axis dp: no level 'rack'" in errors["level"]
        assert "inter, intra" in errors["level"]
        assert "level intra has {float32=bf16" in errors["inner only"]
        assert "for all_reduce, level inter none: name a codec for it, too" in errors["inner only"]
        assert (
            "ranks 0 and 2 are on two hosts, but rank 0 found itself on a and rank 2 on a" in errors["file"]
        )
        assert "ranks [3] are on no host" in errors["short"]
        assert errors["one rank"].startswith("rank 2: topology file")
        assert "rank 0: levels inter, intra: a b b b" in errors["others"]
        assert "rank 3: levels inter, intra: a a b b" in errors["others"]


# Policies.


def test_levels_in_a_policy() -> None:
    dp = policy("int4:block=32", {"intra": {"reduce": "int8:block=32"}}, feedback=True).axis("dp")
    assert dp.algorithm == "hierarchical", "a level asks for it"
    assert dp.level_codecs("all_reduce", torch.float32) == (("intra", parse("int8:block=32")),)
    assert dp.level_codecs("all_gather", torch.float32) == ()
    two, one, each = (Topology.of_hosts(hosts) for hosts in ("aabb", "aaaa", "abcd"))
    for topology, reduced, gathered in (
        (two, "int4:block=32", "int4:block=32"),
        (one, "int8:block=32", "none"),
        (each, "int4:block=32", "int4:block=32"),
        (None, "int4:block=32", "int4:block=32"),
    ):
        for op, expected in (("all_reduce", reduced), ("all_gather", gathered)):
            assert dp.codec(op, "unknown", torch.float32, 1 << 20, topology) == parse(expected), (
                topology,
                op,
            )
    auto = policy("int4:block=32", algorithm="auto").axis("dp")
    assert auto.codec("all_reduce", "unknown", torch.float32, 1 << 20, one) == parse("int4:block=32")
    assert "@intra.all_reduce=int8:block=32" in str(
        policy("int4:block=32", {"intra": {"reduce": "int8:block=32"}})
    )


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        (
            {"dp@intra": {"all": "bf16"}, "dp": {"algorithm": "ring"}},
            "levels intra need algorithm = hierarchical or auto",
        ),
        ({"dp@": {"all": "bf16"}}, "a level's name must follow the @"),
        ({"pd@intra": {"all": "bf16"}}, "unknown key 'pd'"),
        ({"dp@intra": {"feedback": True}}, "dp@intra: unknown key 'feedback'"),
        ({"dp@inter": {"reduce": "topk"}}, "topk needs error feedback"),
    ],
)
def test_levels_that_are_refused(tables: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        from_dict({"axis": tables}, "test")


# The choice by size.


def test_auto_goes_by_size_ranks_and_topology() -> None:
    table = Crossover(flat={4: 1000, 16: 100}, layered={8: 500})
    two = Topology.of_hosts("aaaabbbb")
    for op, nbytes, size, topology, expected in (
        ("all_reduce", 1000, 4, None, "recursive_doubling"),
        ("all_reduce", 1001, 4, None, "two_shot"),
        ("all_reduce", 1000, 15, None, "recursive_doubling"),
        ("all_reduce", 1000, 16, None, "two_shot"),
        ("all_reduce", 10, 2, None, "two_shot"),
        ("all_reduce", 500, 8, two, "recursive_doubling"),
        ("all_reduce", 501, 8, two, "hierarchical"),
        ("all_gather", 1, 8, two, "hierarchical"),
        ("reduce_scatter", 1, 8, None, "two_shot"),
        ("all_reduce", 1000, 8, Topology.of_hosts("a" * 8), "recursive_doubling"),
    ):
        assert table.algorithm(op, nbytes, size, topology) == expected, (op, nbytes, size)


def test_the_table_comes_with_the_package_and_is_used_where_it_is_asked_for() -> None:
    assert isinstance(measured(), Crossover)
    assert AxisPolicy().algorithm == CallOptions().algorithm == "two_shot", (
        "nothing is chosen unless asked for"
    )

"""The benchmark of collectives: conventions, plans, rows, tables and figures; and runs of two ranks on the loopback."""

from __future__ import annotations

import importlib
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from rich.console import Console
from torch import Tensor

from support import inputs
from thinwire.codecs import parse
from thinwire.codecs.cast import Bf16Codec
from thinwire.collectives.traffic import gloo_nbytes, raw_nbytes
from thinwire.errors import LayoutError, MismatchError, UnsupportedError
from thinwire.lab.bench.collective import OPS, Plan, contenders, run
from thinwire.lab.bench.collective.figures import headline, time_against_size, write_figures
from thinwire.lab.bench.collective.measure import Measured
from thinwire.lab.bench.collective.plan import PLAIN, of_codec
from thinwire.lab.bench.collective.rows import Row, broken_promises, row_of
from thinwire.lab.bench.collective.run import own_link_bit_s
from thinwire.lab.bench.collective.table import WIDTH, table
from thinwire.lab.cluster import Cluster, cluster
from thinwire.lab.commands import command
from thinwire.lab.net import Topology

SPEC = "int8:block=32"


def no_progress(done: int, total: int, text: str) -> None:
    pass


def row(contender: str, nbytes: int, us: float, link_us: float | None = None, op: str = "all_reduce") -> Row:
    return Row(op, nbytes, contender, contender, us, us, 1.0, 1.5, 1.5, nbytes / 2, 2.0, 1e-3, link_us)


# Conventions.


@pytest.mark.parametrize("world", [2, 4, 7])
def test_bus_factors_are_those_of_nccl_tests(world: int) -> None:
    share = (world - 1) / world
    factors = {"all_reduce": 2 * share, "broadcast": 1.0, "send_recv": 1.0}
    assert {name: op.bus_factor(world) for name, op in OPS.items()} == {
        name: pytest.approx(factors.get(name, share)) for name in OPS
    }


def test_sizes_are_what_ranks_can_share() -> None:
    op = OPS["all_to_all"]
    assert op.numel(1024, 4, 4) == 256
    assert op.numel(1024, 4, 3) == 255
    assert op.numel(4, 4, 8) == 8


def test_the_link_of_a_broadcast_carries_all_of_it() -> None:
    counted = raw_nbytes("broadcast", 1000, 4)
    assert OPS["broadcast"].link_nbytes(counted, 4) == pytest.approx(1000)
    assert OPS["broadcast"].link_nbytes(0, 1) == 0
    assert OPS["all_gather"].link_nbytes(750, 4) == 750


def test_exact_results() -> None:
    xs = [x.double() for x in inputs(3, 6)]
    exact = {name: [op.exact(xs.__getitem__, rank, 3) for rank in range(3)] for name, op in OPS.items()}
    total = xs[0] + xs[1] + xs[2]
    for rank in range(3):
        part = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(exact["all_reduce"][rank], total)
        assert torch.equal(exact["reduce_scatter"][rank], total[part])
        assert torch.equal(exact["all_gather"][rank], torch.cat(xs))
        assert torch.equal(exact["broadcast"][rank], xs[0])
        assert torch.equal(exact["all_to_all"][rank], torch.cat([x[part] for x in xs]))
        assert torch.equal(exact["send_recv"][rank], xs[rank - 1])


# Plans.


def test_contenders_begin_with_the_baselines() -> None:
    names = [c.name for c in contenders([("int4", parse("int4")), ("none", parse("none"))], (), "fp32")]
    assert names == ["plain", "plain bf16", "none", "int4"]
    names = [c.name for c in contenders([], ("naive-zfp:8",), "bf16", control=True)]
    assert names == ["plain", "control", "none", "naive-zfp:8"]
    names = [c.name for c in contenders([], (), "fp32", gloo=True)]
    assert names == ["plain", "plain bf16", "gloo", "gloo bf16", "none"]


def test_contenders_take_turns() -> None:
    plan = Plan(contenders([("int4", parse("int4"))], (), "fp32"), ("all_reduce",), (1024,), 2)
    turns = [[c.name for c in plan.turn(repeat)] for repeat in range(-1, 4)]
    assert [turn[0] for turn in turns] == ["int4", "plain", "plain bf16", "none", "int4"]
    assert all(sorted(turn) == sorted(turns[0]) for turn in turns)


def test_plans_that_cannot_run() -> None:
    twice = contenders([("bf16", parse("bf16"))], ("bf16",), "fp32")
    with pytest.raises(UnsupportedError, match="named twice: bf16"):
        Plan(twice, ("all_reduce",), (1024,), 2)
    with pytest.raises(UnsupportedError, match="two ranks or more"):
        Plan((PLAIN,), ("send_recv",), (1024,), 1)


def test_a_link_is_a_ranks_own_only_if_its_host_is() -> None:
    def places(topology: Topology) -> Cluster:
        return Cluster(topology, "netns", "", None, None)

    assert own_link_bit_s(places(Topology(4, 1, rate="200mbit"))) == 200_000_000
    assert own_link_bit_s(places(Topology(2, 2, rate="200mbit"))) is None
    with cluster(2, 1, "none") as here:
        assert own_link_bit_s(here) is None


# Rows.


def test_a_row_is_the_slowest_ranks_median() -> None:
    ranks = [
        Measured("all_reduce", 1000, "int4", seconds, 150.0, "int4", 3.0, 100.0)
        for seconds in ([1e-3, 9e-3, 2e-3], [4e-3, 3e-3, 0.0])
    ]
    found = row_of(ranks, 8_000_000)
    assert found.us == pytest.approx(3000)
    assert found.mean_us == pytest.approx(2500)
    assert found.alg_mb_s == pytest.approx(1000 / 3e-3 / 1e6)
    assert found.bus_mb_s == found.effective_mb_s == found.alg_mb_s  # 2 (n - 1) / n = 1 for two ranks
    assert found.ratio == pytest.approx(1000 / 150)
    assert found.rel_l2 == pytest.approx((6 / 200) ** 0.5)
    assert found.link_us == pytest.approx(150)
    assert found.x_link == pytest.approx(20)
    assert row_of(ranks, None).x_link is None


def test_one_rank_sends_nothing() -> None:
    found = row_of([Measured("all_gather", 1000, "none", [1e-3])], None)
    assert (found.ratio, found.rel_l2, found.bus_mb_s) == (None, 0.0, 0.0)


def test_digests_tell_what_is_broken() -> None:
    def ranks(op: str, *digests: tuple[str, str]) -> list[Measured]:
        return [Measured(op, 64, "int4", digests=pair) for pair in digests]

    assert broken_promises(ranks("all_reduce", ("a", "a"), ("a", "a"))) == []
    assert broken_promises(ranks("reduce_scatter", ("a", "a"), ("b", "b"))) == []
    (differ,) = broken_promises(ranks("all_reduce", ("a", "a"), ("b", "b")))
    assert differ == "all_reduce of 64 bytes with int4: rank(s) [1] ended with other bits than rank 0"
    (changed,) = broken_promises(ranks("send_recv", ("a", "a"), ("b", "c")))
    assert "a repeat with the same input gave other bits on rank(s) [1]" in changed


# Tables and figures.


def test_table_shows_every_row_and_the_link_only_where_there_is_one() -> None:
    rows = [
        row("plain", 65536, 400.0, 200.0),
        row("int4", 65536, 100.0, 80.0),
        row("plain", 1 << 20, 4e3, 3e3),
    ]
    out = io.StringIO()
    Console(file=out, width=WIDTH).print(table(rows))
    text = out.getvalue()
    assert "64 KiB" in text
    assert "1 MiB" in text
    assert "0.25" in text  # int4 against plain
    assert "1.25" in text  # and against its bytes on the link
    assert "…" not in text
    out = io.StringIO()
    Console(file=out, width=WIDTH).print(table([replace(r, link_us=None) for r in rows]))
    assert "x link" not in out.getvalue()


def test_headline_compares_with_the_fastest_baseline() -> None:
    rows = [row("plain", 64, 1.0), row("plain", 4096, 40.0), row("none", 4096, 30.0), row("int4", 4096, 10.0)]
    assert headline(rows) == "all_reduce of 4 KiB: int4 is 3.0 times as fast as none, the fastest baseline"
    assert headline(rows[:3]) == "all_reduce of 4 KiB: none takes 0.75 times as long as plain"
    assert "no codec is faster than none" in headline([*rows[:3], row("int4", 4096, 29.9)])


def test_figures_draw_a_line_and_a_bound_for_each_contender(tmp_path: Path) -> None:
    rows = [
        row(n, size, size * f, size / 4) for n, f in (("plain", 2.0), ("int4", 1.0)) for size in (1024, 4096)
    ]
    (axes,) = time_against_size(rows, "2 ranks").axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [line.get_linestyle() for line in axes.get_lines()].count(":") == 2
    assert axes.get_ylabel() == "time of a call (ms)"
    paths = write_figures(
        [*rows, *(row(n, 64, 1.0, op="broadcast") for n in ("plain", "none"))], "2 ranks", tmp_path
    )
    assert [path.name for path in paths] == ["all_reduce.png", "broadcast.png"]
    assert all(path.stat().st_size for path in paths)


# Runs.


@dataclass(frozen=True)
class RankCodec(Bf16Codec):
    """Breaks the promises on purpose: what it decodes depends on the rank, and on how often it was called."""

    name: ClassVar[str] = "rank"
    calls: ClassVar[int] = 0

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        super()._decode(payload, out)
        type(self).calls += 1
        out += self.calls if dist.get_rank() else 0


@pytest.mark.usefixtures("kernels")
def test_rows_of_two_ranks() -> None:
    named = contenders([(SPEC, parse(SPEC)), ("mpc", parse("mpc"))], (), "fp32")
    plan = Plan(named, tuple(OPS), (1 << 10, 1 << 14), 2, warmup=1, repeats=2, calls=2, check=True)
    with cluster(2, 1, "none") as places:
        rows, broken = run(plan, places, no_progress)
    assert broken == []
    assert len(rows) == len(OPS) * 2 * 5
    for found in rows:
        assert found.us >= found.mean_us > 0
        op = "send" if found.op == "send_recv" else found.op
        match found.contender:
            case "plain" | "none":
                assert found.wire_bytes == gloo_nbytes(op, found.nbytes, 2)
                assert found.sent_as == "pass-through"
                assert found.rel_l2 < 1e-7  # half an ulp of a sum
            case "plain bf16":
                assert found.wire_bytes == gloo_nbytes(op, found.nbytes // 2, 2)
                assert 1e-4 < found.rel_l2 < 2**-8
            case "mpc":
                assert found.rel_l2 < 1e-7
            case _:
                assert found.sent_as == str(parse(SPEC))
                # 32 values become 36 bytes; a frame has a header of 32 bytes, a message one or two frames.
                payload = raw_nbytes(op, found.nbytes, 2) * 36 / 128
                assert payload < found.wire_bytes <= payload + 2 * 32
                assert 1e-3 < found.rel_l2 < 2e-2


def test_check_finds_a_codec_that_breaks_its_promises() -> None:
    plan = Plan(
        (PLAIN, of_codec(RankCodec(), "rank")),
        ("all_gather",),
        (1 << 10,),
        2,
        warmup=0,
        repeats=1,
        check=True,
    )
    with cluster(2, 1, "none") as places:
        _, broken = run(plan, places, no_progress)
    assert [text.partition(":")[2] for text in broken] == [
        " a repeat with the same input gave other bits on rank(s) [1]",
        " rank(s) [1] ended with other bits than rank 0",
    ]


@pytest.mark.usefixtures("kernels")
def test_command_writes_rows_and_figures(tmp_path: Path) -> None:
    arguments = [
        "bench",
        "collective",
        "--op",
        "all_gather",
        "--codec",
        "int4",
        "--size",
        "4KiB",
        "--ranks",
        "2",
    ]
    options = ["--repeats", "1", "--dtype", "bf16", "--control", "--check", "--out", str(tmp_path)]
    done = CliRunner().invoke(command, [*arguments, *options], catch_exceptions=False)
    assert done.exit_code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert [r["contender"] for r in result["rows"]] == ["plain", "control", "none", "int4"]
    assert (result["dtype"], result["ranks"], result["broken_promises"]) == ("bf16", 2, [])
    assert result["link"]["emulation"] == "none"
    assert (tmp_path / "all_gather.png").exists()


def test_the_command_fails_where_a_promise_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package has the command under the name of its module.
    module = importlib.import_module("thinwire.lab.commands.bench.collective")
    monkeypatch.setattr(module, "run", lambda *_: ([row("plain", 64, 1.0)], ["int4: other bits"]))
    with pytest.raises(MismatchError, match="--check: int4: other bits"):
        CliRunner().invoke(
            command, ["bench", "collective", "--op", "all_reduce", "--codec", "none"], catch_exceptions=False
        )


@pytest.mark.parametrize("options", [("--hosts", "2"), ("--rate", "200mbit")])
def test_hosts_and_rate_go_together(options: tuple[str, ...]) -> None:
    with pytest.raises(LayoutError, match="give both or neither"):
        CliRunner().invoke(command, ["bench", "collective", *options], catch_exceptions=False)


def test_a_range_of_sizes_that_is_empty() -> None:
    done = CliRunner().invoke(command, ["bench", "collective", "--min", "1MiB", "--max", "64KiB"])
    assert done.exit_code == 2
    assert "--min is larger than --max" in done.output

"""``thinwire bench collective``: time, bytes and error of collectives."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console

from ....codecs import parse
from ....collectives.options import Algorithm
from ....errors import LayoutError, MismatchError
from ...bench.collective import OPS, Plan, contenders, describe, run
from ...bench.collective.crossover import DOUBLING, limit, write
from ...bench.record import command_line, environment, write_json
from ...cluster import cluster
from ...dtypes import DTYPES
from ...mpirun import Mpirun
from ...net import parse_rate
from ...report import text
from ..options import compile_kernels
from ..progress import steps_progress
from ..sizes import size

_CODECS = ("none", "bf16", "int8", "int4", "exponent", "zfp:rate=8")


@click.command()
@click.option(
    "--op",
    "ops",
    type=click.Choice(list(OPS)),
    multiple=True,
    default=tuple(OPS),
    show_default=True,
    help="May be repeated. send_recv: every rank to the next one, both ways at once.",
)
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    metavar="SPEC",
    help=f"On all messages, may be repeated. Default, without --policy: {', '.join(_CODECS)}.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="A preset or TOML file, for a data-parallel group; may be repeated.",
)
@click.option(
    "--algorithm",
    "algorithms",
    type=click.Choice(get_args(Algorithm)),
    multiple=True,
    default=("two_shot",),
    show_default=True,
    help="Of each codec, may be repeated; an op without a form of it runs two_shot.",
)
@click.option("--size", "sizes", type=size, multiple=True, help="Size of the message, may be repeated.")
@click.option(
    "--min", "least", type=size, default="1KiB", show_default=True, help="Without --size: the smallest, ..."
)
@click.option(
    "--max", "most", type=size, default="64MiB", show_default=True, help="... times 4, up to this one."
)
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), default="fp32", show_default=True)
@click.option("--ranks", type=click.IntRange(1), help="Default: 4, or --hosts times --ranks-per-host.")
@click.option("--ranks-per-host", type=click.IntRange(1), help="Instead of --ranks.")
@click.option(
    "--hosts",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Emulated hosts, with --rate (needs root). One: the ranks talk over the loopback.",
)
@click.option(
    "--rate", default="none", show_default=True, metavar="RATE", help="Of each host's link, e.g. 200mbit."
)
@click.option(
    "--transport",
    type=click.Choice(["gloo", "mpi"]),
    default="gloo",
    show_default=True,
    help="mpi: ranks started by mpirun; plain are then MPI's own blocking collectives, through mpi4py.",
)
@click.option(
    "--mpirun",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Open MPI's or MPICH's. Default: that of this environment, else the first on the path.",
)
@click.option(
    "--warmup", type=click.IntRange(0), default=2, show_default=True, help="Samples that do not count."
)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True, help="Samples that count.")
@click.option(
    "--calls",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Calls in a sample, one after the other; its time is their mean.",
)
@click.option("--control", is_flag=True, help="A second plain group: how far it is from the first is noise.")
@click.option(
    "--gloo", is_flag=True, help="With --transport mpi: torch.distributed over gloo among the contenders."
)
@click.option(
    "--check", is_flag=True, help="All ranks end with the same bits, repeats give the same bits: or error."
)
@click.option(
    "--crossover",
    "table_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measure all_reduce with every algorithm by size, and put into this TOML file up to which size recursive doubling "
    "is the fastest: what algorithm = auto goes by. One --codec, sizes from --min to --max.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for result.json and a figure for each op."
)
def collective(
    ops: tuple[str, ...],
    codecs: tuple[str, ...],
    policies: tuple[str, ...],
    algorithms: tuple[Algorithm, ...],
    sizes: tuple[int, ...],
    least: int,
    most: int,
    dtype: str,
    ranks: int | None,
    ranks_per_host: int | None,
    hosts: int,
    rate: str,
    transport: str,
    mpirun: Path | None,
    warmup: int,
    repeats: int,
    calls: int,
    control: bool,
    gloo: bool,
    check: bool,
    table_path: Path | None,
    out: Path | None,
) -> None:
    """Time, bandwidth, wire bytes and error of collectives, by message size, for several codecs in turns.

    Always among them: plain (torch.distributed over gloo, or MPI itself), plain bf16 (cast, plain, cast back) and none (a
    thinwire group that compresses nothing). Sizes, algorithm and bus bandwidth as nccl-tests define them; time is the
    slowest rank's median; wire bytes are counted at the transport. x link: time over (wire bytes / link rate), where every
    rank has a host of its own.
    """
    if (hosts > 1) != (parse_rate(rate) is not None):
        raise LayoutError(
            f"--hosts {hosts} --rate {rate}: two hosts or more need a rate, and one host has no link; give both or neither"
        )
    if ranks is not None and ranks_per_host is not None:
        raise LayoutError(f"--ranks {ranks} --ranks-per-host {ranks_per_host}: give one of them")
    ranks = ranks or (4 if ranks_per_host is None else hosts * ranks_per_host)
    layered = 1 < hosts < ranks
    if table_path is not None:
        codecs, ops = (codecs or ("int8",))[:1], ("all_reduce",)
        algorithms = ("two_shot", DOUBLING, *(("hierarchical",) if layered else ()))
    chosen = codecs or (() if policies else _CODECS)
    named = contenders([(spec, parse(spec)) for spec in chosen], policies, dtype, control, gloo, algorithms)
    plan = Plan(
        named, ops, sizes or _powers(least, most), ranks, dtype, warmup, repeats, calls, check, transport
    )
    if mpirun is not None and transport != "mpi":
        raise LayoutError(f"--mpirun {mpirun} is for --transport mpi")
    if gloo and transport != "mpi":
        raise LayoutError("--gloo is for --transport mpi; without it plain is gloo")
    starter = Mpirun.find(None if mpirun is None else str(mpirun)) if transport == "mpi" else None
    console = Console(stderr=True)
    load = os.getloadavg()[0]
    compile_kernels(console, [c.policy for c in named if c.policy is not None])
    with cluster(ranks, hosts, rate, mpirun=starter) as places:
        console.print(f"network: {places.emulation}. {places.note}")
        with steps_progress(console) as update:
            rows, broken = run(plan, places, update)
        record: dict[str, Any] = {
            "environment": environment(),
            "command": command_line(),
            "load_average_before": load,
            **describe(plan, places),
            "broken_promises": broken,
            "rows": [{**dataclasses.asdict(row), "x_link": row.x_link} for row in rows],
        }
    # Analysis needs matplotlib: not for --help.
    from ...bench.collective.figures import write_figures
    from ...bench.collective.table import WIDTH, table

    shown = Console(width=max(Console().width, WIDTH))
    for op in ops:
        shown.print(table([row for row in rows if row.op == op]))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "result.json", record)
        link = f"{hosts} hosts, {text.rate(parse_rate(rate))} links" if hosts > 1 else "loopback"
        paths = write_figures(
            rows, f"{ranks} ranks, {dtype}, {starter.kind if starter is not None else 'gloo'}, {link}", out
        )
        click.echo(f"wrote {out}/result.json, {', '.join(path.name for path in paths)}")
    if table_path is not None:
        where = f"{record['environment']['cpu']}, {record['environment']['cores']} cores, {ranks} ranks, "
        where += f"{hosts} hosts at {rate}" if hosts > 1 else "loopback"
        nbytes = limit(rows, codecs[0], "hierarchical" if layered else "two_shot", dtype)
        kind: dict[str, str | int] = {
            "kind": "layered" if layered else "flat",
            "ranks": ranks,
            "nbytes": nbytes,
        }
        told = {"date": record["environment"]["date"], "where": where, "command": record["command"]}
        write(table_path, kind | told)
        click.echo(f"wrote {table_path}: recursive doubling up to {text.nbytes(nbytes)} encoded")
    if broken:
        raise MismatchError("--check: " + "; ".join(broken))


def _powers(least: int, most: int) -> tuple[int, ...]:
    """least, 4 * least, ... up to most."""
    sizes = []
    while least <= most:
        sizes.append(least)
        least *= 4
    if not sizes:
        raise click.UsageError("--min is larger than --max")
    return tuple(sizes)

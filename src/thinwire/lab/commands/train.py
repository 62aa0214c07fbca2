"""``thinwire train``: one run under one policy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from ...errors import LayoutError
from ...mpi.library import launched_size
from ...presets import load
from ..cluster import cluster
from ..mpirun.here import Ranks
from ..train.run import Job, train_rank
from ..train.sharded import sharding_of
from .options import compile_kernels, ranks_per_host, run_options, shown, train_config
from .progress import steps_progress

_LIMIT_S = 30 * 24 * 3600.0
_OF_THE_NETWORK = ("hosts", "link", "latency_ms", "paced")


@click.command()
@run_options
@click.option(
    "--policy",
    default="balanced",
    show_default=True,
    help="A preset, a TOML file, or a sharding scheme (zeropp, zero3:bf16).",
)
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for log and checkpoints.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="DIR",
              help="Go on, bit for bit, from the latest checkpoint of this folder.")  # fmt: skip
@click.option("--transport", type=click.Choice(["gloo", "mpi"]), default="gloo", show_default=True,
              help="mpi: mpirun has started the ranks: mpirun -n 8 thinwire train --transport mpi ...")  # fmt: skip
def train(
    policy: str,
    steps: int,
    seed: int,
    out: Path,
    resume: Path | None,
    transport: str,
    hosts: int,
    link: str,
    latency_ms: float,
    paced: bool,
    **settings: Any,
) -> None:
    """Train a GPT on several ranks under one policy; show loss, speed and bytes sent."""
    _check_start(transport)
    console = Console(stderr=True)
    config = train_config(steps=steps, seed=seed, **settings)
    scheme = sharding_of(policy, config.degrees, config.layout, ranks_per_host(config, hosts))
    policies = [load(policy)] if scheme is None else list(scheme.policies())
    folder = (
        None if resume is None else resume / "checkpoints" if (resume / "checkpoints").exists() else resume
    )
    job = Job(config, policy, str(out), None if folder is None else str(folder))

    def run(places: Any, network: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        console.print(f"[bold]{network}[/bold]: {shown(config)}")
        with steps_progress(console) as update:

            def on_message(rank: int, message: tuple[str, dict[str, Any]]) -> None:
                record = message[1]
                text = f"loss {record['loss']:.4f}  {1e3 * record['seconds']:.0f} ms/step"
                update(record["step"], steps, text)

            results = places.run(train_rank, job, places.wiring, timeout=_LIMIT_S, on_message=on_message)
        _show(console, results[0])
        click.echo(f"log and checkpoints in {out}")

    if transport == "mpi":
        with Ranks(config.layout.world) as ranks:
            ranks.one_by_one(lambda: compile_kernels(console, policies))
            if ranks.first:
                run(ranks, f"{config.layout.world} ranks over {ranks.library}, policy {policy}")
            else:
                out.mkdir(parents=True, exist_ok=True)
                ranks.run(train_rank, job, ranks.wiring)
        return
    compile_kernels(console, policies)
    with cluster(config.layout.world, hosts, link, latency_s=latency_ms / 1e3, paced=paced) as places:
        run(places, f"{places.world} ranks on {hosts} hosts, link {link}, policy {policy}; {places.note}")


def _check_start(transport: str) -> None:
    """Whether mpirun has started this process must fit what was asked for."""
    told = launched_size(os.environ)
    if transport == "gloo" and told is not None and told[0] > 1:
        raise LayoutError(
            f"{told[1]} has started {told[0]} processes, and each would start ranks of its own; add --transport mpi, or "
            "leave out mpirun"
        )
    context = click.get_current_context()
    given = [n for n in _OF_THE_NETWORK if context.get_parameter_source(n) is ParameterSource.COMMANDLINE]
    if transport == "mpi" and given:
        raise LayoutError(
            f"--{given[0].replace('_', '-')} emulates a network, but with --transport mpi the ranks are where mpirun "
            "has put them; leave it out"
        )


def _show(console: Console, summary: dict[str, Any]) -> None:
    table = Table(title=f"Sent by rank 0 in {summary['steps']} steps, MB")
    for name in ("axis", "raw", "wire", "ratio"):
        table.add_column(name, justify="left" if name == "axis" else "right")
    for axis, sums in summary["traffic"].items():
        raw, wire = sums["raw_bytes"] / 1e6, sums["wire_bytes"] / 1e6
        table.add_row(axis, f"{raw:.1f}", f"{wire:.1f}", f"{raw / wire:.2f}" if wire else "-")
    console.print(table)
    if summary["val_loss"] is not None:
        console.print(f"validation loss {summary['val_loss']:.4f} nats per token")

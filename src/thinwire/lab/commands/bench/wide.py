"""``thinwire bench wide``: many ranks on this machine."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ....codecs import warm_up
from ....errors import MismatchError
from ...bench.record import command_line, environment, write_json
from ...bench.wide import WideResult, preset_codecs, run_wide
from ..sizes import size

_RANKS = (2, 8, 32, 64)


@click.command()
@click.option("--ranks", type=click.IntRange(2), multiple=True, default=_RANKS, show_default=True)
@click.option("--codec", "codecs", multiple=True, metavar="SPEC", help="Default: all that presets name.")
@click.option("--size", "nbytes", type=size, default="256KiB", show_default=True, help="Of an fp32 message.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for result.json.")
def wide(ranks: tuple[int, ...], codecs: tuple[str, ...], nbytes: int, out: Path | None) -> None:
    """Every collective and algorithm with every codec of the presets, over up to 64 ranks of this machine.

    Ranks are forked from one process that holds torch and the kernels. Reports the error of each case by number of ranks,
    and what a rank takes: seconds to make a group, threads, sockets, memory. Ends with an error if ranks that should have
    the same bits have others.
    """
    console = Console(stderr=True)
    chosen = codecs or tuple(preset_codecs())
    with console.status("Preparing codec kernels ..."):
        warm_up(chosen)
    results: list[WideResult] = []
    for world in ranks:
        with console.status("") as status:
            results.append(run_wide(world, nbytes // 4, chosen, status.update))
    shown = Table(title="A rank of a group with codecs: the largest of all ranks", box=None)
    for title in ("ranks", "set-up s", "threads", "sockets", "memory MiB", "of it before", "ranks differ"):
        shown.add_column(title, justify="right")
    for r in results:
        cells = [r.ranks, f"{r.setup_s:.2f}", r.after.threads, r.after.sockets, f"{r.after.memory_mib:.0f}"]
        shown.add_row(*map(str, cells), f"{r.before.memory_mib:.0f}", ", ".join(r.differ) or "nowhere")
    Console().print(shown)
    errors = Table(title="Relative L2 error", box=None)
    for title in ("case", *(f"{r.ranks} ranks" for r in results)):
        errors.add_column(title, justify="left" if title == "case" else "right")
    for name in results[0].errors:
        errors.add_row(name, *(f"{r.errors[name]:.1e}" for r in results))
    Console().print(errors)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(), "command": command_line(), "nbytes": nbytes}
        write_json(out / "result.json", {**record, "results": [r.as_dict() for r in results]})
        click.echo(f"wrote {out}/result.json")
    if any(r.differ for r in results):
        raise MismatchError("; ".join(f"{r.ranks} ranks: {', '.join(r.differ)}" for r in results if r.differ))

"""``thinwire bench``: measurements that are published as they come out."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from rich.console import Console
from rich.table import Table

from ...codecs import parse, warm_up
from ..bench.record import command_line, environment, write_json
from .codecs import SHOWN
from .options import train_config

if TYPE_CHECKING:
    from ..bench.codec import CodecRow

_STEPS = 300
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}


@click.group()
def bench() -> None:
    """Measure codecs, and the messages of a training run."""


def _bytes(text: str) -> int:
    for unit, factor in _UNITS.items():
        number = text.removesuffix(unit)
        if number != text and number.isdigit():
            return int(number) * factor
    raise click.BadParameter(f"{text!r} is not a size such as 64KiB or 16MiB")


@bench.command()
@click.argument("specs", nargs=-1)
@click.option("--size", "sizes", multiple=True, default=("4KiB", "64KiB", "1MiB", "16MiB"), show_default=True,
              help="Size of the tensor, may be repeated; the last one is drawn.")  # fmt: skip
@click.option("--dtype", "dtypes", type=click.Choice(sorted(_DTYPES)), multiple=True, default=("fp32", "bf16"),
              show_default=True)  # fmt: skip
@click.option("--threads", type=click.IntRange(1), multiple=True, default=(1,), show_default=True,
              help="Threads, may be repeated; each codes a part of the tensor.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
@click.option("--peers/--no-peers", default=True, show_default=True,
              help="Also what is installed of zfpy, zstandard, blosc2, zipnn, pcodec.")  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder for result.json and speed.png."
)
def codec(
    specs: tuple[str, ...],
    sizes: tuple[str, ...],
    dtypes: tuple[str, ...],
    threads: tuple[int, ...],
    repeats: int,
    peers: bool,
    out: Path,
) -> None:
    """Ratio, error and speed of codecs by dtype and size, beside a plain copy and other libraries.

    SPECS: codecs to measure. Default: one of each.
    """
    from ..bench.codec import measure, measure_peer, sample, table
    from ..bench.codec_figure import speed_against_ratio
    from ..bench.peers import installed_peers

    chosen = [parse(spec) for spec in specs or SHOWN]
    numbers = [_bytes(size) for size in sizes]
    others = installed_peers() if peers else []
    console = Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    with console.status("Compiling kernels ..."):
        warm_up(chosen)
    rows = []
    for dtype, nbytes, count in itertools.product(dtypes, numbers, threads):
        click.echo(f"{dtype}, {nbytes >> 10} KiB, {count} thread(s)", err=True)
        numel = nbytes // _DTYPES[dtype].itemsize
        x = sample(-(-numel // 1024), 1024).reshape(-1)[:numel].to(_DTYPES[dtype])
        fitting = [c for c in chosen if x.dtype in c.dtypes]
        rows += [measure(c, x, repeats, count) for c in fitting]
        rows += [measure(c, x, repeats, count, stream=True) for c in fitting if c.stateful]
        if count == 1:
            rows += [measure_peer(peer, x, repeats) for peer in others if x.dtype in peer.dtypes]
    host = environment()
    result = {"environment": host, "command": command_line(), "repeats": repeats}
    write_json(out / "result.json", {**result, "rows": [dataclasses.asdict(row) for row in rows]})
    drawn = [row for row in rows if (row.dtype, row.nbytes, row.threads) == _key(rows, numbers[-1])]
    speed_against_ratio(drawn, [peer.name for peer in others], host["cpu"]).savefig(out / "speed.png")
    Console().print(table(drawn))
    click.echo(f"wrote {out}/result.json and speed.png")


def _key(rows: list[CodecRow], nbytes: int) -> tuple[str, int, int]:
    """What is drawn: the first dtype and number of threads, at one size."""
    return rows[0].dtype, nbytes, rows[0].threads


@bench.command()
@click.option("--model", default="lab", show_default=True, metavar="PRESET", help="Size of the GPT.")
@click.option("--steps", type=click.IntRange(6), default=_STEPS, show_default=True, help="Steps of each run.")
@click.option("--precision", "precisions", type=click.Choice(["fp32", "bf16"]), multiple=True,
              default=("fp32", "bf16"), show_default=True)  # fmt: skip
@click.option("--data", multiple=True, type=click.Path(path_type=Path), metavar="PATH",
              help="Text file or folder, may be repeated. Default: the sources of Python's library.")  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder for result.json and figures."
)
def messages(model: str, steps: int, precisions: tuple[str, ...], data: tuple[Path, ...], out: Path) -> None:
    """Capture the messages of the reference trainer and measure how far they compress.

    Trains with dp=2 tp=2 pp=2 and ZeRO-1 on eight ranks of this machine, and once more in one process for the
    gradients of whole weights. Writes, for each role at the start, in the middle and late in training: entropy
    bounds, the ratio of lossless codecs, the error of lossy ones at their bits per value; and the singular values of
    gradients.
    """
    # Analysis needs matplotlib and the trainer: not for --help.
    from ..bench.messages import capture, measure_roles, measure_spectra
    from ..bench.messages.figures import write_figures
    from ..bench.messages.measure import LOSSLESS, LOSSY

    console = Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    records, spectra = [], []
    with console.status("Compiling kernels ..."):
        warm_up([*LOSSLESS, *LOSSY])
    for precision in precisions:
        config = train_config(
            layout="dp=2,tp=2,pp=2", zero=1, model=model, batch=8, micro_batch=2, schedule="1f1b",
            precision=precision, lr=1e-3, data=data, tokens="byte", steps=steps,
        )  # fmt: skip
        with console.status(f"Training in {precision}, {steps} steps on eight ranks and on one ..."):
            found = capture(config, out / "state")
        with console.status(f"Measuring the messages of {precision} ..."):
            records += measure_roles(found.messages, precision)
            spectra += measure_spectra(found.gradients, precision)
    write_json(
        out / "result.json",
        {
            "environment": environment(),
            "command": command_line(),
            "model": model,
            "steps": steps,
            "records": [dataclasses.asdict(record) for record in records],
            "spectra": [dataclasses.asdict(spectrum) for spectrum in spectra],
        },
    )
    write_figures(records, spectra, out)
    table = Table(title="Lossless ratio late in training, and its bound")
    for name in ("precision", "role", "dtype", "bound", *LOSSLESS):
        table.add_column(name, justify="left" if name in ("precision", "role", "dtype") else "right")
    for r in records:
        if r.phase == "late":
            ratios = [f"{r.codecs[c].ratio:.3f}" for c in LOSSLESS]
            table.add_row(r.precision, r.role, r.dtype, f"{r.exponent_bound:.3f}", *ratios)
    Console().print(table)
    click.echo(f"wrote {out}/result.json, ratios.png, errors.png, spectra.png")

"""``thinwire bench messages``: how far the messages of a training run compress."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ....codecs import warm_up
from ...bench.record import command_line, environment, write_json
from ..options import train_config

_STEPS = 300


@click.command()
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
    from ...bench.messages import capture, measure_roles, measure_spectra
    from ...bench.messages.figures import write_figures
    from ...bench.messages.measure import LOSSLESS, LOSSY

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
        # After each precision: the next takes as long again.
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

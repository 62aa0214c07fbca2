"""``thinwire codecs``: what there is, and what it does to a sample."""

from __future__ import annotations

import click
from rich.console import Console

from ...codecs import parse
from ..bench.codec import measure, sample, table

_SHOWN = (
    "none", "bf16", "fp16", "int8", "int4", "int4:round=stochastic", "zfp:rate=8", "zfp:rate=12", "zfp:rate=16",
    "zfp:rate=24", "mpc:dim=1",
)  # fmt: skip


@click.command()
@click.argument("specs", nargs=-1)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
def codecs(specs: tuple[str, ...], repeats: int) -> None:
    """List codecs with ratio, error and speed on a sample tensor, beside a plain copy.

    SPECS: codecs to measure, e.g. int4:block=64. Default: those that the presets use, and a few more.
    """
    chosen = [parse(spec) for spec in specs or _SHOWN]
    x = sample()
    console = Console()
    with console.status("Measuring ..."):
        rows = [measure(codec, x, repeats) for codec in chosen]
    console.print(table(rows))

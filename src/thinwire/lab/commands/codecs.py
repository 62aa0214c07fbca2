"""``thinwire codecs``: what there is, and what it does to a sample."""

from __future__ import annotations

import click
from rich.console import Console

from ...codecs import LowRank, parse
from ..bench.codec import measure, sample, table

SHOWN = (
    "none", "bf16", "fp16", "int8", "int6", "int5", "int4", "int4:round=stochastic", "hadamard|int4", "int4|huffman", "int3",
    "int2",
    "fp8", "mxfp8", "mxfp4", "nvfp4", "e3m0", "sign", "topk", "zfp:rate=8", "zfp:rate=12", "zfp:rate=16", "zfp:rate=24",
    "bounded:rel=0.001", "mpc:dim=1", "exponent",
)  # fmt: skip


@click.command()
@click.argument("specs", nargs=-1)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
def codecs(specs: tuple[str, ...], repeats: int) -> None:
    """List codecs with ratio, error and speed on a sample tensor, beside a plain copy.

    SPECS: codecs to measure, e.g. int4:block=64. Default: one of each.
    """
    chosen = [parse(spec) for spec in specs or SHOWN]
    x = sample()
    console = Console()
    with console.status("Measuring ..."):
        rows = [measure(codec, x, repeats) for codec in chosen]
    console.print(table(rows))
    if not specs:
        console.print(
            f"For gradients, in policies only: {LowRank()} (PowerSGD, two rounds, with feedback = true)"
        )

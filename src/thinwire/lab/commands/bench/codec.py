"""``thinwire bench codec``: ratio, error and speed of codecs."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from ....codecs import parse, warm_up
from ...bench.record import command_line, environment, write_json
from ...dtypes import DTYPES
from ..codecs import SHOWN
from ..sizes import size

if TYPE_CHECKING:
    from ...bench.codec import CodecRow


@click.command()
@click.argument("specs", nargs=-1)
@click.option("--size", "sizes", type=size, multiple=True, default=("4KiB", "64KiB", "1MiB", "16MiB"), show_default=True,
              help="Size of the tensor, may be repeated; the last one is drawn.")  # fmt: skip
@click.option("--dtype", "dtypes", type=click.Choice(sorted(DTYPES)), multiple=True, default=("fp32", "bf16"),
              show_default=True)  # fmt: skip
@click.option("--threads", type=click.IntRange(1), multiple=True, default=(1,), show_default=True,
              help="Threads, may be repeated; each codes a part of the tensor.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
@click.option("--peers/--no-peers", default=True, show_default=True,
              help="Also what is installed of zfpy, zstandard, blosc2, zipnn, pcodec.")  # fmt: skip
@click.option(
    "--gaussian", is_flag=True, help="Values of one size instead of rows whose scales differ by up to 100."
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder for result.json and speed.png."
)
def codec(
    specs: tuple[str, ...],
    sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    threads: tuple[int, ...],
    repeats: int,
    peers: bool,
    gaussian: bool,
    out: Path,
) -> None:
    """Ratio, error and speed of codecs by dtype and size, beside a plain copy and other libraries.

    SPECS: codecs to measure. Default: one of each.
    """
    from ...bench.codec import measure_peer, measure_threads, sample, table
    from ...bench.codec_figure import speed_against_ratio
    from ...bench.peers import installed_peers

    chosen = [parse(spec) for spec in specs or SHOWN]
    others = installed_peers() if peers else []
    console = Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    with console.status("Compiling kernels ..."):
        warm_up(chosen)
    host = environment()
    result = {"environment": host, "command": command_line(), "repeats": repeats}
    rows = []
    for dtype, nbytes in itertools.product(dtypes, sizes):
        click.echo(f"{dtype}, {nbytes >> 10} KiB", err=True)
        numel = nbytes // DTYPES[dtype].itemsize
        x = (
            sample(-(-numel // 1024), 1024, decades=0 if gaussian else 2)
            .reshape(-1)[:numel]
            .to(DTYPES[dtype])
        )
        fitting = [c for c in chosen if x.dtype in c.dtypes]
        for one, stream in [*((c, False) for c in fitting), *((c, True) for c in fitting if c.stateful)]:
            rows += measure_threads(one, x, repeats, threads, stream=stream)
        if 1 in threads:
            rows += [measure_peer(peer, x, repeats) for peer in others if x.dtype in peer.dtypes]
        # After each case: large ones take minutes.
        write_json(out / "result.json", {**result, "rows": [dataclasses.asdict(row) for row in rows]})
    drawn = [row for row in rows if (row.dtype, row.nbytes, row.threads) == _key(rows, sizes[-1])]
    speed_against_ratio(drawn, [peer.name for peer in others], host["cpu"]).savefig(out / "speed.png")
    Console().print(table(drawn))
    click.echo(f"wrote {out}/result.json and speed.png")


def _key(rows: list[CodecRow], nbytes: int) -> tuple[str, int, int]:
    """What is drawn: the first dtype and number of threads, at one size."""
    return rows[0].dtype, nbytes, rows[0].threads

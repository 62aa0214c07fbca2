"""A codec and another library in turns, on the same values, in one thread; ``bench codec`` has one after the other.

    python bench/in_turns.py exponent zipnn --dtype bf16 --size 1MiB --size 16MiB --out results/DATE_TOPIC

Medians over repeats, and the median of the ratios of neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from thinwire.codecs import Codec, parse
from thinwire.lab.bench.codec import again, in_turns, sample
from thinwire.lab.bench.peers import Peer, installed_peers
from thinwire.lab.bench.record import command_line, environment, write_json
from thinwire.lab.commands.sizes import size
from thinwire.lab.dtypes import DTYPES


@click.command()
@click.argument("spec")
@click.argument("peer")
@click.option("--size", "sizes", type=size, multiple=True, default=("1MiB", "16MiB"), show_default=True)
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), default="bf16", show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=41, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for result.json.")
def main(spec: str, peer: str, sizes: tuple[int, ...], dtype: str, repeats: int, out: Path) -> None:
    """Time SPEC and PEER (as ``bench codec`` calls it) on Gaussian values, of one size and of rows of different sizes."""
    codec = parse(spec)
    other = next(found for found in installed_peers() if found.name == peer)
    rows = []
    for decades, nbytes in itertools.product((0, 2), sizes):
        values = sample(nbytes // DTYPES[dtype].itemsize // 1024, 1024, decades=decades)
        row = {"dtype": dtype, "nbytes": nbytes, "decades": decades}
        row |= compare(codec, other, values.reshape(-1).to(DTYPES[dtype]), repeats)
        rows.append(row)
        click.echo("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    out.mkdir(parents=True, exist_ok=True)
    head = {"environment": environment(), "command": command_line(), "codec": str(codec), "peer": peer}
    write_json(out / "result.json", {**head, "repeats": repeats, "rows": rows})


def compare(codec: Codec, other: Peer, x: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Ratios, speeds, and how many times as fast as the other library the codec is."""
    room = torch.empty(codec.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    payload, back = room[: codec.encode(x, room)].clone(), torch.empty_like(x)
    state, coded = codec.new_state(), other.encode(x)
    codec.encode(x, room, state=state)
    works: dict[str, Callable[[torch.Tensor], object]] = {
        "encode": lambda x: codec.encode(x, room),
        "encode_in_stream": lambda x: codec.encode(x, room, state=state),
        "peer_encode": other.encode,
        "decode": lambda _: codec.decode(payload, back),
        "peer_decode": lambda x: other.decode(coded, x),
    }
    seconds = dict(
        zip(works, in_turns([partial(again, work, x) for work in works.values()], repeats), strict=True)
    )
    row: dict[str, Any] = {"ratio": x.nbytes / payload.numel(), "peer_ratio": x.nbytes / len(coded)}
    row |= {f"{name}_gb_s": x.nbytes / median(s) / 1e9 for name, s in seconds.items()}
    for name in ("encode", "encode_in_stream", "decode"):
        theirs = seconds["peer_decode" if name == "decode" else "peer_encode"]
        row[f"{name}_times_peer"] = median(b / a for a, b in zip(seconds[name], theirs, strict=True))
    return row


if __name__ == "__main__":
    main()

"""A codec and another library in turns, on the same values, in one thread; ``bench codec`` has one after the other.

    python bench/in_turns.py exponent zipnn --dtype bf16 --size 1MiB --size 16MiB --out results/DATE_TOPIC

Each sample lasts a few milliseconds; medians over repeats, and the median of the ratios of neighbours.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from thinwire.codecs import Codec, parse
from thinwire.lab.bench.codec import sample
from thinwire.lab.bench.peers import Peer, installed_peers
from thinwire.lab.bench.record import command_line, environment, write_json
from thinwire.lab.commands.sizes import size
from thinwire.lab.dtypes import DTYPES

LEAST_S = 4e-3


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
    torch.set_num_threads(1)
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
    seconds = in_turns(
        {
            "encode": lambda: codec.encode(x, room),
            "encode_in_stream": lambda: codec.encode(x, room, state=state),
            "peer_encode": lambda: other.encode(x),
            "decode": lambda: codec.decode(payload, back),
            "peer_decode": lambda: other.decode(coded, x),
        },
        repeats,
    )
    row: dict[str, Any] = {"ratio": x.nbytes / payload.numel(), "peer_ratio": x.nbytes / len(coded)}
    row |= {f"{name}_gb_s": x.nbytes / median(s) / 1e9 for name, s in seconds.items()}
    for name in ("encode", "encode_in_stream", "decode"):
        theirs = seconds["peer_decode" if name == "decode" else "peer_encode"]
        row[f"{name}_times_peer"] = median(b / a for a, b in zip(seconds[name], theirs, strict=True))
    return row


def in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, of all repeats."""
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, int(LEAST_S / seconds_of(call, 1)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            found[name].append(seconds_of(call, counts[name]))
    return found


def seconds_of(call: Callable[[], object], count: int) -> float:
    """Seconds of one of ``count`` calls."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


if __name__ == "__main__":
    main()

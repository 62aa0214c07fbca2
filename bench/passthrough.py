"""What a thinwire group costs when it compresses nothing, against plain gloo.

    python bench/passthrough.py --out results/DATE_passthrough

Ranks on the loopback, ops alternating between a plain gloo group and a thinwire group of policy ``none``. A sample is
the mean of several calls one after the other, so that how evenly the ranks leave the barrier before them matters little.
Two ranks by default: more than there are cores, and the machine's scheduler is measured. Writes result.json and prints a table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.integrate.mesh import init_mesh
from thinwire.lab.bench.record import command_line, environment, write_json
from thinwire.launch import run_ranks

SIZES = (1 << 20, 4 << 20, 16 << 20)
REPEATS = 61
CALLS = 8
"""Calls in a sample."""


def _call(op: str, group: dist.ProcessGroup, x: torch.Tensor, part: torch.Tensor) -> float:
    """Seconds of one call, a sample's mean."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        if op == "all_reduce":
            dist.all_reduce(x, group=group)
        elif op == "all_gather":
            group.all_gather_single(x, part).wait()
        elif op == "reduce_scatter":
            group.reduce_scatter_single(part, x, dist.ReduceScatterOptions()).wait()
        elif op == "broadcast":
            dist.broadcast(x, 0, group=group)
    return (time.perf_counter() - start) / CALLS


def measure(rank: int, world: int, report: Any) -> list[dict[str, Any]]:
    plain = dist.new_group(backend="gloo")
    ours = init_mesh({"dp": world}, "none").get_group("dp")
    rows = []
    for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        for nbytes in SIZES:
            x, part = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4 // world)
            pairs = []
            for repeat in range(REPEATS + 2):
                order = (plain, ours) if repeat % 2 else (ours, plain)
                seconds = {id(group): _call(op, group, x, part) for group in order}
                if repeat >= 2:
                    pairs.append((seconds[id(plain)], seconds[id(ours)]))
            rows.append(
                {
                    "op": op,
                    "nbytes": nbytes,
                    "plain_ms": 1e3 * statistics.median(a for a, _ in pairs),
                    "none_ms": 1e3 * statistics.median(b for _, b in pairs),
                    "ratio": statistics.median(b for _, b in pairs) / statistics.median(a for a, _ in pairs),
                    "ratio_pairwise": statistics.median(b / a for a, b in pairs),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    out: Path = arguments.out
    rows = run_ranks(measure, arguments.ranks, timeout=900)[0]
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "environment": environment(),
        "command": command_line(),
        "ranks": arguments.ranks,
        "samples": REPEATS,
        "calls_per_sample": CALLS,
        "rows": rows,
    }
    write_json(out / "result.json", record)
    print(f"{'op':<16}{'MiB':>6}{'plain ms':>12}{'none ms':>12}{'ratio':>9}{'pairwise':>10}")
    for row in rows:
        print(
            f"{row['op']:<16}{row['nbytes'] / 2**20:>6.0f}{row['plain_ms']:>12.2f}{row['none_ms']:>12.2f}"
            f"{row['ratio']:>9.3f}{row['ratio_pairwise']:>10.3f}"
        )


if __name__ == "__main__":
    main()

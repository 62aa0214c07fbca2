"""What a thinwire group costs when it compresses nothing, against plain gloo.

    python bench/passthrough.py --out results/DATE_passthrough

Ranks on the loopback, ops alternating between a plain gloo group and a thinwire group of policy ``none``. A sample is
the mean of several calls one after the other, so that how evenly the ranks leave the barrier before them matters little.
A second plain group takes part as a control: its ratio to the first says how much of a ratio is noise. Two ranks by
default: with more than there are cores, the scheduler is measured. Then the same of a single rank, which waits for nobody:
what a call costs in this process. Writes result.json and prints tables.
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
    groups = {
        "plain": dist.new_group(backend="gloo"),
        "control": dist.new_group(backend="gloo"),
        "none": init_mesh({"dp": world}, "none").get_group("dp"),
    }
    rows = []
    for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        for nbytes in SIZES:
            x, part = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4 // world)
            seconds: dict[str, list[float]] = {name: [] for name in groups}
            for repeat in range(REPEATS + 2):
                turn = list(groups.items())
                turn = turn[repeat % 3 :] + turn[: repeat % 3]
                for name, group in turn:
                    found = _call(op, group, x, part)
                    if repeat >= 2:
                        seconds[name].append(found)
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            rows.append(
                {
                    "op": op,
                    "nbytes": nbytes,
                    **{f"{name}_ms": 1e3 * median for name, median in medians.items()},
                    "ratio": medians["none"] / medians["plain"],
                    "control_ratio": medians["control"] / medians["plain"],
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
    alone = run_ranks(measure, 1, timeout=900)[0]
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "environment": environment(),
        "command": command_line(),
        "ranks": arguments.ranks,
        "samples": REPEATS,
        "calls_per_sample": CALLS,
        "rows": rows,
        "one_rank": alone,
    }
    write_json(out / "result.json", record)
    show(f"{arguments.ranks} ranks", rows)
    show("1 rank", alone)


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(title)
    print(
        f"{'op':<16}{'MiB':>6}{'plain ms':>12}{'control ms':>12}{'none ms':>12}{'control':>10}{'none':>9}{'us more':>9}"
    )
    for row in rows:
        times = "".join(f"{row[name + '_ms']:>12.3f}" for name in ("plain", "control", "none"))
        ratios = f"{row['control_ratio']:>10.3f}{row['ratio']:>9.3f}"
        more = 1e3 * (row["none_ms"] - row["plain_ms"])
        print(f"{row['op']:<16}{row['nbytes'] / 2**20:>6.0f}{times}{ratios}{more:>9.0f}")


if __name__ == "__main__":
    main()

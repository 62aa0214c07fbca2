"""Run the benchmark on a cluster and gather its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...cluster import Cluster
from .measure import Measured, measure_rank
from .plan import Plan
from .rows import Row, broken_promises, row_of

_LIMIT_S = 24 * 3600.0


def run(
    plan: Plan, places: Cluster, on_progress: Callable[[int, int, str], None]
) -> tuple[list[Row], list[str]]:
    """The rows, and what ``plan.check`` has found to be broken. on_progress(cases done, of, what is next)."""
    ranks: list[list[Measured]] = places.run(
        measure_rank, plan, timeout=_LIMIT_S, on_message=lambda _, message: on_progress(*message)
    )
    by_case = list(zip(*ranks, strict=True))
    bit_s = own_link_bit_s(places)
    rows = [row_of(case, bit_s) for case in by_case]
    return rows, [text for case in by_case for text in broken_promises(case)]


def own_link_bit_s(places: Cluster) -> int | None:
    """The rate of a rank's link. None without one, and where ranks share a host: part of their bytes never leaves it."""
    counts = places.topology.rank_counts
    rate: int | None = places.link()["rate_bit_s"]
    return rate if len(counts) > 1 and set(counts) == {1} else None


def describe(plan: Plan, places: Cluster) -> dict[str, Any]:
    """Plan and network as ``result.json`` holds them."""
    return {
        "ranks": plan.ranks,
        "transport": plan.transport,
        "mpirun": places.mpirun.kind if places.mpirun is not None else None,
        "dtype": plan.dtype,
        "warmup": plan.warmup,
        "repeats": plan.repeats,
        "calls": plan.calls,
        "checked": plan.check,
        "topology": places.topology.describe(),
        "link": places.link(),
        "calibration": places.calibration.describe() if places.calibration is not None else None,
    }

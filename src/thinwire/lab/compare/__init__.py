"""Schemes side by side in one run: the same seeds and data, alternating, on the same emulated network."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ..cluster import Cluster
from ..net.network import INTERFACE
from .plan import DEFAULT_POLICIES, Plan
from .rank import compare_rank
from .result import ResultFile, run_of
from .scheme import scheme

__all__ = ["DEFAULT_POLICIES", "Plan", "compare", "scheme"]

_LIMIT_S = 7 * 24 * 3600.0


def compare(plan: Plan, cluster: Cluster, out: Path, on_progress: Callable[[int, int, str], None]) -> Path:
    """Run what ``out/result.json`` does not hold yet and return its path.

    Can be interrupted and started again: finished runs stay, unfinished ones go on from their last checkpoint
    below ``out/state``. on_progress(steps done, of, what).
    """
    out.mkdir(parents=True, exist_ok=True)
    result = ResultFile(out / "result.json", plan, cluster)
    todo = result.todo(plan)
    state = out / "state"

    def on_message(rank: int, message: tuple[str, *tuple[object, ...]]) -> None:
        kind, *body = message
        if kind == "progress":
            on_progress(*body)  # type: ignore[arg-type]
        else:
            result.add(run_of(body[0], plan))  # type: ignore[arg-type]

    if todo:
        cluster.run(
            compare_rank,
            plan,
            todo,
            str(state),
            cluster.wiring,
            INTERFACE,
            timeout=_LIMIT_S,
            on_message=on_message,
        )
        shutil.rmtree(state, ignore_errors=True)
    result.write()
    return out / "result.json"

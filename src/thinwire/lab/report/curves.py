"""Loss curves of a result: one mean curve per policy, and paired differences to the uncompressed run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .parity import BASELINE
from .schema import Result, Run

Array = NDArray[np.float64]
_FEWEST_POINTS = 3


@dataclass(frozen=True)
class Curve:
    """Losses (nats) at steps; same length, at least one point."""

    steps: Array
    losses: Array

    @property
    def end(self) -> float:
        """The last finite loss; nan if there is none."""
        finite = self.losses[np.isfinite(self.losses)]
        return float(finite[-1]) if finite.size else float("nan")


@dataclass(frozen=True)
class Curves:
    """Mean curves over ``seeds``, those that all policies have (empty: there is none, each policy has its own).

    ``differences``: policy - baseline, the mean over the seeds both have; empty without a baseline.
    ``kind``: what was plotted, for an axis label.
    """

    kind: str
    seeds: tuple[int, ...]
    mean: dict[str, Curve]
    differences: dict[str, Curve]


def curves_of(result: Result) -> Curves | None:
    """Validation curves where every policy has one, else training loss, smoothed; None without either."""
    for kind, pick in (("validation loss", _validation), ("training loss", _training)):
        table = {policy: _by_seed(result.runs_of(policy), pick) for policy in result.policies}
        present = {policy: seeds for policy, seeds in table.items() if seeds}
        if present and (len(present) == len(table) or pick is _training):
            return _assemble(kind, present)
    return None


def _assemble(kind: str, table: dict[str, dict[int, Curve]]) -> Curves:
    shared = sorted(set.intersection(*(set(seeds) for seeds in table.values())))
    mean = {p: _mean([seeds[s] for s in (shared or seeds)]) for p, seeds in table.items()}
    differences = {}
    base = table.get(BASELINE, {})
    for policy, seeds in table.items():
        pairs = [_subtract(seeds[s], base[s]) for s in seeds if s in base]
        if policy != BASELINE and pairs:
            differences[policy] = _mean(pairs)
    return Curves(kind, tuple(shared), mean, {p: c for p, c in differences.items() if c.steps.size})


def _by_seed(runs: Iterable[Run], pick: Callable[[Run], Curve | None]) -> dict[int, Curve]:
    found: dict[int, list[Curve]] = {}
    for run in runs:
        curve = pick(run)
        if curve is not None:
            found.setdefault(run.seed, []).append(curve)
    return {seed: _mean(curves) for seed, curves in found.items()}


def _validation(run: Run) -> Curve | None:
    if len(run.val_curve) < _FEWEST_POINTS:
        return None
    steps, losses = zip(*run.val_curve, strict=True)
    return Curve(np.array(steps, float), np.array(losses, float))


def _training(run: Run) -> Curve | None:
    n = len(run.train_loss)
    if n < _FEWEST_POINTS:
        return None
    losses = np.array(run.train_loss, float)
    width = max(1, n // 25)
    smooth = np.array([losses[max(0, i - width + 1) : i + 1].mean() for i in range(n)])
    return Curve(np.arange(1, n + 1, dtype=float), smooth)


def _mean(curves: list[Curve]) -> Curve:
    """The mean at the steps that all curves have."""
    steps = curves[0].steps
    for curve in curves[1:]:
        steps = np.intersect1d(steps, curve.steps)
    return Curve(steps, np.mean([_at(curve, steps) for curve in curves], axis=0))


def _subtract(a: Curve, b: Curve) -> Curve:
    steps = np.intersect1d(a.steps, b.steps)
    return Curve(steps, _at(a, steps) - _at(b, steps))


def _at(curve: Curve, steps: Array) -> Array:
    return curve.losses[np.isin(curve.steps, steps)]

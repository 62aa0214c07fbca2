"""Loss parity: a paired, one-sided test that a policy does not raise the validation loss.

Policy and baseline are trained with the same seeds and data. The policy passes where the upper 95 % confidence
bound of the mean difference is at most the limit, over at least five seeds; with fewer it is "not tested".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .schema import LIMIT_NATS, MINIMUM_SEEDS, Parity, Result

BASELINE = "none"


def t_cdf(t: float, df: int) -> float:
    """Student's t distribution function for whole ``df`` >= 1 (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = df % 2
    term = cosine if odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(3 if odd else 2, df - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    both_sides = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return (1 + both_sides) / 2


def t_quantile(probability: float, df: int) -> float:
    """The t with ``t_cdf(t, df) == probability``, to about 1e-12 of its size. probability in [0.5, 1)."""
    if df < 1 or not 0.5 <= probability < 1:
        raise ValueError(
            f"probability {probability} with {df} degrees of freedom; need [0.5, 1) and at least 1"
        )
    low, high = 0.0, 1.0
    while t_cdf(high, df) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < probability else (low, middle)
    return (low + high) / 2


def paired_test(
    policy: str, baseline: str, differences: Sequence[float], limit: float = LIMIT_NATS
) -> Parity:
    """The test on ``differences`` (nats, policy - baseline, one per seed).

    upper_95 = mean + t(0.95, n - 1) * s / sqrt(n), s the sample's standard deviation. A difference that is not
    finite (the policy diverged) counts as infinitely large.
    """
    n = len(differences)
    if n == 0:
        return Parity(policy, baseline, 0, limit=limit)
    if not all(map(math.isfinite, differences)):
        return Parity(policy, baseline, n, math.inf, math.inf, limit)
    mean = statistics.fmean(differences)
    if n == 1:
        return Parity(policy, baseline, n, mean, None, limit)
    upper = mean + t_quantile(0.95, n - 1) * statistics.stdev(differences) / math.sqrt(n)
    return Parity(policy, baseline, n, mean, upper, limit, n >= MINIMUM_SEEDS and upper <= limit)


def paired_differences(result: Result, policy: str, baseline: str = BASELINE) -> dict[int, float]:
    """{seed: val_loss(policy) - val_loss(baseline)} over the seeds that both have; repeats of a seed are averaged.

    A seed whose baseline is not finite is left out: there is nothing to compare with.
    """
    ours, theirs = _loss_by_seed(result, policy), _loss_by_seed(result, baseline)
    return {s: ours[s] - theirs[s] for s in sorted(ours) if s in theirs and math.isfinite(theirs[s])}


def parity_of(result: Result, baseline: str = BASELINE) -> dict[str, Parity]:
    """{policy: test} for every policy but the baseline.

    Computed from the runs; a test recorded in the result is taken where it rests on more seeds than the runs.
    """
    recorded = {p.policy: p for p in result.parity if p.baseline == baseline}
    tests = {}
    for policy in result.policies:
        if policy == baseline:
            continue
        test = paired_test(policy, baseline, list(paired_differences(result, policy, baseline).values()))
        known = recorded.get(policy)
        tests[policy] = known if known is not None and known.seeds > test.seeds else test
    return tests


def _loss_by_seed(result: Result, policy: str) -> dict[int, float]:
    losses: dict[int, list[float]] = {}
    for run in result.runs_of(policy):
        if run.val_loss is not None:
            losses.setdefault(run.seed, []).append(run.val_loss)
    return {seed: statistics.fmean(values) for seed, values in losses.items()}

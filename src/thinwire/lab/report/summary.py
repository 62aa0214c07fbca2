"""One row per policy: medians over its runs for speed, means for bytes and loss, and the two references."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .parity import BASELINE, paired_differences, parity_of
from .schema import AXES, Breakdown, Parity, Result, Run

FP32_REFERENCES = ("none", "plain")  # our own uncompressed collectives, and the backend's plain ones
WIRE16_REFERENCES = ("bf16", "plain:bf16", "none:bf16")  # our cast, and PyTorch's over either of the above


def is_reference(policy: str) -> bool:
    """Whether it is there to be compared with: nothing compressed, a bf16 wire, or PyTorch's own hooks."""
    return policy.partition(":")[0] in ("none", "plain", "bf16")


@dataclass(frozen=True)
class Row:
    """A policy over all of its runs. Bytes are per rank and step; None where no run says."""

    policy: str
    description: str
    seeds: int
    samples_per_s: float
    speeds: tuple[float, ...]
    step_ms: float
    zero_comm_ms: float | None
    tflops_per_rank: float | None
    raw: dict[str, float]
    wire: dict[str, float]
    breakdown: Breakdown | None
    interface_bytes: float | None
    val_loss: float | None
    loss_difference: float | None
    parity: Parity | None

    @property
    def raw_total(self) -> float | None:
        return sum(self.raw.values()) if self.raw else None

    @property
    def wire_total(self) -> float | None:
        return sum(self.wire.values()) if self.wire else None

    @property
    def ratio(self) -> float | None:
        """Raw bytes / wire bytes."""
        return self.raw_total / self.wire_total if self.raw_total and self.wire_total else None

    @property
    def limit_share(self) -> float | None:
        """Speed as a share of the zero-communication speed: 1 - comm_share."""
        return self.zero_comm_ms / self.step_ms if self.zero_comm_ms else None


@dataclass(frozen=True)
class Summary:
    """Rows, fastest first; the references they are compared with, where the result has them."""

    rows: list[Row]
    fp32: Row | None
    """The faster of the uncompressed runs, `none` and `plain`."""
    bf16: Row | None
    """The fastest of the bf16 wires."""
    zero_comm_ms: float | None
    """Median over all runs."""

    def row(self, policy: str) -> Row:
        return next(row for row in self.rows if row.policy == policy)

    @property
    def featured(self) -> Row:
        """The policy that the report is about: `balanced`, else the fastest one at loss parity, else the fastest."""
        candidates = [row for row in self.rows if not is_reference(row.policy)] or self.rows
        named = [row for row in candidates if row.policy == "balanced"]
        at_parity = [row for row in candidates if row.parity is not None and row.parity.passes]
        return (named or at_parity or candidates)[0]


def summarise(result: Result) -> Summary:
    tests = parity_of(result)
    rows = [_row(result, policy, tests.get(policy)) for policy in result.policies]
    rows.sort(key=lambda row: -row.samples_per_s)
    uncompressed = [row for row in rows if row.policy in FP32_REFERENCES]
    return Summary(
        rows=rows,
        fp32=uncompressed[0] if uncompressed else None,
        bf16=next((row for row in rows if row.policy in WIRE16_REFERENCES), None),
        zero_comm_ms=_median(run.zero_comm_step_ms for run in result.runs),
    )


def _row(result: Result, policy: str, parity: Parity | None) -> Row:
    runs = result.runs_of(policy)
    differences = list(paired_differences(result, policy).values())
    difference = statistics.fmean(differences) if differences and policy != BASELINE else None
    if difference is not None and not math.isfinite(difference):
        difference = math.inf  # the policy diverged
    if parity is not None and parity.mean_difference is not None:
        difference = parity.mean_difference
    return Row(
        policy=policy,
        description=next((run.description for run in runs if run.description), ""),
        seeds=len({run.seed for run in runs}),
        samples_per_s=statistics.median(run.samples_per_s for run in runs),
        speeds=tuple(run.samples_per_s for run in runs),
        step_ms=statistics.median(run.step_ms_median for run in runs),
        zero_comm_ms=_median(run.zero_comm_step_ms for run in runs),
        tflops_per_rank=_median(run.tflops_per_rank for run in runs),
        raw=_mean_bytes(runs, lambda run: run.raw_bytes),
        wire=_mean_bytes(runs, lambda run: run.wire_bytes),
        breakdown=_mean_breakdown(runs),
        interface_bytes=_mean(run.interface_bytes for run in runs),
        val_loss=_mean(run.val_loss for run in runs),
        loss_difference=difference,
        parity=parity,
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.fmean(known) if known else None


def _mean_bytes(runs: Sequence[Run], table: Callable[[Run], dict[str, float]]) -> dict[str, float]:
    tables = [table(run) for run in runs if table(run)]
    return {a: statistics.fmean(t.get(a, 0.0) for t in tables) for a in AXES if any(a in t for t in tables)}


def _mean_breakdown(runs: Sequence[Run]) -> Breakdown | None:
    parts = [run.breakdown_ms for run in runs if run.breakdown_ms is not None]
    if not parts:
        return None
    return Breakdown(
        **{
            name: statistics.fmean(getattr(part, name) for part in parts)
            for name in ("compute", "encode", "wire", "decode", "wait")
        }
    )

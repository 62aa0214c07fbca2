"""The result of a comparison, as ``result.json`` holds it: version 1.

Units are in the names: ``_ms`` milliseconds, ``_s`` seconds, ``_bit_s`` bits per second, ``_bytes`` bytes.
Losses are in nats per token. Fields with a default may be absent.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .reader import ResultError, read

VERSION = 1
AXES = ("dp", "tp", "pp", "zero", "ep", "cp")
MINIMUM_SEEDS = 5
LIMIT_NATS = 0.005


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ResultError(message)


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        _require(value is None or value > 0, f"{name} is {value}; it must be above 0")


@dataclass(frozen=True)
class Link:
    """The link between two hosts. ``emulation``: "netns" (kernel shaping), "paced" (the transport sleeps),
    "none" (the machine as it is: ``rate_bit_s`` may be null)."""

    spec: str
    emulation: Literal["netns", "paced", "none"]
    rate_bit_s: float | None = None
    latency_s: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        _positive(rate_bit_s=self.rate_bit_s)


@dataclass(frozen=True)
class Calibration:
    """One measured transfer of ``nbytes`` over the link."""

    nbytes: int
    seconds: float
    goodput_bit_s: float

    def __post_init__(self) -> None:
        _positive(nbytes=self.nbytes, seconds=self.seconds, goodput_bit_s=self.goodput_bit_s)


@dataclass(frozen=True)
class Model:
    """The trained model. ``batch`` is the global batch in samples, ``parameters`` a count."""

    preset: str
    parameters: int
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    sequence: int | None = None
    vocabulary: int | None = None
    batch: int | None = None
    micro_batches: int | None = None
    precision: str = "fp32"


@dataclass(frozen=True)
class Message:
    """One kind of message, per rank and step: ``count`` calls; ``nbytes`` (raw), ``wire_nbytes`` and
    ``seconds`` are totals of those calls, so that the mean size is nbytes / count."""

    axis: str
    op: str
    role: str
    dtype: str
    nbytes: float
    count: float
    seconds: float
    codec: str = "none"
    wire_nbytes: float | None = None

    def __post_init__(self) -> None:
        _positive(count=self.count)


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds per step, mean over ranks. encode, wire and decode run on a worker thread and may overlap
    with compute; compute and wait are the main thread's."""

    compute: float
    encode: float
    wire: float
    decode: float
    wait: float


@dataclass(frozen=True)
class Run:
    """One policy trained with one seed. ``raw_bytes`` and ``wire_bytes``: per axis, per rank and step, mean over
    ranks. ``interface_bytes``: per host and step, from the interface counters. ``zero_comm_step_ms``: the step
    of the same program with every payload replaced by a token. ``timed_steps``: those behind the speeds and
    bytes, warm-up left out."""

    policy: str
    seed: int
    steps: int
    samples_per_s: float
    step_ms_median: float
    description: str = ""
    tflops_per_rank: float | None = None
    step_ms: list[float] = field(default_factory=list)
    zero_comm_step_ms: float | None = None
    comm_share: float | None = None
    raw_bytes: dict[str, float] = field(default_factory=dict)
    wire_bytes: dict[str, float] = field(default_factory=dict)
    breakdown_ms: Breakdown | None = None
    train_loss: list[float] = field(default_factory=list)
    val_loss: float | None = None
    val_curve: list[tuple[int, float]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    interface_bytes: float | None = None
    timed_steps: int | None = None

    def __post_init__(self) -> None:
        _positive(
            steps=self.steps, samples_per_s=self.samples_per_s, step_ms_median=self.step_ms_median,
            zero_comm_step_ms=self.zero_comm_step_ms,
        )  # fmt: skip
        for name, table in (("raw_bytes", self.raw_bytes), ("wire_bytes", self.wire_bytes)):
            for axis, value in table.items():
                _require(axis in AXES, f"{name} has axis {axis!r}; axes are {', '.join(AXES)}")
                _require(value >= 0, f"{name}.{axis} is {value}; it must be 0 or more")


@dataclass(frozen=True)
class Parity:
    """The paired test of loss parity: differences policy - baseline in validation loss (nats), one per seed.
    ``upper_95`` is None below two seeds."""

    policy: str
    baseline: str
    seeds: int
    mean_difference: float | None = None
    upper_95: float | None = None
    limit: float = LIMIT_NATS
    passes: bool = False

    def __post_init__(self) -> None:
        holds = self.tested and self.upper_95 is not None and self.upper_95 <= self.limit
        _require(
            self.passes == holds,
            f"passes is {self.passes}, but {self.seeds} seeds with upper_95 {self.upper_95} against the limit "
            f"{self.limit} (at least {MINIMUM_SEEDS} seeds) say {holds}",
        )

    @property
    def tested(self) -> bool:
        return self.seeds >= MINIMUM_SEEDS and self.upper_95 is not None

    @property
    def verdict(self) -> Literal["passes", "fails", "not tested"]:
        if not self.tested:
            return "not tested"
        return "passes" if self.passes else "fails"


@dataclass(frozen=True)
class Result:
    """One comparison. ``layout``: ranks per axis, and the ZeRO stage under "zero". ``plan``: all other settings."""

    version: int
    command: str
    layout: dict[str, int]
    hosts: int
    ranks: int
    link: Link
    model: Model
    runs: list[Run]
    environment: dict[str, Any] = field(default_factory=dict)
    calibration: list[Calibration] = field(default_factory=list)
    parity: list[Parity] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(
            self.version == VERSION, f"version is {self.version}; this report reads version {VERSION} only"
        )
        _require(bool(self.runs), "runs is empty; a report needs at least one run")

    @property
    def policies(self) -> list[str]:
        """Policy names in the order of their first run."""
        return list(dict.fromkeys(run.policy for run in self.runs))

    def runs_of(self, policy: str) -> list[Run]:
        return [run for run in self.runs if run.policy == policy]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``from_dict`` reads them back."""
        return dataclasses.asdict(self)


def from_dict(value: Any, where: str = "result") -> Result:
    """A Result from the values of ``json.load``. Raises ResultError, which names the field and what it holds."""
    if isinstance(value, dict) and value.get("version", VERSION) != VERSION:
        raise ResultError(f"{where}: version {value['version']!r}; this report reads version {VERSION} only")
    return read(Result, value, where)


def load(path: str | os.PathLike[str]) -> Result:
    """Read and check a ``result.json``. Raises ResultError; FileNotFoundError where there is no file."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ResultError(f"{path.name} is not JSON: {e}") from None
    return from_dict(value, path.name)

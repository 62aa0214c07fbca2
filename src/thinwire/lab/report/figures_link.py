"""What there is to compress, and the link it crosses: the message profile and the calibration."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from . import text
from .schema import Calibration, Result
from .style import AXIS_COLOURS, BAND, INK, MUTED, bar_rows, new_figure, set_title
from .summary import FP32_REFERENCES, Summary

_TOLERANCE = 0.10  # of the nominal rate, which a calibrated link keeps from 64 KiB on
_LARGE = 64 << 10  # bytes
_MOST_ROWS = 16


@dataclass(frozen=True)
class MessageKind:
    """Messages of one axis, op, role and dtype, per rank and step: totals of ``count`` calls."""

    axis: str
    op: str
    role: str
    dtype: str
    nbytes: float
    count: float
    seconds: float

    @property
    def mean_nbytes(self) -> float:
        return self.nbytes / self.count


def message_kinds(result: Result) -> list[MessageKind]:
    """The uncompressed messages (mean over the runs of the first uncompressed policy with any), largest first."""
    for policy in FP32_REFERENCES:
        runs = [run for run in result.runs_of(policy) if run.messages]
        if runs:
            break
    else:
        return []
    totals: dict[tuple[str, str, str, str], list[float]] = {}
    for run in runs:
        for m in run.messages:
            entry = totals.setdefault((m.axis, m.op, m.role, m.dtype), [0.0, 0.0, 0.0])
            for k, value in enumerate((m.nbytes, m.count, m.seconds)):
                entry[k] += value / len(runs)
    return sorted((MessageKind(*key, *entry) for key, entry in totals.items()), key=lambda k: -k.nbytes)


def messages(result: Result, summary: Summary) -> Figure | None:
    """Bytes and time of the uncompressed messages, by kind."""
    kinds = message_kinds(result)
    if not kinds:
        return None
    shown = kinds[:_MOST_ROWS]
    total, seconds = sum(k.nbytes for k in kinds), sum(k.seconds for k in kinds)
    figure = new_figure(1.95 + 0.4 * len(shown))
    rest = (
        f" The {len(kinds) - len(shown)} smallest kinds are in the table only."
        if len(kinds) > len(shown)
        else ""
    )
    top = set_title(
        figure,
        _messages_title(kinds, total),
        f"Uncompressed messages per rank and step: {text.nbytes(total)} in {text.significant(1e3 * seconds)} ms of "
        f"transfers.{rest}",
    )  # fmt: skip
    bottom, head = 0.55 / figure.get_figheight(), 0.06 / figure.get_figheight()
    left, middle = 0.365, 0.715
    dtypes = len({k.dtype for k in kinds}) > 1
    names = [_words(k) + (f" ({k.dtype})" if dtypes else "") for k in shown]
    for x, width, values, label, words in (
        (left, 0.30, [k.nbytes / 1e6 for k in shown], "raw bytes (MB)",
         [f"{k.count:g} × {text.nbytes(k.mean_nbytes)}" for k in shown]),
        (middle, 0.265, [1e3 * k.seconds for k in shown], "time of the transfers (ms)",
         [text.milliseconds(1e3 * k.seconds) for k in shown]),
    ):  # fmt: skip
        axes = figure.add_axes((x, bottom, width, top - bottom - head))
        axes.barh(
            range(len(shown)), values, height=0.62, color=[AXIS_COLOURS.get(k.axis, MUTED) for k in shown]
        )
        room = 1.75 if x == left else 1.35
        axes.set_xlim(0, (max(values) or 1.0) * room)
        for i, (value, word) in enumerate(zip(values, words, strict=True)):
            axes.text(value + max(values) * 0.025, i, word, va="center", fontsize=9, color=INK)
        bar_rows(axes, names)
        if x == middle:
            axes.set_yticklabels([])
        axes.set_xlabel(label)
    return figure


def calibration(result: Result, summary: Summary) -> Figure | None:
    """Measured goodput by message size against the nominal rate."""
    if not result.calibration:
        return None
    points = sorted(result.calibration, key=lambda c: c.nbytes)
    sizes, goodput = [c.nbytes for c in points], [c.goodput_bit_s / 1e6 for c in points]
    nominal = result.link.rate_bit_s / 1e6 if result.link.rate_bit_s is not None else None
    figure = new_figure(4.2)
    top = set_title(
        figure, _calibration_title(points, nominal),
        f"Goodput of one transfer by size; {text.emulation(result.link)}.",
    )  # fmt: skip
    bottom = 0.6 / 4.2
    axes = figure.add_axes((0.095, bottom, 0.885, top - bottom))
    if nominal is not None:
        axes.axhspan(nominal * (1 - _TOLERANCE), nominal * (1 + _TOLERANCE), color=BAND)
        axes.axhline(nominal, color=INK, linewidth=1, linestyle=(0, (3, 2)))
        axes.text(
            0.012, nominal, f"nominal {_mbit(nominal)}, ±10 %", va="bottom", fontsize=9, color=MUTED,
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
    axes.plot(sizes, goodput, color="#0072b2", linewidth=2, marker="o", markersize=5.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([text.binary(size) for size in sizes], rotation=0 if len(sizes) <= 12 else 45)
    axes.set_ylim(0, max(*goodput, nominal or 0.0) * 1.2)
    axes.set_xlabel("message size")
    axes.set_ylabel("goodput (Mbit/s)")
    return figure


def _words(kind: MessageKind) -> str:
    return f"{kind.axis}  {kind.op}  {kind.role.replace('_', ' ')}"


def _messages_title(kinds: list[MessageKind], total: float) -> str:
    by_axis: dict[str, float] = {}
    for kind in kinds:
        by_axis[kind.axis] = by_axis.get(kind.axis, 0.0) + kind.nbytes
    axis = max(by_axis, key=lambda a: by_axis[a])
    return f"{axis} messages are {text.percent(by_axis[axis] / total if total else 0.0)} of the bytes to compress"


def _calibration_title(points: list[Calibration], nominal: float | None) -> str:
    large = [c for c in points if c.nbytes >= _LARGE]
    if nominal is None or not large:
        return f"{text.binary(points[-1].nbytes)} cross the link at {_mbit(points[-1].goodput_bit_s / 1e6)}"
    worst = max(abs(c.goodput_bit_s / 1e6 / nominal - 1) for c in large)
    if worst <= _TOLERANCE:
        return f"From {text.binary(_LARGE)} on, goodput is within {100 * worst:.0f} % of the nominal {_mbit(nominal)}"
    return f"From {text.binary(_LARGE)} on, goodput is up to {100 * worst:.0f} % off the nominal {_mbit(nominal)}"


def _mbit(value: float) -> str:
    return text.rate(1e6 * value)

"""What a policy gains and what its step consists of: speed, bytes on the wire, time by activity."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from . import text
from .schema import Result
from .style import AXIS_COLOURS, INK, MUTED, PART_COLOURS, bar_rows, looks, new_figure, set_title
from .summary import Row, Summary, is_reference

_LEFT = 0.17
_MAIN, _WORKER = ("compute", "wait"), ("encode", "wire", "decode")


def speed(result: Result, summary: Summary) -> Figure | None:
    """Samples per second against the fp32 and bf16 references and the zero-communication limit."""
    rows, look = summary.rows, looks(result.policies)
    base = summary.fp32 or summary.bf16
    unit = base.samples_per_s if base is not None else 1.0
    figure = new_figure(2.0 + 0.36 * len(rows))
    subtitle = f"Median over runs (dots: single runs); {text.emulation(result.link)}"
    if base is not None:
        subtitle += f". 1.0 is {base.policy}, {text.significant(unit)} samples/s"
    top = set_title(figure, _speed_title(summary), subtitle + ".")
    bottom = 0.55 / figure.get_figheight()
    head = 0.26 / figure.get_figheight()  # room for the names of the lines
    axes = figure.add_axes((_LEFT, bottom, 0.97 - _LEFT, top - bottom - head))
    values = [row.samples_per_s / unit for row in rows]
    axes.barh(range(len(rows)), values, height=0.66, color=[look[r.policy].colour for r in rows])
    lines = {}
    if base is not None and base is not summary.bf16:
        lines[base.policy] = 1.0
    if summary.bf16 is not None:
        lines["bf16 wire" if summary.bf16.policy == "bf16" else summary.bf16.policy] = (
            summary.bf16.samples_per_s / unit
        )
    limit = _zero_comm_speed(summary)
    if limit is not None:
        lines["zero communication"] = limit / unit
    right = max(*values, *lines.values(), *(s / unit for r in rows for s in r.speeds))
    axes.set_xlim(0, right * 1.19)
    for i, (row, value) in enumerate(zip(rows, values, strict=True)):
        if len(row.speeds) > 1:
            axes.plot(
                [s / unit for s in row.speeds], [i] * len(row.speeds), ".", color="white", mec=INK, mew=0.5
            )
        far = max(value, max(row.speeds) / unit)
        words = f"{value:.2f}×" if base is not None else text.significant(value)
        axes.text(far + right * 0.012, i, words, va="center", color=INK, fontsize=9.5, zorder=4, bbox=_halo())
    _reference_lines(axes, lines)
    bar_rows(axes, [row.policy for row in rows], summary.featured.policy)
    axes.set_xlabel(
        f"samples per second, relative to {base.policy}" if base is not None else "samples per second"
    )
    return figure


def wire_bytes(result: Result, summary: Summary) -> Figure | None:
    """Bytes sent per rank and step, by axis."""
    rows = [row for row in summary.rows if row.wire]
    if not rows:
        return None
    axes_used = [a for a in AXIS_COLOURS if any(row.wire.get(a) for row in rows)]
    figure = new_figure(2.1 + 0.36 * len(rows))
    featured = next((r for r in rows if r is summary.featured), rows[0])
    title = f"{featured.policy} sends {text.nbytes(featured.wire_total)} per rank and step"
    if featured.ratio:
        title += f", {featured.ratio:.1f}× fewer than raw"
    top = set_title(
        figure, title,
        "Bytes sent by parallel axis, mean over ranks, headers and scales included. In brackets: raw / wire bytes.",
    )  # fmt: skip
    bottom, head = 0.55 / figure.get_figheight(), 0.28 / figure.get_figheight()
    axes = figure.add_axes((_LEFT, bottom, 0.97 - _LEFT, top - bottom - head))
    widest = max(row.wire_total or 0.0 for row in rows) or 1.0
    scale, unit = _byte_scale(widest)
    for i, row in enumerate(rows):
        at = 0.0
        for axis in axes_used:
            size = row.wire.get(axis, 0.0) / scale
            axes.barh(
                i, size, left=at, height=0.66, color=AXIS_COLOURS[axis], edgecolor="white", linewidth=0.6
            )
            at += size
        ratio = f"  ({row.ratio:.1f}×)" if row.ratio else ""
        axes.text(
            at + widest / scale * 0.012, i, f"{text.nbytes(row.wire_total)}{ratio}", va="center", fontsize=9.5
        )
    axes.set_xlim(0, widest / scale * 1.24)
    _swatches(axes, {axis: AXIS_COLOURS[axis] for axis in axes_used})
    bar_rows(axes, [row.policy for row in rows], summary.featured.policy)
    axes.set_xlabel(f"wire bytes per rank and step ({unit})")
    return figure


def breakdown(result: Result, summary: Summary) -> Figure | None:
    """Time by activity: the main thread above, the worker thread that runs beside it below."""
    rows = [row for row in summary.rows if row.breakdown is not None]
    if not rows:
        return None
    figure = new_figure(2.2 + 0.5 * len(rows))
    top = set_title(
        figure, _breakdown_title(summary, rows),
        "Upper bar: the main thread; black mark: the median step. Lower bar: the worker thread, which runs beside "
        "the main one, so the two bars do not add up. Mean over ranks.",
    )  # fmt: skip
    bottom, head = 0.55 / figure.get_figheight(), 0.52 / figure.get_figheight()
    axes = figure.add_axes((_LEFT, bottom, 0.97 - _LEFT, top - bottom - head))
    longest = max(_longest(row) for row in rows)
    for i, row in enumerate(rows):
        for names, offset, height in ((_MAIN, -0.17, 0.34), (_WORKER, 0.16, 0.22)):
            at = 0.0
            for name in names:
                size = getattr(row.breakdown, name)
                axes.barh(i + offset, size, left=at, height=height, color=PART_COLOURS[name], linewidth=0)
                at += size
        axes.plot([row.step_ms] * 2, [i - 0.4, i + 0.04], color=INK, linewidth=2)
        axes.text(
            row.step_ms + longest * 0.015, i - 0.18, text.milliseconds(row.step_ms), va="center", fontsize=9,
            bbox=_halo(), zorder=4,
        )  # fmt: skip
    axes.set_xlim(0, longest * 1.14)
    if summary.zero_comm_ms is not None:
        _reference_lines(
            axes, {f"zero communication {text.milliseconds(summary.zero_comm_ms)}": summary.zero_comm_ms}
        )
    _swatches(axes, {name: PART_COLOURS[name] for name in (*_MAIN, *_WORKER)}, 0.3 / figure.get_figheight())
    bar_rows(axes, [row.policy for row in rows], summary.featured.policy)
    axes.set_xlabel("time per step (ms)")
    return figure


def _speed_title(summary: Summary) -> str:
    row = summary.featured
    gains = [
        f"{row.samples_per_s / reference.samples_per_s:.2f}× {words}"
        for reference, words in ((summary.bf16, "a bf16 wire"), (summary.fp32, "an uncompressed fp32 wire"))
        if reference is not None and reference is not row
    ]
    if not gains:
        return f"{row.policy} trains {text.significant(row.samples_per_s)} samples per second"
    return f"Speed of {row.policy}: {', '.join(gains)}"


def _breakdown_title(summary: Summary, rows: list[Row]) -> str:
    row = next((r for r in rows if r is summary.featured), rows[0])
    assert row.breakdown is not None
    waits = f"{row.policy} waits {text.milliseconds(row.breakdown.wait)} of each step"
    other = next((r for r in rows if r is summary.fp32 and r is not row), None)
    if other is not None and other.breakdown is not None:
        return f"{waits}; {other.policy} waits {text.milliseconds(other.breakdown.wait)}"
    return waits


def _longest(row: Row) -> float:
    lanes = [sum(getattr(row.breakdown, name) for name in names) for names in (_MAIN, _WORKER)]
    return float(max(row.step_ms, *lanes))


def _zero_comm_speed(summary: Summary) -> float | None:
    """Samples/s of the zero-communication step: the same samples in less time."""
    rows = [row for row in summary.rows if row.limit_share]
    if not rows or summary.zero_comm_ms is None:
        return None
    row = next((r for r in rows if is_reference(r.policy)), rows[0])
    return row.samples_per_s * row.step_ms / summary.zero_comm_ms


def _reference_lines(axes: Any, lines: dict[str, float]) -> None:
    """Dashed lines with their names above the axes, moved apart where they are close."""
    low, high = axes.get_xlim()
    width = axes.get_position().width * axes.figure.get_figwidth()
    last = -1.0
    for name, value in sorted(lines.items(), key=lambda line: line[1]):
        axes.axvline(value, color=INK, linewidth=1, linestyle=(0, (3, 2)), zorder=3)
        half = 0.5 * len(name) * 0.065 / width  # of the axes' width; a character is about 0.065 inches
        at = min(max((value - low) / (high - low), last + half), 1 - half)
        last = at + half + 0.02
        axes.text(
            at, 1.012, name, transform=axes.transAxes, ha="center", va="bottom", fontsize=9, color=MUTED
        )


def _swatches(axes: Any, colours: dict[str, str], rise: float = 0.0) -> None:
    """A one-line legend above the axes, in the order of the bars."""
    box = axes.get_position()
    axes.figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()], loc="lower left",
        bbox_to_anchor=(box.x0 - 0.012, box.y1 + rise - 0.005), ncols=len(colours), fontsize=9.5, handlelength=1,
        handleheight=1, columnspacing=1.6, borderpad=0.2, labelcolor=MUTED,
    )  # fmt: skip


def _byte_scale(largest: float) -> tuple[float, str]:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= size:
            return size, unit
    return 1.0, "bytes"


def _halo() -> dict[str, Any]:
    return {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}

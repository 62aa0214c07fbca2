"""Time against message size, a figure for each op: one line per contender, dotted what its bytes take on the link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from ...report import text
from ...report.style import end_labels, house_style, looks, new_figure, set_title
from .plan import BASELINES, CONTROL
from .rows import Row


def write_figures(rows: Sequence[Row], where: str, out: Path) -> list[Path]:
    """``OP.png`` for each op into the folder ``out``. where: the run in words, for the subtitle."""
    paths = []
    for op in dict.fromkeys(row.op for row in rows):
        path = out / f"{op}.png"
        time_against_size([row for row in rows if row.op == op], where).savefig(path)
        paths.append(path)
    return paths


def time_against_size(rows: Sequence[Row], where: str) -> Figure:
    """The figure of one op."""
    names = list(dict.fromkeys(row.contender for row in rows))
    sizes = sorted({row.nbytes for row in rows})
    style = looks(names)
    dotted = any(row.link_us for row in rows)
    with house_style():
        figure = new_figure(5.0)
        top = set_title(
            figure,
            headline(rows),
            f"Time of {rows[0].op} by message size, slowest rank's median; {where}."
            + (" Thin, dotted: wire bytes / link rate." if dotted else ""),
        )
        axes = figure.subplots()
        figure.subplots_adjust(left=0.09, right=_right_of(names), bottom=0.12, top=top)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ends = []
        for name in names:
            points = sorted((row.nbytes, row.us / 1e3, row.link_us) for row in rows if row.contender == name)
            look = style[name]
            axes.plot([p[0] for p in points], [p[1] for p in points], marker="o", markersize=3.5, **look.line)
            if dotted:
                bound = [(p[2] or 0.0) / 1e3 for p in points]
                axes.plot([p[0] for p in points], bound, color=look.colour, linewidth=0.9, linestyle=":")
            ends.append((name, points[-1][1], look))
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([text.binary(size) for size in sizes])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("message size")
        axes.set_ylabel("time of a call (ms)")
        axes.grid(visible=True, axis="both")
        end_labels(axes, ends)
    return figure


def _right_of(names: Sequence[str]) -> float:
    """Where the axes end, as a share of the figure's width, so that the longest name has room beside them."""
    return min(0.82, 0.95 - 0.0093 * max(map(len, names)))


def headline(rows: Sequence[Row]) -> str:
    """What the largest messages show: a gain is stated over the fastest baseline."""
    op, largest = rows[0].op, max(row.nbytes for row in rows)
    time = {row.contender: row.us for row in rows if row.nbytes == largest}
    message = f"{op} of {text.binary(largest)}"
    baseline = min((name for name in BASELINES if name in time), key=lambda name: time[name])
    codecs = [name for name in time if name not in (*BASELINES, CONTROL.name)]
    if not codecs:
        return f"{message}: none takes {time['none'] / time['plain']:.2f} times as long as plain"
    best = min(codecs, key=lambda name: time[name])
    gain = time[baseline] / time[best]
    if gain < 1.02:  # medians of one machine do not resolve less
        return f"{message}: no codec is faster than {baseline}"
    return f"{message}: {best} is {gain:.1f} times as fast as {baseline}, the fastest baseline"

"""How figures look: one colour per policy and per axis, titles that state the message, labels that stay apart."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

WIDTH_IN = 8.0
DPI = 200  # 1600 pixels wide
INK, MUTED, GRID, BAND = "#1f2328", "#59636e", "#e4e7eb", "#eef4f0"

# Okabe and Ito's colour-blind safe set for policies, greys for the baselines; dashes part the closest pairs.
_SOLID: Any = "-"
_DASHES: tuple[Any, ...] = ((0, (5, 1.6)), (0, (1.4, 1.4)), (0, (6, 1.5, 1.4, 1.5)), (0, (2.6, 1.2)))
_POLICIES: dict[str, tuple[str, Any]] = {
    "none": ("#24292f", _SOLID),
    "plain": ("#24292f", _DASHES[1]),
    "bf16": ("#868e96", _DASHES[0]),
    "plain bf16": ("#868e96", _DASHES[1]),
    "balanced": ("#0072b2", _SOLID),
    "aggressive": ("#d55e00", _SOLID),
    "lossless": ("#009e73", _SOLID),
    "zhybrid": ("#cc79a7", _SOLID),
    "mzhybrid": ("#8c3a6b", _DASHES[0]),
    "naive-zfp": ("#e69f00", _SOLID),
    "naive-mpc": ("#56b4e9", _DASHES[0]),
    "auto": ("#5a4fcf", _DASHES[2]),
}
_SPARE = ("#7a7a00", "#117733", "#882255", "#44aa99", "#661100", "#6699cc", "#aa4499", "#b8860b")
AXIS_COLOURS = {
    "dp": "#3b6ea8", "tp": "#e08a3c", "pp": "#5aa469", "zero": "#a8658f", "ep": "#8a8a4a", "cp": "#6cb3c9",
}  # fmt: skip
PART_COLOURS = {
    "compute": "#3b6ea8", "wait": "#c9d1d9", "encode": "#e08a3c", "wire": "#5aa469", "decode": "#a8658f",
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """A policy's look. ``text`` is the colour, dark enough for words on white."""

    colour: str
    dash: Any
    width: float

    @property
    def text(self) -> str:
        red, green, blue = to_rgb(self.colour)
        luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        scale = min(1.0, 0.42 / luminance) if luminance else 1.0
        return str(to_hex((red * scale, green * scale, blue * scale)))

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.dash, "linewidth": self.width}


def looks(policies: Sequence[str]) -> dict[str, Look]:
    """{policy: look}. Known names keep their colour in every report; the parameters after ":" change the dash."""
    found: dict[str, Look] = {}
    seen: dict[str, int] = {}
    spare = 0
    for policy in policies:
        base = policy.partition(":")[0]
        variant = seen.get(base, 0)
        seen[base] = variant + 1
        if base in _POLICIES:
            colour, dash = _POLICIES[base]
        else:
            colour, dash = _SPARE[spare % len(_SPARE)], _DASHES[spare // len(_SPARE) % len(_DASHES)]
            spare += 1
        if variant:
            dash = _DASHES[variant % len(_DASHES)]
        found[policy] = Look(colour, dash, 2.4 if base == "balanced" else 1.5)
    return found


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's settings for the figures made inside; the caller's own come back afterwards."""
    installed = set(font_manager.get_font_names())
    fonts: list[str] = [
        str(name) for name in ("Inter", "Arial", "Liberation Sans", "DejaVu Sans") if name in installed
    ]
    settings: Any = {
        "font.family": fonts or ["sans-serif"], "font.size": 10, "text.color": INK,
        "axes.edgecolor": "#b8bfc6", "axes.labelcolor": MUTED, "axes.linewidth": 0.8,
        "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
        "xtick.color": "#b8bfc6", "ytick.color": "#b8bfc6", "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
        "grid.color": GRID, "grid.linewidth": 0.8, "axes.grid": True, "axes.grid.axis": "y",
        "figure.facecolor": "white", "savefig.facecolor": "white", "svg.hashsalt": "thinwire",
        "legend.framealpha": 0.9, "legend.edgecolor": "none", "legend.fancybox": False,
        "path.simplify": True, "path.simplify_threshold": 0.3,
    }  # fmt: skip
    with mpl.rc_context(settings):
        yield


def new_figure(height_in: float) -> Figure:
    return Figure(figsize=(WIDTH_IN, height_in), dpi=DPI)


def set_title(figure: Figure, title: str, subtitle: str) -> float:
    """The message in bold, what is plotted below it in grey; returns the fraction of the height left for axes."""
    height = figure.get_figheight()
    at = 0.14
    for words, size, weight, colour in ((title, 13, "bold", INK), (subtitle, 10, "normal", MUTED)):
        # Widths in characters that fill the figure at that size.
        wrapped = textwrap.fill(words, 80 if size == 13 else 118)
        figure.text(
            0.018, 1 - at / height, wrapped, fontsize=size, fontweight=weight, color=colour,
            va="top", ha="left", linespacing=1.25, parse_math=False,
        )  # fmt: skip
        at += (wrapped.count("\n") + 1) * size * 1.3 / 72 + 0.06
    return 1 - (at + 0.12) / height


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions as near to ``wanted`` as they can be while ``gap`` apart and inside [low, high], in the same order.

    Where they cannot all fit, the gap shrinks to what fits.
    """
    n = len(wanted)
    if n == 0:
        return []
    if n > 1:
        gap = min(gap, (high - low) / (n - 1))
    order = sorted(range(n), key=lambda i: wanted[i])
    # Neighbours that collide merge into a block centred on its members' mean: [sum of (wanted - offset), size].
    blocks: list[list[float]] = []
    for i in order:
        blocks.append([wanted[i], 1])
        while len(blocks) > 1:
            (a, m), (b, k) = blocks[-2], blocks[-1]
            if a / m + m * gap <= b / k:
                break
            blocks[-2:] = [[a + b - k * m * gap, m + k]]
    positions = []
    for total, size in blocks:
        positions += [total / size + j * gap for j in range(int(size))]
    for k in range(n):  # push up from the floor, then down from the ceiling
        positions[k] = max(positions[k], low + k * gap)
    for k in range(n):
        positions[n - 1 - k] = min(positions[n - 1 - k], high - k * gap)
    placed = [0.0] * n
    for k, i in enumerate(order):
        placed[i] = positions[k]
    return placed


def end_labels(axes: Any, ends: Sequence[tuple[str, float, Look]]) -> None:
    """Write each (words, y of the curve's end, look) right of the axes, apart, with a thin leader to its curve."""
    transform, inverse = axes.transData.transform, axes.transAxes.inverted().transform
    x = axes.get_xlim()[1]
    wanted = [min(max(float(inverse(transform((x, y)))[1]), 0.0), 1.0) for _, y, _ in ends]
    height_in = axes.figure.get_figheight() * axes.get_position().height
    size = min(10.0, 72 * height_in / max(len(ends), 1) / 1.15)
    places = spread(wanted, 1.22 * size / 72 / height_in, 0.0, 1.0)
    for (words, _, look), start, place in zip(ends, wanted, places, strict=True):
        axes.plot(
            [1.0, 1.02, 1.05, 1.06], [start, start, place, place], transform=axes.transAxes, clip_on=False,
            color=look.colour, linewidth=0.8, solid_capstyle="round",
        )  # fmt: skip
        axes.text(
            1.07, place, words, transform=axes.transAxes, va="center", color=look.text, fontsize=size,
            fontweight="bold" if look.width > 2 else "normal", parse_math=False,
        )  # fmt: skip


_BESIDE = [
    (dx, dy, side)
    for dy in (3, -10, 11, -18, 19, -26, 27, -34, 35, -42, 43)
    for dx, side in ((5, "left"), (-5, "right"))
]
"""Where the name of a point may stand, in printer's points from it: the first that is free is taken."""


def name_points(axes: Any, points: Sequence[tuple[float, float, str]], size: float = 8) -> None:
    """Write a name beside each (x, y), clear of other names and points where there is room. Limits must be set before."""
    canvas: Any = FigureCanvasAgg(axes.figure)
    renderer = canvas.get_renderer()
    axes.figure.draw_without_rendering()
    taken = [
        Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in axes.transData.transform([p[:2] for p in points])
    ]
    inside = axes.get_window_extent()
    for x, y, name in sorted(points, key=lambda point: -point[1]):
        for dx, dy, side in _BESIDE:
            text = axes.annotate(
                name, (x, y), xytext=(dx, dy), textcoords="offset points", ha=side, fontsize=size, color=INK,
                arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkA": 0} if abs(dy) > 10 else None,
            )  # fmt: skip
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without its arrow
            free = inside.x0 <= box.x0 and box.x1 <= inside.x1 and not box.count_overlaps(taken)
            if free or (dx, dy, side) == _BESIDE[-1]:
                taken.append(box)
                break
            text.remove()


def bar_rows(axes: Any, names: Sequence[str], strong: str | None = None) -> None:
    """Rows of a horizontal bar chart, first name on top, ``strong`` in bold; the grid runs along the values."""
    axes.set_yticks(range(len(names)), names, parse_math=False)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name == strong else "normal")
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")

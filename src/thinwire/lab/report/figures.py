"""The figures of a report, in reading order."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from . import figures_cost, figures_link, figures_loss
from .schema import Result
from .style import DPI, house_style
from .summary import Summary


@dataclass(frozen=True)
class FigureKind:
    """``draw`` returns None where the result has nothing for the figure. ``caption``: one line, for the page."""

    name: str
    caption: str
    draw: Callable[[Result, Summary], Figure | None]


@dataclass(frozen=True)
class Drawn:
    """A drawn figure: ``png`` is about 1600 pixels wide, ``svg`` the same for the page."""

    name: str
    caption: str
    png: bytes
    svg: bytes


FIGURES = (
    FigureKind(
        "speed",
        "Training speed. Bars end at the median of a policy's runs; dashed lines are what it is compared with.",
        figures_cost.speed,
    ),
    FigureKind(
        "loss_by_time",
        "Loss against training time on this link: what a user of the link sees.",
        figures_loss.loss_by_time,
    ),
    FigureKind(
        "loss_by_step",
        "Loss against steps: what compression does to learning, whatever the link.",
        figures_loss.loss_by_step,
    ),
    FigureKind(
        "parity",
        "Loss parity: the paired test over seeds, for the policies with enough of them.",
        figures_loss.parity,
    ),
    FigureKind(
        "wire_bytes",
        "Where the bytes are: wire bytes by parallel axis.",
        figures_cost.wire_bytes,
    ),
    FigureKind(
        "breakdown",
        "Where the time goes, and how much of it no compression can take away.",
        figures_cost.breakdown,
    ),
    FigureKind(
        "messages",
        "What there is to compress: the messages of an uncompressed step.",
        figures_link.messages,
    ),
    FigureKind(
        "calibration",
        "Whether the link is what it claims to be.",
        figures_link.calibration,
    ),
)


def draw_all(result: Result, summary: Summary) -> list[Drawn]:
    """Every figure that the result has data for. The same result gives the same SVG bytes."""
    drawn = []
    with house_style():
        for kind in FIGURES:
            figure = kind.draw(result, summary)
            if figure is not None:
                svg = _save(figure, "svg", {"Date": None, "Creator": None})
                drawn.append(Drawn(kind.name, kind.caption, _save(figure, "png", {"Software": None}), svg))
    return drawn


def _save(figure: Figure, kind: str, metadata: dict[str, str | None]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
    return buffer.getvalue()

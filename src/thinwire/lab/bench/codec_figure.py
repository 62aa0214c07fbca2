"""The figure of ``thinwire bench codec``: speed against ratio, and where compressing pays on a link."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ..report.style import MUTED, house_style, name_points, new_figure, set_title
from .codec import CodecRow

_LINKS = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}
_LOSSLESS, _LOSSY, _PEER = "#009e73", "#0072b2", "#868e96"


def round_trip_gb_s(row: CodecRow) -> float:
    """Bytes of the tensor per second where it is encoded and then decoded."""
    return 1 / (1 / row.encode_gb_s + 1 / row.decode_gb_s)


def least_gb_s(link: float, ratio: float) -> float:
    """The round trip's speed from which on compressing saves time on a link (bytes per second)."""
    return link / (1 - 1 / ratio) / 1e9


def speed_against_ratio(rows: Sequence[CodecRow], peers: Sequence[str], cpu: str) -> Figure:
    """One point for each codec, one line for each link: above it, compressing pays even with nothing hidden."""
    with house_style():
        figure = new_figure(5.6)
        size, dtype, threads = rows[0].nbytes, rows[0].dtype, rows[0].threads
        top = set_title(
            figure,
            "Above a link's line, compressing saves time even if nothing overlaps",
            f"Encode and decode, one after the other, against ratio; {size / 2**20:g} MiB of {dtype}, "
            f"{threads} thread{'s' * (threads > 1)}, {cpu}.",
        )
        axes = figure.subplots()
        figure.subplots_adjust(left=0.085, right=0.97, bottom=0.1, top=top)
        shown = [row for row in rows if row.ratio > 1]
        highest = 1.6 * max(row.ratio for row in shown)
        lowest, fastest = (f(round_trip_gb_s(row) for row in shown) for f in (min, max))
        lowest, fastest = lowest / 1.5, fastest * 8
        ratios = np.geomspace(1.02, highest, 200)
        for name, link in _LINKS.items():
            line = [least_gb_s(link, ratio) for ratio in ratios]
            axes.plot(ratios, line, color=MUTED, linewidth=0.9, linestyle=":")
            if lowest < line[-1] < fastest:
                axes.annotate(name, (ratios[-1], line[-1]), ha="right", va="bottom", fontsize=9, color=MUTED)
        kinds = {"lossy": (_LOSSY, "o"), "lossless": (_LOSSLESS, "o"), "other libraries": (_PEER, "D")}
        for kind, (colour, marker) in kinds.items():
            own = [row for row in shown if _kind(row, peers) == kind]
            if own:
                at = [row.ratio for row in own], [round_trip_gb_s(row) for row in own]
                axes.plot(*at, color=colour, marker=marker, linestyle="none", markersize=5, label=kind)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(1, highest)
        axes.set_ylim(lowest, fastest)
        ticks = [t for t in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128) if t <= highest]
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        powers = [t for t in (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100) if lowest <= t <= fastest]
        axes.set_yticks(powers, [f"{t:g}" for t in powers])
        axes.minorticks_off()
        axes.set_xlabel("ratio (raw bytes / payload bytes)")
        axes.set_ylabel("encode then decode (GB/s of the tensor)")
        # In a row, at the top: the links' names are at the right end of their lines.
        axes.legend(loc="upper right", fontsize=9, ncols=len(kinds))
        name_points(axes, [(row.ratio, round_trip_gb_s(row), _short(row.spec)) for row in shown])
    return figure


def _kind(row: CodecRow, peers: Sequence[str]) -> str:
    return "other libraries" if row.spec in peers else "lossless" if row.lossless else "lossy"


def _short(spec: str) -> str:
    """A spec without the parameters that are usual."""
    for usual in (",round=nearest", ":block=128", "format=e4m3,block=128", "abs=0.0,", "reuse=64"):
        spec = spec.replace(usual, "")
    return spec.replace(": ", " ").removesuffix(":")

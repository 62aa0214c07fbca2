"""Figures of captured messages: lossless ratios, lossy errors, spectra of gradients. One message each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from ...report.style import INK, MUTED, bar_rows, house_style, new_figure, set_title
from .capture import PHASES
from .measure import RANKS, Record, Spectrum, mean_energy

_LOSSLESS = {"exponent": "#0072b2", "mpc:dim=1": "#56b4e9"}
_PHASES = {"start": "#c9a227", "middle": "#5aa469", "late": "#3b6ea8"}
_FAMILIES = {
    "block integers": ("#0072b2", "o", ("int8", "int6", "int5", "int4", "int3", "int2")),
    "Hadamard, int4": ("#56b4e9", "D", ("hadamard|int4",)),
    "integers, Huffman": ("#009e73", "P", ("int8|huffman", "int4|huffman", "int2|huffman")),
    "block floats": ("#d55e00", "s", ("fp8", "mxfp8", "mxfp4", "nvfp4", "e3m0")),
    "zfp": ("#e69f00", "^", ("zfp",)),
    "bf16": ("#868e96", "v", ("bf16",)),
    "sign, topk": ("#8c3a6b", "X", ("sign", "topk")),
}


def write_figures(records: Sequence[Record], spectra: Sequence[Spectrum], out: Path) -> None:
    """``ratios.png``, ``errors.png``, ``spectra.png`` into the folder ``out``."""
    with house_style():
        lossless(records).savefig(out / "ratios.png")
        lossy(records).savefig(out / "errors.png")
        energies(spectra).savefig(out / "spectra.png")


def lossless(records: Sequence[Record]) -> Figure:
    """Ratio of each role late in training, and the bound of exponent coding, a panel for each precision."""
    precisions = list(dict.fromkeys(r.precision for r in records))
    late = [r for r in records if r.phase == "late"]
    roles = list(dict.fromkeys(r.role for r in late))
    figure = new_figure(1.7 + 0.42 * len(roles))
    top = set_title(
        figure,
        "Exponent coding reaches its limit; MPC wins where low bits are zero",
        "Raw bytes / payload bytes of the lossless codecs late in training; the line marks the bound of exponent coding.",
    )
    panels = figure.subplots(1, len(precisions), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left=0.25, right=0.985, bottom=0.2, top=top - 0.06, wspace=0.08)
    for panel, precision in zip(panels, precisions, strict=True):
        by_role = {r.role: r for r in late if r.precision == precision}
        for row, role in enumerate(roles):
            record = by_role.get(role)
            if record is None:
                continue
            for at, (codec, colour) in enumerate(_LOSSLESS.items()):
                ratio = record.codecs[codec].ratio
                panel.barh(
                    row + 0.36 * (at - 0.5), ratio, 0.34, color=colour, label=codec if row == 0 else None
                )
            panel.plot([record.exponent_bound] * 2, [row - 0.38, row + 0.02], color=INK, linewidth=1.4)
        if panel is panels[0]:
            bar_rows(panel, roles)
        else:
            panel.tick_params(axis="y", length=0, labelleft=False)
            panel.spines["left"].set_visible(False)
            panel.grid(visible=False, axis="y")
            panel.grid(visible=True, axis="x")
        panel.axvline(1, color=MUTED, linewidth=0.8)
        panel.set_xlim(left=0.9)
        panel.set_title(f"trained in {precision}", fontsize=10, color=MUTED)
        panel.set_xlabel("ratio")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def lossy(records: Sequence[Record]) -> Figure:
    """Error against bits per value, a panel for each role of the first precision, late in training."""
    precision = records[0].precision
    shown = [r for r in records if r.phase == "late" and r.precision == precision]
    rows = -(-len(shown) // 3)
    figure = new_figure(1.2 + 2.0 * rows)
    top = set_title(
        figure,
        "The error follows the bits, hardly the message; block integers lead",
        f"Relative L2 error against payload bits per value, one point per codec; trained in {precision}, late. "
        "Lower left is better.",
    )
    panels: Any = figure.subplots(rows, 3, sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(
        left=0.085, right=0.985, bottom=0.85 / (1.2 + 2.0 * rows), top=top - 0.05, hspace=0.28, wspace=0.07
    )
    flat = list(panels.flat)
    for panel, record in zip(flat, shown, strict=False):
        for label, (colour, marker, names) in _FAMILIES.items():
            points = [c for spec, c in record.codecs.items() if spec.split(":")[0] in names and c.rel_l2 > 0]
            points.sort(key=lambda c: c.bits)
            line = "-" if label in ("block integers", "zfp") else "none"
            panel.plot(
                [c.bits for c in points],
                [c.rel_l2 for c in points],
                color=colour,
                marker=marker,
                markersize=4.5,
                linestyle=line,
                linewidth=1,
                label=label,
            )
        panel.set_yscale("log")
        panel.set_title(record.role, fontsize=10, color=INK)
    for panel in flat[len(shown) :]:
        panel.set_visible(False)
    for panel in panels[-1]:
        panel.set_xlabel("bits per value")
    for panel in panels[:, 0]:
        panel.set_ylabel("relative L2 error")
    handles, labels = flat[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncols=7,
        columnspacing=1.0,
        handletextpad=0.4,
        frameon=False,
        fontsize=9,
    )
    return figure


def energies(spectra: Sequence[Spectrum]) -> Figure:
    """Share of the gradients' energy in their leading singular values, a line for each phase."""
    precision = spectra[0].precision
    figure = new_figure(3.6)
    top = set_title(
        figure,
        "A few directions hold most of a weight's gradient",
        f"Share of a gradient's square norm in its largest singular values, mean over all weight matrices; {precision}.",
    )
    axes = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.985, bottom=0.17, top=top)
    for phase in PHASES:
        energy = mean_energy(s for s in spectra if s.phase == phase and s.precision == precision)
        axes.plot(RANKS, list(energy.values()), marker="o", color=_PHASES[phase], label=phase)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(RANKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(rank) for rank in RANKS])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("number of singular values (of up to 256)")
    axes.set_ylabel("share of energy")
    axes.legend(loc="lower right", fontsize=9, title="phase of training", title_fontsize=9)
    return figure

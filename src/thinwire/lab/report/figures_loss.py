"""Loss against steps and against time, and the paired test of loss parity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from . import text
from .curves import Curve, Curves, curves_of
from .parity import BASELINE, paired_differences
from .schema import LIMIT_NATS, Result
from .style import BAND, INK, MUTED, bar_rows, end_labels, looks, new_figure, set_title
from .summary import Summary

_TICKS = (LIMIT_NATS, 0.01, 0.02, 0.05, 0.1, 0.3, 1, 3, 10)  # nats, on scales that are linear near 0 only
_LEFT, _LABELS = 0.105, 0.80  # where axes begin, and where they leave room for labels on the right


def loss_by_step(result: Result, summary: Summary) -> Figure | None:
    """Mean loss curves, and below them their difference to the uncompressed run, where the policies part."""
    curves = curves_of(result)
    if curves is None:
        return None
    look = looks(result.policies)
    two = bool(curves.differences)
    figure = new_figure(7.4 if two else 4.6)
    top = set_title(figure, *_step_words(curves, summary))
    bottom = 0.55 / figure.get_figheight()
    split = bottom + 0.56 * (top - bottom) if two else bottom
    main = figure.add_axes((_LEFT, split + (0.03 if two else 0), _LABELS - _LEFT, top - split - 0.03))
    for policy in sorted(curves.mean, key=lambda p: look[p].width):
        main.plot(curves.mean[policy].steps, curves.mean[policy].losses, **look[policy].line)
    main.set_ylim(*_loss_limits(curves))
    main.set_xlim(*_span(curves))
    main.set_ylabel(f"{curves.kind} (nats)")
    lowest = main
    if two:
        main.tick_params(labelbottom=False)
        lowest = figure.add_axes((_LEFT, bottom, _LABELS - _LEFT, split - bottom - 0.03))
        _draw_differences(lowest, curves, result)
    else:
        end_labels(main, [(p, c.end, look[p]) for p, c in curves.mean.items() if math.isfinite(c.end)])
    lowest.set_xlabel("step")
    for axes in (main, lowest):
        axes.yaxis.set_label_coords(-0.107, 0.5)
    return figure


def _draw_differences(axes: Any, curves: Curves, result: Result) -> None:
    look = looks(result.policies)
    axes.axhspan(-LIMIT_NATS, LIMIT_NATS, color=BAND)
    axes.axhline(0, **look[BASELINE].line)
    for policy in sorted(curves.differences, key=lambda p: look[p].width):
        axes.plot(curves.differences[policy].steps, curves.differences[policy].losses, **look[policy].line)
    # The scale is chosen for the second half: early differences are large and pass.
    late = [c.losses[len(c.losses) // 2 :] for c in curves.differences.values()]
    sizes = np.abs(np.concatenate(late))
    reach = max(float(np.max(sizes[np.isfinite(sizes)], initial=0.0)) * 1.15, 1.6 * LIMIT_NATS)
    if reach > 12 * LIMIT_NATS:
        axes.set_yscale("symlog", linthresh=2 * LIMIT_NATS, linscale=1.5)
        ticks = [0, *(s * v for v in _TICKS for s in (1, -1) if v <= reach)]
        axes.set_yticks(ticks)
        axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(_signed))
    low = min((float(np.nanmin(part)) for part in late if np.isfinite(part).any()), default=0.0)
    axes.set_ylim(min(1.3 * low, -1.6 * LIMIT_NATS), reach)
    axes.set_xlim(*_span(curves))
    axes.set_ylabel(f"difference to {BASELINE} (nats)")
    axes.text(
        0.012, -0.95 * LIMIT_NATS, f"within ±{LIMIT_NATS:g} nats", color=MUTED, fontsize=9, va="bottom",
        transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    ends = [(BASELINE, 0.0, look[BASELINE])]
    ends += [(p, c.end, look[p]) for p, c in curves.differences.items() if math.isfinite(c.end)]
    end_labels(axes, ends)


def loss_by_time(result: Result, summary: Summary) -> Figure | None:
    """The same curves against the time that the policy's median step takes on this link."""
    curves = curves_of(result)
    if curves is None:
        return None
    look = looks(result.policies)
    seconds = {p: c.steps * summary.row(p).step_ms / 1e3 for p, c in curves.mean.items()}
    base = curves.mean.get(BASELINE)
    target = base.end + LIMIT_NATS if base is not None and math.isfinite(base.end) else None
    reached = {p: _first_below(seconds[p], c, target) for p, c in curves.mean.items()}
    figure = new_figure(5.4)
    top = set_title(figure, *_time_words(curves, summary, reached))
    bottom = 0.55 / 5.4
    axes = figure.add_axes((_LEFT, bottom, 0.98 - _LEFT, top - bottom))
    longest = max(float(s[-1]) for s in seconds.values())
    axes.set_xlim(0, longest * 1.02)
    axes.set_ylim(*_loss_limits(curves))
    for policy in sorted(curves.mean, key=lambda p: look[p].width):
        curve, at = curves.mean[policy], seconds[policy]
        axes.plot(at, curve.losses, **look[policy].line)
        if math.isfinite(float(curve.losses[-1])):
            axes.plot(at[-1:], curve.losses[-1:], "o", color=look[policy].colour, markersize=4.5)
    if target is not None:
        axes.axhline(target, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
    axes.set_xlabel("training time on this link (s): steps × the policy's median step")
    axes.set_ylabel(f"{curves.kind} (nats)")
    _time_legend(
        axes, reached if target is not None else {p: float(s[-1]) for p, s in seconds.items()}, result
    )
    return figure


def _time_legend(axes: Any, times: dict[str, float | None], result: Result) -> None:
    """Policies with their times in the empty upper right, fastest first, in at most seven lines a column."""
    look = looks(result.policies)
    order = sorted(times, key=lambda p: math.inf if times[p] is None else times[p] or 0.0)
    columns = math.ceil(len(order) / 7)
    handles = [axes.plot([], [], **look[p].line)[0] for p in order]
    words = [
        f"{p}   " + ("not reached" if (t := times[p]) is None else f"{text.significant(t)} s") for p in order
    ]
    legend = axes.legend(handles, words, loc="upper right", ncols=columns, handlelength=2.4, fontsize=9.5)
    for entry, policy in zip(legend.get_texts(), order, strict=True):
        entry.set_color(look[policy].text)
        entry.set_parse_math(False)
        entry.set_fontweight("bold" if look[policy].width > 2 else "normal")


def parity(result: Result, summary: Summary) -> Figure | None:
    """Each policy's mean difference in validation loss, its upper bound, and each seed's difference."""
    rows = [r for r in summary.rows if r.parity is not None and r.parity.tested]
    if not rows:
        return None
    look = looks(result.policies)
    failing = [row.policy for row in rows if row.parity is not None and not row.parity.passes]
    title = (
        f"Not at loss parity: {', '.join(failing)}" if failing else "Every tested policy is at loss parity"
    )
    figure = new_figure(1.75 + 0.42 * len(rows))
    top = set_title(
        figure, title,
        f"Final validation loss minus that of {BASELINE}, same seed: every seed (rings), mean (dot), upper 95 % "
        f"bound (bar). Parity holds where the bar ends left of {LIMIT_NATS:g} nats.",
    )  # fmt: skip
    bottom = 0.55 / figure.get_figheight()
    axes = figure.add_axes((0.17, bottom, 0.66, top - bottom))
    reach, lowest = 1.6 * LIMIT_NATS, -0.6 * LIMIT_NATS
    for i, row in enumerate(rows):
        test, colour = row.parity, look[row.policy].colour
        assert test is not None
        assert test.mean_difference is not None
        assert test.upper_95 is not None
        passed = text.verdict(test)
        axes.text(
            1.02, i, f"{text.nats(test.upper_95)}  {passed}", transform=axes.get_yaxis_transform(), va="center",
            color=INK if test.passes else "#b42318", fontsize=9.5,
        )  # fmt: skip
        if not math.isfinite(test.upper_95):
            continue
        seeds = [d for d in paired_differences(result, row.policy).values() if math.isfinite(d)]
        axes.plot([test.mean_difference, test.upper_95], [i, i], color=colour, linewidth=2.2)
        axes.plot([test.upper_95] * 2, [i - 0.13, i + 0.13], color=colour, linewidth=2.2)
        axes.plot(seeds, [i + 0.26] * len(seeds), "o", mfc="none", mec=colour, markersize=4, mew=0.9)
        axes.plot(test.mean_difference, i, "o", color=colour, markersize=6)
        lowest = min(lowest, *(v * 1.25 for v in (test.mean_difference, *seeds)))
        reach = max(reach, *(v * 1.15 for v in (test.upper_95, *seeds)))
    axes.axvspan(-1e3, LIMIT_NATS, color=BAND, zorder=0)
    axes.axvline(LIMIT_NATS, color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
    axes.axvline(0, color="#b8bfc6", linewidth=0.8)
    if reach > 5 * LIMIT_NATS:
        axes.set_xscale("symlog", linthresh=2 * LIMIT_NATS, linscale=1.5)
        axes.set_xticks([v for v in (-0.1, -0.02, -LIMIT_NATS, 0, *_TICKS) if lowest <= v <= reach])
        axes.minorticks_off()
    axes.set_xlim(lowest, reach)
    axes.xaxis.set_major_formatter(FuncFormatter(_signed))
    bar_rows(axes, [row.policy for row in rows], summary.featured.policy)
    axes.set_xlabel(f"validation loss − {BASELINE} (nats)")
    return figure


def _step_words(curves: Curves, summary: Summary) -> tuple[str, str]:
    name = summary.featured.policy
    if len(curves.seeds) == 1:
        seeds = f"seed {curves.seeds[0]}"
    else:
        seeds = f"mean over {text.seeds(len(curves.seeds))}" if curves.seeds else "means over own seeds"
    lower = (
        " Below: the difference to uncompressed training, mean over seed pairs." if curves.differences else ""
    )
    subtitle = f"{curves.kind.capitalize()} by step, {seeds}.{lower}"
    if name in curves.differences and math.isfinite(curves.differences[name].end):
        return (
            f"{name} ends {text.nats(curves.differences[name].end)} nats from uncompressed training",
            subtitle,
        )
    if name in curves.mean and math.isfinite(curves.mean[name].end):
        return f"{name} ends at {curves.mean[name].end:.3f} nats", subtitle
    return "Loss by step", subtitle


def _time_words(curves: Curves, summary: Summary, reached: dict[str, float | None]) -> tuple[str, str]:
    name = summary.featured.policy
    ours, theirs = reached.get(name), reached.get(BASELINE)
    if ours is None or theirs is None:
        return "Loss by training time", f"{curves.kind.capitalize()}; each curve ends where its run ends."
    subtitle = (
        f"Times in the legend: until within {LIMIT_NATS:g} nats of {BASELINE}'s final loss (dotted line). "
        "Dots: ends of the runs."
    )
    if name == BASELINE:
        return f"{BASELINE} takes {text.significant(theirs)} s to its final loss", subtitle
    return (
        f"{name} reaches the uncompressed run's loss in {text.significant(ours)} s instead of {text.significant(theirs)} s",
        subtitle,
    )


def _first_below(seconds: Any, curve: Curve, target: float | None) -> float | None:
    if target is None:
        return None
    below = np.flatnonzero(curve.losses <= target)
    return float(seconds[below[0]]) if below.size else None


def _span(curves: Curves) -> tuple[float, float]:
    return 0.0, max(float(c.steps[-1]) for c in curves.mean.values())


def _loss_limits(curves: Curves) -> tuple[float, float]:
    """From the lowest loss to the highest start: a curve that diverges leaves the figure, and does not flatten it."""
    finite = [c.losses[np.isfinite(c.losses)] for c in curves.mean.values()]
    low = min((float(v.min()) for v in finite if v.size), default=0.0)
    high = max((float(v[0]) for v in finite if v.size), default=1.0)
    pad = 0.05 * max(high - low, 0.1)
    return low - pad, high + pad


def _signed(value: float, _position: int = 0) -> str:
    return "0" if abs(value) < 1e-12 else f"{value:+g}".replace("-", "−")

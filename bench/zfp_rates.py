"""What each axis of a 3D-parallel training stands: ZFP at rates 8, 12, 16 and 24, on one axis at a time.

    python bench/zfp_rates.py --out results/DATE_zfp-rates

Writes a policy per axis and rate to OUT/policies, runs ``thinwire compare`` with all of them (dp=2 tp=2 pp=2, four
hosts; needs root) and draws OUT/rates.png. A run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comparing import compare, read_options
from matplotlib.ticker import FixedLocator, NullLocator

from thinwire.lab.report.schema import load
from thinwire.lab.report.style import AXIS_COLOURS, house_style, new_figure, set_title
from thinwire.presets import zfp

AXES = {"dp": "gradients", "tp": "activations inside a layer", "pp": "activations between stages",
        "zero": "updated parameters"}  # fmt: skip
RATES = (8, 12, 16, 24)
STEPS, LINK = 60, "150mbit"


def name(axis: str, rate: int) -> str:
    return f"zfp-{axis}-{rate}"


def write_policies(folder: Path) -> list[str]:
    """A TOML file for each axis and rate; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for axis in AXES:
        for rate in RATES:
            codecs = ", ".join(f'{dtype} = "{spec}"' for dtype, spec in zfp(rate).items())
            path = folder / f"{name(axis, rate)}.toml"
            path.write_text(
                f'description = "ZFP at rate {rate} on {axis} alone, as the paper\'s schemes send it"\n\n'
                f'[axis.{axis}]\nall = {{ {codecs} }}\nalgorithm = "ring"\n'
            )
            paths.append(str(path))
    return paths


def draw(out: Path) -> None:
    """Loss and speed against the rate, one line per axis, relative to no compression."""
    result = load(out / "result.json")
    runs = {run.policy: run for run in result.runs}
    plain = runs["none"]
    with house_style():
        figure = new_figure(4.0)
        top = set_title(
            figure,
            "Where ZFP may be coarse: validation loss and step time by axis and rate",
            f"ZFP on one axis, nothing else compressed; {plain.steps} steps, one seed, {result.link.spec} links. "
            "Below zero is better.",
        )
        panels = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.09, right=0.985, bottom=0.24, top=top, wspace=0.26)
        values: Any = (
            ("validation loss, minus none (nats)", lambda run: run.val_loss - plain.val_loss),
            ("median step, minus none (ms)", lambda run: run.step_ms_median - plain.step_ms_median),
        )
        for panel, (label, value) in zip(panels, values, strict=True):
            for axis, what in AXES.items():
                points = [value(runs[name(axis, rate)]) for rate in RATES]
                panel.plot(RATES, points, marker="o", color=AXIS_COLOURS[axis], label=f"{axis}: {what}")
            panel.axhline(0, color="#59636e", linewidth=0.8)
            panel.xaxis.set_major_locator(FixedLocator(RATES))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xlabel("ZFP rate (bits per value)")
            panel.set_ylabel(label)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=9)
        figure.savefig(out / "rates.png")


def main() -> None:
    options = read_options(__doc__.splitlines()[0])
    if not options.draw_only:
        policies = ["none", "bf16", *write_policies(options.out / "policies")]
        compare(options.out, policies, batch=8, micro_batch=2, steps=STEPS, link=LINK)
    draw(options.out)


if __name__ == "__main__":
    main()

"""Speed against the number of ranks and the size of the model: data parallelism, ZeRO-1, one link rate.

    python bench/scaling.py --out results/DATE_scaling

Runs ``thinwire compare`` for dp = 2, 4 and 8 with the lab model, and for dp=4 with a smaller and a larger one (needs
root), and draws OUT/scaling.png. Every rank has the same batch throughout. Finished parts are not run again.
"""

from __future__ import annotations

from pathlib import Path

from comparing import compare, read_options

from thinwire.lab.report.schema import Result, load
from thinwire.lab.report.style import house_style, looks, new_figure, set_title
from thinwire.lab.train.flops import parameter_count
from thinwire.lab.train.model import ModelConfig

POLICIES = ("none", "bf16", "naive-zfp:8", "balanced")
LINK, STEPS, PER_RANK = "200mbit", 30, 4
RANKS = [(2, "lab"), (4, "lab"), (8, "lab")]
MODELS = [(4, "lab-small"), (4, "lab"), (4, "lab-large")]


def folder(out: Path, ranks: int, model: str) -> Path:
    return out / f"dp{ranks}-{model}"


def run(out: Path, ranks: int, model: str) -> None:
    """One comparison; up to four hosts, so that eight ranks share them in pairs as in the other results."""
    compare(
        folder(out, ranks, model),
        POLICIES,
        layout=f"dp={ranks}",
        hosts=min(ranks, 4),
        model=model,
        link=LINK,
        steps=STEPS,
        batch=PER_RANK * ranks,
        micro_batch=PER_RANK,
    )


def millions(model: str) -> str:
    return f"{parameter_count(ModelConfig.preset(model)) / 1e6:.1f} M"


def draw(out: Path) -> None:
    """Speed relative to the bf16 wire of the same run."""
    results = {key: load(folder(out, *key) / "result.json") for key in {*RANKS, *MODELS}}
    gains = [_speed(result, "balanced") for result in results.values()]
    with house_style():
        figure = new_figure(3.9)
        top = set_title(
            figure,
            f"balanced is {min(gains):.1f} to {max(gains):.1f} times as fast as a bf16 wire, over ranks and model sizes",
            f"Samples per second relative to the bf16 wire of the same run; dp, ZeRO-1, {LINK} per host, {PER_RANK} "
            "sequences per rank.",
        )
        panels = figure.subplots(1, 2, sharey=True)
        figure.subplots_adjust(left=0.08, right=0.985, bottom=0.26, top=top, wspace=0.08)
        for panel, keys, label, ticks in (
            (panels[0], RANKS, "ranks (lab model)", [str(ranks) for ranks, _ in RANKS]),
            (panels[1], MODELS, "parameters (4 ranks)", [millions(model) for _, model in MODELS]),
        ):
            for policy, look in looks(POLICIES).items():
                points = [_speed(results[key], policy) for key in keys]
                panel.plot(range(len(keys)), points, marker="o", label=policy, **look.line)
            limit = [_limit(results[key]) for key in keys]
            panel.plot(
                range(len(keys)),
                limit,
                color="#59636e",
                linewidth=0.9,
                linestyle=":",
                label="no communication",
            )
            panel.set_xticks(range(len(keys)), ticks)
            panel.set_xlim(-0.3, len(keys) - 0.7)
            panel.set_xlabel(label)
        panels[0].set_ylabel("speed (bf16 wire = 1)")
        panels[0].set_ylim(bottom=0)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False, fontsize=9)
        figure.savefig(out / "scaling.png")


def _speed(result: Result, policy: str) -> float:
    (baseline,), (run,) = result.runs_of("bf16"), result.runs_of(policy)
    return run.samples_per_s / baseline.samples_per_s


def _limit(result: Result) -> float:
    (baseline,) = result.runs_of("bf16")
    assert baseline.zero_comm_step_ms is not None, "compare measures it unless told not to"
    return baseline.step_ms_median / baseline.zero_comm_step_ms


def main() -> None:
    options = read_options(__doc__.splitlines()[0])
    if not options.draw_only:
        for key in dict.fromkeys([*RANKS, *MODELS]):
            run(options.out, *key)
    draw(options.out)


if __name__ == "__main__":
    main()

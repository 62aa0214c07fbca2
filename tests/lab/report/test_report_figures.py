import math
from itertools import pairwise

import numpy as np
import pytest
import report_sample
from hypothesis import given
from hypothesis import strategies as st

from thinwire.lab.report import from_dict, summarise
from thinwire.lab.report.curves import curves_of
from thinwire.lab.report.figures import FIGURES, draw_all
from thinwire.lab.report.figures_link import message_kinds
from thinwire.lab.report.figures_loss import loss_by_step, loss_by_time, parity
from thinwire.lab.report.style import house_style, looks, spread


def drawn(result):
    result = from_dict(result)
    return {figure.name: figure for figure in draw_all(result, summarise(result))}


@given(st.lists(st.floats(-1, 2), max_size=20), st.floats(0.001, 0.2))
def test_labels_stay_apart_and_inside(wanted, gap):
    placed = spread(wanted, gap, 0.0, 1.0)
    assert len(placed) == len(wanted)
    step = min(gap, 1 / (len(wanted) - 1)) if len(wanted) > 1 else 0
    ordered = sorted(placed)
    assert all(b - a >= step - 1e-9 for a, b in pairwise(ordered))
    assert all(-1e-9 <= p <= 1 + 1e-9 for p in placed)
    for i, j in pairwise(np.argsort(wanted, kind="stable")):
        assert placed[i] <= placed[j]


def test_labels_with_room_stay_where_they_are():
    assert spread([0.8, 0.2, 0.5], 0.1, 0, 1) == pytest.approx([0.8, 0.2, 0.5])
    assert spread([0.5, 0.5], 0.2, 0, 1) == pytest.approx([0.4, 0.6])


def test_a_policy_keeps_its_colour():
    few, many = looks(["balanced"]), looks([*report_sample.POLICIES, "mine", "yours"])
    assert few["balanced"] == many["balanced"]
    assert len({(look.colour, str(look.dash)) for look in many.values()}) == len(many)
    first, second = looks(["naive-zfp:8", "naive-zfp:16"]).values()
    assert first.colour == second.colour
    assert first.dash != second.dash


def test_crowded_labels_do_not_overlap():
    result = from_dict(report_sample.crowded())
    with house_style():
        figure = loss_by_step(result, summarise(result))
        figure.canvas.draw()
        boxes = [
            t.get_window_extent() for a in figure.axes for t in a.texts if t.get_text() in result.policies
        ]
    assert len(boxes) == 10
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(box.x1 <= figure.bbox.width for box in boxes)


def test_curves_are_means_over_shared_seeds_and_differences_are_paired():
    curves = curves_of(from_dict(report_sample.crowded()))
    assert curves.kind == "validation loss"
    assert curves.seeds == (0,)
    runs = {p: [report_sample.make_run(p, s) for s in range(5)] for p in ("none", "balanced")}
    expected = np.mean(
        [
            a["val_curve"][-1][1] - b["val_curve"][-1][1]
            for a, b in zip(runs["balanced"], runs["none"], strict=True)
        ]
    )
    assert curves.differences["balanced"].end == pytest.approx(expected)
    assert curves_of(from_dict(report_sample.five_seeds())).seeds == (0, 1, 2, 3, 4)


def test_training_loss_stands_in_where_a_validation_curve_is_missing():
    result = report_sample.make_result([report_sample.make_run(p, 0, 50) for p in ("none", "balanced")])
    result["runs"][1]["val_curve"] = []
    curves = curves_of(from_dict(result))
    assert curves.kind == "training loss"
    losses = result["runs"][0]["train_loss"]
    assert curves.mean["none"].losses[-1] == pytest.approx(
        np.mean(losses[-2:])
    )  # smoothed over 50 // 25 steps
    assert curves_of(from_dict(report_sample.make_result([{**result["runs"][1], "train_loss": []}]))) is None


def test_a_diverged_policy_is_drawn():
    result = report_sample.make_result(
        [report_sample.make_run(p, s, 60) for p in ("none", "balanced") for s in range(5)]
    )
    for run in result["runs"][5:]:
        run["val_loss"] = math.nan
        run["val_curve"] = [[step, math.nan if step > 20 else 1e6 * step] for step, _ in run["val_curve"]]
    result = from_dict(result)
    with house_style():
        for draw in (loss_by_step, loss_by_time, parity):
            figure = draw(result, summarise(result))
            figure.canvas.draw()
    low, high = figure.axes[0].get_xlim()
    assert high - low < 1  # the test's scale is not stretched to infinity


def test_figures_are_those_the_result_has_data_for():
    result = from_dict(report_sample.single())
    summary = summarise(result)
    with house_style():
        names = [kind.name for kind in FIGURES if kind.draw(result, summary) is not None]
    assert names == ["speed", "loss_by_time", "loss_by_step", "wire_bytes", "breakdown", "calibration"]


def test_svg_is_reproducible():
    result = report_sample.single()
    for field in ("step_ms", "train_loss", "val_curve", "wire_bytes", "breakdown_ms", "zero_comm_step_ms"):
        del result["runs"][0][field]
    first, second = drawn(result), drawn(result)
    assert list(first) == ["speed", "calibration"]
    for name, figure in first.items():
        assert figure.svg.startswith(b"<?xml")
        assert figure.svg == second[name].svg


def test_messages_are_totals_by_kind():
    kinds = message_kinds(from_dict(report_sample.crowded()))
    assert [k.nbytes for k in kinds] == sorted((k.nbytes for k in kinds), reverse=True)
    total = sum(report_sample.make_run("none", 0)["raw_bytes"].values())
    assert sum(k.nbytes for k in kinds) == pytest.approx(total)
    assert next(k for k in kinds if k.op == "reduce_scatter").mean_nbytes == pytest.approx(1.6e6)
    assert message_kinds(from_dict(report_sample.single())) == []

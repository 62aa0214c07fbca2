from __future__ import annotations

import dataclasses

import pytest
from train_runs import settings

from thinwire.errors import LayoutError, SpecError
from thinwire.lab.train import Layout, ModelConfig, TrainConfig
from thinwire.lab.train.config import LossScaleConfig, OptimizerConfig
from thinwire.lab.train.optim import LossScaler, learning_rate
from thinwire.lab.train.pipeline import SCHEDULES, layers_of, stages_of


def test_layouts_parse_and_print() -> None:
    layout = Layout.parse(" tp=2, dp=4 ")
    assert layout == Layout(dp=4, tp=2)
    assert str(layout) == "dp=4,tp=2,pp=1"
    assert layout.world == 8
    assert list(Layout.parse("dp=2,tp=3,pp=4").mesh_sizes().items()) == [("pp", 4), ("dp", 2), ("tp", 3)]
    assert Layout.parse("").mesh_sizes() == {"dp": 1}


@pytest.mark.parametrize("text", ["dp", "dp=", "dp=two", "ep=2", "dp=2,dp=2", "dp=0", "dp=-1"])
def test_bad_layouts(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"layout": Layout(2, 2, 2)}, 4, "dp=2 x tp=2 x pp=2 = 8 ranks, but 4 run"),
        ({"layout": Layout(tp=3)}, 3, "heads=4 is not a multiple of tp=3"),
        ({"layout": Layout(pp=4), "schedule": "interleaved"}, 4, "4 layers are fewer than 8 pipeline stages"),
        ({"layout": Layout(dp=2), "global_batch": 3}, 2, "global_batch=3 is not a multiple of dp=2"),
        ({"layout": Layout(pp=4), "global_batch": 2}, 4, "at least pp=4 micro-batches, not 2"),
        ({"layout": Layout(pp=2), "global_batch": 5, "schedule": "zero-bubble"}, 2, "2 rounds"),
        ({"layout": Layout(pp=2), "zero": 3, "schedule": "zbv"}, 2, "zero=3 does not run under"),
    ],
)
def test_layouts_that_do_not_fit(changes: dict[str, object], world: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        dataclasses.replace(settings(), **changes).check(world)  # type: ignore[arg-type]


def test_settings_from_toml() -> None:
    config = TrainConfig.from_toml("""
        layout = "dp=2,pp=2"
        zero = 2
        schedule = "zbv"
        [model]
        preset = "tiny"
        layers = 6
        [optimizer]
        lr = 1
        betas = [0.8, 0.9]
        [data]
        paths = ["text"]
    """)
    assert config.layout == Layout(dp=2, pp=2)
    assert config.model == ModelConfig.preset("tiny", layers=6)
    assert config.optimizer == OptimizerConfig(lr=1.0, betas=(0.8, 0.9))
    assert config.data.paths == ("text",)
    assert TrainConfig.from_toml("") == TrainConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zer = 1", "unknown setting zer: did you mean 'zero'"),
        ("[optimizer]\nlearning = 1", "unknown setting optimizer.learning"),
        ("seed = 'a'", "seed = 'a' is not a int"),
        ("= 1", "not TOML"),
        ("schedule = '1b1f'", "unknown schedule '1b1f': did you mean '1f1b'"),
        ("precision = 'fp8'", "precision='fp8'"),
        ("[model]\npreset = 'tinny'", "unknown model 'tinny': did you mean 'tiny'"),
        ("[model]\nheads = 3", "hidden=256 is not a multiple of heads=3"),
        ("[data]\ntokens = 'words'", "data.tokens='words'"),
    ],
)
def test_bad_settings(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        TrainConfig.from_toml(text)


def test_learning_rate_rises_then_falls_to_its_floor() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup=4)
    rates = [learning_rate(config, step, 20) for step in range(25)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[12] == pytest.approx(0.55)  # half of the cosine
    assert rates[20:] == [pytest.approx(0.1)] * 5
    assert rates[4:21] == sorted(rates[4:21], reverse=True)


def test_loss_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scaler = LossScaler(LossScaleConfig(initial=8.0, interval=2))
    scales = []
    for overflow in (True, False, False, False, True, False):
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == [4.0, 4.0, 8.0, 8.0, 4.0, 4.0]
    fixed = LossScaler(None)
    fixed.update(True)
    assert fixed.scale == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_stage_has_one_rank_and_every_layer_one_stage(schedule: str, ranks: int) -> None:
    stages = sorted(s for r in range(ranks) for s in stages_of(schedule, r, ranks))
    assert stages == list(range(ranks * SCHEDULES[schedule].stages_per_rank))
    layers = [layer for s in stages for layer in layers_of(s, len(stages), 11)]
    assert layers == list(range(11))

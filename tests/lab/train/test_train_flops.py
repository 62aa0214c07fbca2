from __future__ import annotations

import pytest

from thinwire.lab.train.flops import parameter_count, step_flops, step_messages
from thinwire.lab.train.model import PRESETS, ModelConfig


def test_neox_20b_has_the_published_parameters() -> None:
    assert parameter_count(ModelConfig.preset("neox-20b")) == 20_554_567_680  # Black et al. 2022, section 2


def test_flops_of_a_step() -> None:
    model = ModelConfig(layers=1, hidden=2, heads=1, sequence=4, vocab=8)
    multiplied = parameter_count(model) - 8 * 2
    assert step_flops(model, 3) == 6 * multiplied * 12 + 6 * 1 * 2 * 4 * 12


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_messages_of_a_step(zero: int) -> None:
    model = PRESETS["lab"]
    messages = step_messages(model, dp=2, tp=2, pp=2, micro_batch=1, micro_batches=4, zero=zero)
    activation = model.sequence * model.hidden * 4
    tp = [m for m in messages if m.axis == "tp"]
    assert [(m.op, m.count, m.nbytes) for m in tp] == [("all_reduce", 8, activation)] * 2
    assert [(m.op, m.count) for m in messages if m.axis == "pp"] == [("send", 4), ("send", 4)]
    share = -(-parameter_count(model) // 4) * 4
    ops = [(m.op, m.count, m.nbytes) for m in messages if m.axis in ("dp", "zero")]
    assert (
        ops
        == {
            0: [("all_reduce", 1, share)],
            1: [("reduce_scatter", 1, share), ("all_gather", 1, share)],
            3: [("reduce_scatter", 1, share), ("all_gather", 8, share)],
        }[zero]
    )
    assert step_messages(model, dp=1, tp=1, pp=1, micro_batch=1, micro_batches=8) == []

from __future__ import annotations

import pytest
import torch

from thinwire.errors import CheckpointError
from thinwire.feedback import Feedback, Span

SPANS = (Span("a.weight", 0, 6), Span("a.bias", 6, 8))


def filled(*, owner: int = 3, rollback: bool = False) -> Feedback:
    feedback = Feedback(SPANS, 8, axis="dp", owner_numel=owner, rollback=rollback)
    feedback.sender.copy_(torch.arange(8) / 3)
    feedback.owner.copy_(-torch.arange(owner) / 7)
    return feedback


def test_starts_at_zero_and_says_what_it_costs() -> None:
    feedback = Feedback(SPANS, 8, axis="dp", owner_numel=3)
    assert not feedback.sender.any()
    assert not feedback.owner.any()
    assert feedback.nbytes == 4 * 11
    assert Feedback(SPANS, 8, axis="dp", owner_numel=3, rollback=True).nbytes == 2 * 4 * 11


def test_rollback_restores_every_bit() -> None:
    feedback = filled(rollback=True)
    feedback.sender[2] = -0.0
    before = feedback.sender.clone(), feedback.owner.clone()
    feedback.begin()
    feedback.sender.fill_(torch.nan)
    feedback.owner.add_(1)
    feedback.rollback()
    assert torch.equal(feedback.sender.view(torch.int32), before[0].view(torch.int32))
    assert torch.equal(feedback.owner, before[1])


@pytest.mark.parametrize(
    ("name", "sender", "owner"), [("a.weight", range(6), [0]), ("a.bias", [6, 7], [1, 2])]
)
def test_what_a_step_did_to_one_parameter_is_forgotten(
    name: str, sender: list[int], owner: list[int]
) -> None:
    feedback = Feedback(SPANS, 8, axis="dp", owner_numel=3, owner_begin=5, rollback=True)
    feedback.sender.fill_(1)
    feedback.owner.fill_(1)
    feedback.begin()
    feedback.sender.fill_(2)
    feedback.owner.fill_(2)
    feedback.forget({name})
    assert feedback.sender.tolist() == [1.0 if i in sender else 2.0 for i in range(8)]
    assert feedback.owner.tolist() == [1.0 if i in owner else 2.0 for i in range(3)]


def test_without_rollback_a_skipped_step_is_an_error() -> None:
    feedback = filled()
    feedback.begin()
    with pytest.raises(RuntimeError, match="rollback=True"):
        feedback.rollback()


def test_state_is_keyed_by_name_and_axis_and_shares_memory() -> None:
    feedback = filled()
    state = feedback.state_dict()
    assert set(state) == {"a.weight@dp", "a.bias@dp", "a.weight@dp.owner"}
    assert state["a.bias@dp"].tolist() == feedback.sender[6:].tolist()
    feedback.sender.zero_()
    assert not state["a.weight@dp"].any()


def test_state_round_trip_is_exact() -> None:
    source, target = filled(), Feedback(SPANS, 8, axis="dp", owner_numel=3)
    target.load_state_dict({name: t.clone() for name, t in source.state_dict().items()})
    assert torch.equal(source.sender, target.sender)
    assert torch.equal(source.owner, target.owner)


@pytest.mark.parametrize("change", ["missing", "size"])
def test_state_that_does_not_fit_is_named(change: str) -> None:
    state = {name: t.clone() for name, t in filled().state_dict().items()}
    if change == "missing":
        del state["a.bias@dp"]
    else:
        state["a.bias@dp"] = torch.zeros(5)
    with pytest.raises(
        CheckpointError, match=r"residual a\.bias@dp: 2 values expected, (nothing|5 values) found"
    ):
        filled().load_state_dict(state)
    target = Feedback(SPANS, 8, axis="dp", owner_numel=3)
    with pytest.raises(CheckpointError):
        target.load_state_dict(state)
    assert not any(t.any() for t in target.state_dict().values()), "half of a state was loaded"

"""The order in which policies take turns."""

import pytest

from thinwire.errors import SpecError
from thinwire.lab.compare.plan import Plan
from thinwire.lab.train.config import TrainConfig


def plan(steps: int = 40, **changes: object) -> Plan:
    return Plan(TrainConfig(steps=steps), "lab", **{"policies": ("none", "bf16"), "block": 5, **changes})  # type: ignore[arg-type]


def test_blocks_cover_every_step_once() -> None:
    blocks = list(plan(steps=23).blocks())
    assert [step for _, steps in blocks for step in steps] == list(range(23))
    assert [index for index, _ in blocks] == list(range(5))


def test_each_block_starts_with_another_policy() -> None:
    names = ("a", "b", "c")
    orders = [plan().order(index, names) for index in range(3)]
    assert {order[0] for order in orders} == set(names)
    assert all(sorted(order) == list(names) for order in orders)


@pytest.mark.parametrize("steps", [10, 20, 40, 300])
@pytest.mark.parametrize("zero_steps", [1, 10, 40, 10_000])
def test_zero_communication_blocks_are_the_first_and_then_as_many_as_asked(
    steps: int, zero_steps: int
) -> None:
    p = plan(steps=steps, zero_steps=zero_steps)
    chosen = [index for index, _ in p.blocks() if p.zero_block(index)]
    count = -(-steps // 5)
    assert chosen[0] == 0
    assert len(chosen) == min(1 + -(-zero_steps // 5), count)
    assert len(chosen) >= 2  # at least one timed block after the warm-up


def test_one_block_is_refused() -> None:
    with pytest.raises(SpecError, match="two blocks"):
        plan(steps=7)


def test_a_policy_given_twice_is_refused() -> None:
    with pytest.raises(SpecError, match="each once"):
        plan(policies=("none", "none"))


def test_unknown_policies_are_refused_before_any_rank_starts() -> None:
    with pytest.raises(SpecError, match="did you mean 'balanced'"):
        plan(policies=("none", "balance"))

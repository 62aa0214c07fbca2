"""A whole comparison without an emulated network: result, resuming, adding to it."""

import json
from pathlib import Path

import pytest

from thinwire.errors import SpecError
from thinwire.lab.cluster import cluster
from thinwire.lab.compare import Plan, compare
from thinwire.lab.report import load
from thinwire.lab.train.config import TrainConfig
from thinwire.lab.train.layout import Layout
from thinwire.lab.train.model import ModelConfig


class Interrupted(Exception):
    pass


def make_plan(policies: tuple[str, ...], seeds: tuple[int, ...] = (0,), lr: float = 1e-3) -> Plan:
    from thinwire.lab.train.config import OptimizerConfig

    config = TrainConfig(
        model=ModelConfig.preset("tiny"), layout=Layout(dp=2), steps=8, eval_batches=1,
        optimizer=OptimizerConfig(lr=lr),
    )  # fmt: skip
    return Plan(config, "tiny", policies, seeds, block=2, save_every=1)


def run(plan: Plan, out: Path, stop_after: int | None = None) -> dict[str, object]:
    def on_progress(done: int, total: int, text: str) -> None:
        if stop_after is not None and done >= stop_after:
            raise Interrupted

    with cluster(2, 1, "none") as places:
        path = compare(plan, places, out, on_progress)
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_compare_resumes_bit_for_bit_and_grows(tmp_path: Path) -> None:
    whole = run(make_plan(("none", "balanced")), tmp_path / "whole")
    result = load(tmp_path / "whole" / "result.json")
    assert result.policies == ["none", "balanced"]
    by_policy = {r.policy: r for r in result.runs}
    for r in by_policy.values():
        assert r.zero_comm_step_ms is not None
        assert r.steps == len(r.train_loss) == 8
        assert r.timed_steps == len(r.step_ms) == 6
        assert r.val_curve[-1] == (8, r.val_loss)
    none, balanced = by_policy["none"], by_policy["balanced"]
    assert none.raw_bytes == balanced.raw_bytes
    assert balanced.wire_bytes["dp"] < 0.3 * none.wire_bytes["dp"]
    assert balanced.train_loss[0] == pytest.approx(none.train_loss[0], abs=0.01)

    # Interrupted after half of the steps, started again: the same losses.
    with pytest.raises(Interrupted):
        run(make_plan(("none", "balanced")), tmp_path / "parts", stop_after=10)
    assert not (tmp_path / "parts" / "result.json").exists()
    parts = run(make_plan(("none", "balanced")), tmp_path / "parts")
    for a, b in zip(whole["runs"], parts["runs"], strict=True):  # type: ignore[call-overload]
        assert a["policy"] == b["policy"]
        assert a["train_loss"] == b["train_loss"]
        assert a["val_loss"] == b["val_loss"]
        assert a["wire_bytes"].keys() == b["wire_bytes"].keys()
    assert not (tmp_path / "parts" / "state").exists()

    # Another policy is added to what is there.
    grown = run(make_plan(("none", "bf16")), tmp_path / "whole")
    assert [r["policy"] for r in grown["runs"]] == ["none", "balanced", "bf16"]  # type: ignore[attr-defined]

    # Runs that cannot be compared are refused.
    with pytest.raises(SpecError, match="another comparison"):
        run(make_plan(("none",), lr=2e-3), tmp_path / "whole")

"""PyTorch's own ways beside thinwire's: they train the same, with and without accumulated micro-batches."""

import dataclasses
from typing import Any

import pytest
import torch.distributed as dist

from thinwire.errors import LayoutError, SpecError, UnsupportedError
from thinwire.integrate.degrees import ShardingDegrees
from thinwire.integrate.mesh import groups
from thinwire.lab.compare import Plan, scheme
from thinwire.lab.train.config import DataConfig, TrainConfig
from thinwire.lab.train.layout import Layout
from thinwire.lab.train.model import ModelConfig
from thinwire.lab.train.trainer import Trainer
from thinwire.lab.wiring import Wiring
from thinwire.launch import run_ranks

CONFIG = TrainConfig(
    model=ModelConfig.preset("tiny"),
    layout=Layout(dp=2),
    data=DataConfig(max_bytes=1 << 17),
    steps=6,
    eval_batches=1,
    micro_batch=2,
    bucket_bytes=1 << 16,
)
DDP = ("plain", "none", "plain:bf16", "none:bf16", "plain:fp16", "plain:powersgd=8", "balanced")
FSDP = ("plain", "none", "plain:bf16", "none:bf16")


def _losses(rank: int, world: int, report: Any) -> dict[str, list[float]]:
    found = {}
    for name in DDP:
        found[f"ddp {name}"] = _train(dataclasses.replace(CONFIG, zero=0, ddp=True), name)
    for name in FSDP:
        found[f"fsdp {name}"] = _train(dataclasses.replace(CONFIG, zero=3), name)
    found["buckets"] = _train(dataclasses.replace(CONFIG, zero=0), "none")
    return found


def _train(config: TrainConfig, name: str) -> list[float]:
    chosen = scheme(name)
    mesh = chosen.mesh(config, Wiring())
    trainer = Trainer(config, mesh, hook=chosen.hook)
    losses = [trainer.step().loss for _ in range(config.steps)] + [trainer.evaluate()]
    if config.ddp:
        with pytest.raises(UnsupportedError, match="no checkpoint"):
            trainer.state()
    for group in groups(mesh).values():
        dist.destroy_process_group(group)
    return losses


def test_all_ways_train_the_same() -> None:
    first, second = run_ranks(_losses, 2, timeout=200, preload=("thinwire.lab.train",))
    assert first == second
    expected = first["buckets"]
    for under in ("ddp", "fsdp"):
        assert first[f"{under} plain"] == first[f"{under} none"]
        assert first[f"{under} plain:bf16"] == first[f"{under} none:bf16"]
    for name, losses in first.items():
        # 6 steps of AdamW with lr 1e-3 move the loss by about 0.4 nats; factors of rank 8 of these matrices lose the most.
        assert losses == pytest.approx(expected, abs=0.05 if "powersgd" in name else 0.01), name


@pytest.mark.parametrize(
    "text", ["plain:int8", "plain:powersgd=0", "none:powersgd=x", "plain:bf16=2", "unknown"]
)
def test_what_is_no_scheme_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        scheme(text)


def test_hooks_need_a_place() -> None:
    with pytest.raises(LayoutError, match="--ddp"):
        Plan(dataclasses.replace(CONFIG, steps=8), "tiny", ("plain:fp16",), block=2)
    with pytest.raises(LayoutError, match="--ddp"):
        Plan(dataclasses.replace(CONFIG, steps=8, zero=3), "tiny", ("plain:fp16",), block=2)
    with pytest.raises(SpecError, match="zero = 0"):
        dataclasses.replace(CONFIG, zero=1, ddp=True)


def test_a_policy_may_say_its_lanes() -> None:
    chosen = scheme("balanced@lanes=3")
    assert (chosen.name, chosen.lanes) == ("balanced@lanes=3", 3)
    assert chosen.policy == scheme("balanced").policy
    for wrong in ("plain@lanes=2", "balanced@lanes=0", "balanced@lanes=x"):
        with pytest.raises(SpecError, match="POLICY@lanes=N with N lanes"):
            scheme(wrong)


def test_sharding_schemes_are_among_them() -> None:
    config = dataclasses.replace(CONFIG, layout=Layout(dp=8))
    wiring = Wiring(ranks_per_host=2)
    found = scheme("zeropp").sharding(config, wiring)
    assert found is not None
    assert str(found.degrees) == "params=8,grads=8,optim=8,secondary=2"
    assert [p.name for p in scheme("zero3:bf16").policies(config, wiring)] == ["bf16", "bf16"]
    # Any policy runs with the degrees of the settings.
    own = dataclasses.replace(config, degrees=ShardingDegrees(2, 4, 8))
    found = scheme("bf16").sharding(own, wiring)
    assert found is not None
    assert found.degrees == own.degrees
    assert scheme("bf16").sharding(config, wiring) is None
    assert scheme("plain:bf16").sharding(config, wiring) is None
    with pytest.raises(SpecError):
        scheme("zero3:unknown")
    with pytest.raises(LayoutError, match="degrees of its own"):
        scheme("zeropp").sharding(own, wiring)

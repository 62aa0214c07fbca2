"""Memory and bytes of cut state, measured, against the table that the degrees stand for: within 2 %."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from support import TIMEOUT_S
from thinwire import Ladder, ShardedModel, Sharding, ShardingDegrees, sharding
from thinwire.launch import run_ranks

from .sharded_models import Net, loss_of

pytestmark = pytest.mark.usefixtures("kernels")
WIDTH, LAYERS, MICROS = 128, 3, 3
FAST = (ShardingDegrees(1, 2, 2), ShardingDegrees(2, 2, 4), ShardingDegrees(4, 4, 4, secondary=2))
SLOW = (
    ShardingDegrees(1, 1, 1),
    ShardingDegrees(1, 1, 4),
    ShardingDegrees(1, 2, 4),
    ShardingDegrees(2, 2, 2),
    ShardingDegrees(2, 4, 4),
    ShardingDegrees(4, 4, 4),
)


def live_bytes() -> int:
    """Bytes of all tensors that this process has, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def sent(ladder: Ladder, what: str) -> float:
    """Bytes that this rank's uncompressed messages need, of axis ``dp`` or ``zero``."""
    entries = [e for group in ladder.groups().values() for e in group.traffic.entries().items()]
    return sum(entry.raw_bytes for message, entry in entries if message.axis == what)


def _measure(
    rank: int, world: int, tuples: tuple[ShardingDegrees, ...], report: Any
) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for degrees in tuples:
        before = live_bytes()
        net = Net(WIDTH, LAYERS, torch.bfloat16)
        own = sum(p.numel() for p in net.parameters() if p.requires_grad)
        constant = net.frozen.nbytes
        ladder = Ladder(Sharding.of(degrees, "none"), ranks_per_host=2)
        model = ShardedModel(net, ladder, list(net.blocks), gradient_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.masters(), foreach=False)
        w = 2.0 * own
        for step in range(2):
            for group in ladder.groups().values():
                group.traffic.reset()
            model.start()
            for micro in range(MICROS):
                loss = loss_of(net, rank, step, micro)
                copies = model.held_bytes()["secondary"]
                loss.backward()
            for unit in model.units:
                for work in unit.works:
                    work.wait()
            del loss
            if step:  # gradients are here, and the optimizer's state from the first step
                memory = degrees.memory_nbytes(own)
                found[f"{degrees}: memory"] = (
                    live_bytes() - before - constant,
                    sum(memory.values()) - memory["secondary"],
                )
                found[f"{degrees}: secondary"] = copies, memory["secondary"]
            gathered, reduced = sent(ladder, "zero"), sent(ladder, "dp")
            model.finish()
            optimizer.step()
            model.commit()
        table, once = degrees.micro_batch_nbytes(w), degrees.step_nbytes(w, world)
        found[f"{degrees}: gather"] = gathered / MICROS, table["gather"]
        found[f"{degrees}: reduce"] = reduced / MICROS, table["reduce"]
        found[f"{degrees}: gather of a step"] = sent(ladder, "zero") - gathered, once["gather"]
        reduce_of_step = once["reduce"] + once["replicas"]
        found[f"{degrees}: reduce of a step"] = sent(ladder, "dp") - reduced, reduce_of_step
        model.close()
        ladder.close()
        del model, optimizer, net, unit, group, work
    return found


@pytest.mark.parametrize(
    "tuples", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["three", "others"]
)
def test_memory_and_traffic_are_those_of_the_table(tuples: tuple[ShardingDegrees, ...]) -> None:
    for found in run_ranks(_measure, 4, tuples, timeout=TIMEOUT_S):
        for what, (measured, expected) in found.items():
            assert measured == pytest.approx(expected, rel=0.02, abs=64), what


def _wire(rank: int, world: int, report: Any) -> dict[str, tuple[float, float]]:
    found = {}
    for degrees in (
        ShardingDegrees(4, 4, 4),
        ShardingDegrees(2, 4, 4),
        ShardingDegrees(4, 4, 4, secondary=2),
    ):
        net = Net(WIDTH, LAYERS)
        own = sum(p.numel() for p in net.parameters() if p.requires_grad)
        ladder = Ladder(Sharding.of(degrees, "bf16"), ranks_per_host=2)
        model = ShardedModel(net, ladder, list(net.blocks))
        model.start()
        loss_of(net, rank, 0, 0).backward()
        model.finish()
        model.commit()
        w = 2.0 * own
        table, once = degrees.micro_batch_nbytes(w), degrees.step_nbytes(w, world)
        sent = ladder.wire_bytes(inside=True) + ladder.wire_bytes(inside=False)
        found[str(degrees)] = sent, sum(table.values()) + sum(once.values())
        model.close()
        ladder.close()
    return found


def test_a_bf16_wire_sends_the_bytes_of_the_table() -> None:
    for found in run_ranks(_wire, 4, timeout=TIMEOUT_S):
        for what, (measured, expected) in found.items():
            assert measured == pytest.approx(expected, rel=0.02), what


def _between(rank: int, world: int, report: Any) -> dict[str, int]:
    found = {}
    for name in ("zero3:bf16", "zeropp", "sdp4"):
        net = Net(WIDTH, LAYERS)
        ladder = Ladder(sharding(name, world, ranks_per_host=2), ranks_per_host=2)
        model = ShardedModel(net, ladder, list(net.blocks))
        model.start()
        loss_of(net, rank, 0, 0).backward()
        model.finish()
        model.commit()
        found[name] = ladder.wire_bytes(inside=False)
        model.close()
        ladder.close()
    return found


def test_zeropp_and_sdp4_send_a_fraction_between_hosts() -> None:
    for found in run_ranks(_between, 4, timeout=TIMEOUT_S):
        # bf16: 2w of parameters and w of gradients; int8 is 8.25 bits a value, int4 4.25: 3 * 16 / (8.25 + 4.25) = 3.84.
        assert found["zero3:bf16"] / found["zeropp"] > 3.7
        # 3 * 16 / (4.25 + 4.25) = 5.65
        assert found["zero3:bf16"] / found["sdp4"] > 5.4

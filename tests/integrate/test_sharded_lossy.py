"""Cut state through codecs: the same bits on all ranks, second copies, differences, skipped and resumed steps, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from support import TIMEOUT_S, same
from thinwire import (
    GroupOptions,
    Ladder,
    ShardedModel,
    Sharding,
    ShardingDegrees,
    compression_state,
    load_compression,
)
from thinwire.errors import CheckpointError, LayoutError, MismatchError, ThinwireError, UnsupportedError
from thinwire.launch import run_ranks
from thinwire.policy import Policy, from_dict

from .sharded_models import Net, backward, cut, loss_of, sgd

pytestmark = pytest.mark.usefixtures("kernels")


def policy(
    name: str, gather: str, reduce: str, *, difference: bool = False, feedback: bool = False
) -> Policy:
    axes: dict[str, Any] = {
        "zero": {"gather": gather, "difference": difference, "min_nbytes": 0},
        "dp": {"reduce": reduce, "feedback": feedback, "min_nbytes": 0},
    }
    return from_dict({"axis": axes}, name)


ZEROPP = policy("zeropp", "int8:block=32", "int4:block=32")
STOCHASTIC = policy(
    "stochastic", "int8:block=32,round=stochastic", "int4:block=32,round=stochastic", feedback=True
)
SDP4 = policy("sdp4", "int4:block=32", "hadamard:block=32|int4:block=32", difference=True, feedback=True)
SDP4_INSIDE = from_dict({"axis": {"dp": {"reduce": "int8:block=32", "min_nbytes": 0}}}, "inside")
# degrees, policy, inside
CASES: dict[str, tuple[ShardingDegrees, Policy, Policy | str]] = {
    "zeropp": (ShardingDegrees(4, 4, 4, secondary=2), ZEROPP, "none"),
    "zero3": (ShardingDegrees(4, 4, 4), STOCHASTIC, STOCHASTIC),
    "sdp4": (ShardingDegrees(2, 4, 4), SDP4, SDP4_INSIDE),
    "zero1": (ShardingDegrees(1, 1, 4), SDP4, SDP4),
    "replicas": (ShardingDegrees(1, 2, 2), STOCHASTIC, STOCHASTIC),
    "bf16": (ShardingDegrees(2, 2, 4), ZEROPP, "none"),
}


def make(case: str, net: Net, **options: Any) -> ShardedModel:
    degrees, between, inside = CASES[case]
    return cut(net, degrees, between, inside, ranks_per_host=2, rollback=True, **options)


def net_of(case: str) -> Net:
    return Net(32, 2, torch.bfloat16 if case == "bf16" else torch.float32)


def snapshot(model: ShardedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def step_of(model: ShardedModel, net: Net, rank: int, step: int) -> float:
    loss = backward(model, net, rank, step, scale=8.0)
    sgd(model, 0.05)
    return loss


def _train(rank: int, world: int, report: Any) -> dict[str, list[float]]:
    found = {}
    for case in CASES:
        net = net_of(case)
        model = make(case, net)
        losses = [step_of(model, net, rank, step) for step in range(3)]
        model.check()
        with torch.no_grad():  # between steps: nothing may be left of it
            before = loss_of(net, rank, 3, 0).item()
        saved = snapshot(model)
        goes_on = [step_of(model, net, rank, step) for step in (3, 4)]

        # A skipped step changes nothing but the counter of steps.
        kept = snapshot(model)
        backward(model, net, rank, 5)
        model.skip()
        for name, tensor in snapshot(model).items():
            assert name == "counters" or torch.equal(tensor, kept[name]), (
                f"{case}: {name} after a skipped step"
            )

        # Resumed in a model of other values: the same bits.
        torch.manual_seed(7)
        other = net_of(case)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(0.5) if p.requires_grad else None
        resumed = make(case, other)
        resumed.load_state_dict(saved)
        with torch.no_grad():
            assert loss_of(other, rank, 3, 0).item() == before, case
        assert [step_of(resumed, other, rank, step) for step in (3, 4)] == goes_on, case
        for name, tensor in resumed.parameters().items():
            assert same(tensor, model.parameters()[name]), f"{case}: {name}"

        # What was saved is not what its source gives: said on every rank, by the unit's name.
        broken = {name: tensor.clone() for name, tensor in saved.items()}
        derived = resumed.units[1].shard is not resumed.units[1].master
        source = "digest" if not derived else "sent" if resumed.difference else "master"
        if rank == 1:
            broken[f"blocks.1.{source}"][3] += 1
        with pytest.raises(CheckpointError, match=r"rank [01]: unit\(s\) blocks.1"):
            resumed.load_state_dict(broken)
        del broken["blocks.0.master"]
        with pytest.raises(CheckpointError, match=r"blocks.0.master"):
            resumed.load_state_dict(broken)
        found[case] = losses + goes_on
        for done in (model, resumed):
            done.close()
            done.ladder.close()
    return found


def test_same_bits_skipped_steps_and_resume() -> None:
    # DeepSpeed 4851, DeepSpeed 7164, DeepSpeed 7606
    exact = run_ranks(_exact, 4, timeout=TIMEOUT_S)
    for rank, found in enumerate(run_ranks(_train, 4, timeout=TIMEOUT_S)):
        for case, losses in found.items():
            assert losses == pytest.approx(exact[rank], rel=0.05), case


def _exact(rank: int, world: int, report: Any) -> list[float]:
    net = net_of("exact")
    model = cut(net, ShardingDegrees(4, 4, 4))
    return [step_of(model, net, rank, step) for step in range(5)]


def _copies(rank: int, world: int, report: Any) -> None:
    for secondary in (None, 2, 1):
        net = Net(32)
        degrees = ShardingDegrees(4, 4, 4, secondary)
        model = cut(net, degrees, ZEROPP, "none", ranks_per_host=2)
        between = lambda: sum(  # noqa: E731
            entry.tally.wire_bytes
            for rung in model.ladder.rungs  # noqa: B023
            if not rung.inside
            for message, entry in rung.gathers.traffic.entries().items()
            if message.role == "parameter"
        )
        model.start()
        loss = loss_of(net, rank, 0, 0)
        model.drop() if secondary is None else None
        forward = between()
        loss.backward()
        backward_bytes = between() - forward
        assert forward > 0
        # The copy on the host serves the backward pass; without one it is gathered over the links again.
        assert backward_bytes == (0 if secondary else forward), (secondary, forward, backward_bytes)
        model.finish()
        model.skip()
        assert model.held_bytes()["secondary"] == 0
        model.close()
        model.ladder.close()


def test_the_second_copy_keeps_the_backward_pass_on_the_host() -> None:
    run_ranks(_copies, 4, timeout=TIMEOUT_S)


def _checkpoint(rank: int, world: int, folder: Path, report: Any) -> None:
    def new(degrees: ShardingDegrees) -> tuple[Net, ShardedModel]:
        net = Net(32)
        return net, cut(net, degrees, ZEROPP, rollback=True)

    degrees = ShardingDegrees(1, 2, 2)
    net, model = new(degrees)
    step_of(model, net, rank, 0)
    dcp.save(dict(compression_state(model)), checkpoint_id=folder)
    expected = step_of(model, net, rank, 1)
    again, resumed = new(degrees)
    assert load_compression(resumed, checkpoint_id=folder).exact
    assert step_of(resumed, again, rank, 1) == expected
    for name, tensor in resumed.parameters().items():
        assert same(tensor, model.parameters()[name]), name
    with pytest.raises(CheckpointError, match="was saved with degrees params=1,grads=2,optim=2 on 2 ranks"):
        load_compression(new(ShardingDegrees(2, 2, 2))[1], checkpoint_id=folder)


def test_state_goes_through_a_distributed_checkpoint(tmp_path: Path) -> None:
    run_ranks(_checkpoint, 2, tmp_path, timeout=TIMEOUT_S)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.blocks[1].weight = self.blocks[0].weight


def _in_levels(rank: int, world: int, report: Any) -> list[Tensor]:
    levels = {axis: replace(p, algorithm="hierarchical") for axis, p in ZEROPP.axes.items()}
    found = []
    for axes in (ZEROPP.axes, levels):
        net = net_of("zero3")
        scheme = Sharding.of(ShardingDegrees(world, world, world), Policy("levels", axes))
        model = ShardedModel(net, Ladder(scheme, options=GroupOptions(host=str(rank))))
        step_of(model, net, rank, 0)
        found.append(torch.cat([p.reshape(-1) for p in model.parameters().values()]))
        model.close()
    return found


def test_a_policy_in_levels_knows_the_hosts_of_each_rung() -> None:
    for flat, levels in run_ranks(_in_levels, 2, timeout=TIMEOUT_S):
        assert same(flat, levels), "with a rank on each host it is the flat one"


def _refused(rank: int, world: int, report: Any) -> None:
    def refuse(
        kind: type[ThinwireError], match: str, degrees: ShardingDegrees, *args: Any, **options: Any
    ) -> None:
        net = options.pop("net", None) or Net()
        with pytest.raises(kind, match=match):
            cut(net, degrees, *args, **options)
        dist.barrier()  # all ranks have ended it

    refuse(LayoutError, "params=2 does not divide grads=1", ShardingDegrees(2, 1, 2))
    refuse(LayoutError, "not inside a host", ShardingDegrees(4, 4, 4, 4), ranks_per_host=2)
    refuse(LayoutError, "not 3 on each host", ShardingDegrees(), ranks_per_host=3)
    refuse(UnsupportedError, "that are gathered for a pass", ShardingDegrees(4, 4, 4), SDP4, ranks_per_host=2)
    low_rank = from_dict({"axis": {"dp": {"reduce": "lowrank", "feedback": True}}}, "low")
    refuse(UnsupportedError, "whole matrices", ShardingDegrees(4, 4, 4), low_rank)
    refuse(UnsupportedError, "float16", ShardingDegrees(4, 4, 4), gradient_dtype=torch.float16)
    refuse(UnsupportedError, "must be in one unit", ShardingDegrees(4, 4, 4), net=Shared())
    mixed = Net()
    mixed.blocks[0].up.bfloat16()  # type: ignore[union-attr, operator]
    refuse(
        UnsupportedError,
        "unit blocks.0 has parameters of torch.bfloat16, torch.float32",
        ShardingDegrees(4, 4, 4),
        net=mixed,
    )
    other = Net()
    if rank == 2:
        with torch.no_grad():
            other.blocks[1].up.bias[0] += 1  # type: ignore[union-attr, index]
    refuse(MismatchError, "unit blocks.1: values at the start of rank 2", ShardingDegrees(4, 4, 4), net=other)


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    run_ranks(_refused, 4, timeout=TIMEOUT_S)


def _dead(rank: int, world: int, report: Any) -> str:
    net = Net()
    scheme = Sharding.of(ShardingDegrees(4, 4, 4), ZEROPP)
    model = ShardedModel(net, Ladder(scheme), list(net.blocks))
    backward(model, net, rank, 0)
    if rank == 3:
        for group in model.ladder.groups().values():
            group.abort()
        return ""
    try:
        model.commit()
        backward(model, net, rank, 1)
    except ThinwireError as e:
        return str(e)
    return "nothing was raised"


def test_a_lost_peer_ends_the_others() -> None:
    for error in run_ranks(_dead, 4, timeout=TIMEOUT_S)[:3]:
        assert "rank" in error

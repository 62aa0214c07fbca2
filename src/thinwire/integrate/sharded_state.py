"""What a checkpoint holds of a model whose state is cut, and what is made again from it and must have the same bits.

Parameters at their own degree are derived: they are the masters as the last gather after a step has decoded them. So that
gather is run again on load, with the seeds that it had; or, where differences travel, what had been sent is put together
again from the parts of it that were saved. Then each rank compares a digest of what it has with that of what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CheckpointError, MismatchError
from ..feedback import take_back
from .sharded_units import Unit, digest, part_of

if TYPE_CHECKING:
    from .sharded import ShardedModel

_DIGEST_NBYTES = 32
_REMEDY = "resume with the model, units, degrees and policies that the checkpoint was written with"


def make_digests(model: ShardedModel) -> list[Tensor]:
    """Where each unit's digest is put."""
    return [torch.zeros(_DIGEST_NBYTES, dtype=torch.uint8) for _ in model.units]


def state_dict(model: ShardedModel) -> dict[str, Tensor]:
    """See :meth:`.sharded.ShardedModel.state_dict`."""
    found = {"counters": model.counters}
    for unit, kept in zip(model.units, model.digests, strict=True):
        kept.copy_(_digest(unit))
        found |= {f"{unit.name}.master": unit.master, f"{unit.name}.digest": kept}
        if model.difference:
            found[f"{unit.name}.sent"] = part_of_shard(unit, model)
        for feedback in unit.residuals.values():
            found |= feedback.state_dict()
    return found


def load_state_dict(model: ShardedModel, saved: dict[str, Tensor]) -> None:
    """See :meth:`.sharded.ShardedModel.load_state_dict`."""
    wrong = None
    try:
        take_back(state_dict(model), saved, "cut state", _REMEDY)
    except CheckpointError as e:
        wrong = str(e)
    _agree(CheckpointError, wrong)
    rebuild(model)


@torch.no_grad()
def rebuild(model: ShardedModel) -> None:
    """Make the parameters again from masters and what was sent, and compare them with the digests. Every rank calls it.

    Raises CheckpointError, on every rank, with the units that are not what they were.
    """
    model.drop()
    degrees, ladder, step = model.degrees, model.ladder, int(model.counters[1])
    expected = [bytes(kept.tolist()) for kept in model.digests]
    for unit in model.units:
        if unit.shard is unit.master:
            continue
        if model.difference:
            part = part_of_shard(unit, model).clone()
            unit.shard.copy_(ladder.gather_exact(part, degrees.optim, degrees.params))
        elif step < 0:
            part = unit.master.to(unit.dtype)
            unit.shard.copy_(ladder.gather_exact(part, degrees.optim, degrees.params))
        else:
            new = model.new_shard(unit, step)
            assert new is not None
            unit.shard.copy_(new)
    wrong = [
        unit.name
        for unit, before in zip(model.units, expected, strict=True)
        if bytes(_digest(unit).tolist()) != before
    ]
    text = None
    if wrong:
        text = (
            f"unit(s) {', '.join(wrong)}: the parameters that were made again from the masters are not those that were "
            f"saved; {_REMEDY}, or load the parameters alone"
        )
    _agree(CheckpointError, text)


def parameters(model: ShardedModel) -> dict[str, Tensor]:
    """See :meth:`.sharded.ShardedModel.parameters`."""
    whole: dict[str, Tensor] = {}
    for unit in model.units:
        whole |= unit.cut(model.ladder.gather_exact(unit.master, model.degrees.optim, 1))
    return whole


@torch.no_grad()
def load_parameters(model: ShardedModel, values: dict[str, Tensor]) -> None:
    """See :meth:`.sharded.ShardedModel.load_parameters`."""
    missing = [m.name for unit in model.units for m in unit.members if m.name not in values]
    if missing:
        raise CheckpointError(f"parameter {missing[0]} is missing ({len(missing)} of them)")
    model.drop()
    for unit in model.units:
        whole = unit.flatten(values, torch.float32)
        unit.master.copy_(part_of(whole, model.ladder, model.degrees.optim))
        if unit.shard is not unit.master:
            unit.shard.copy_(part_of(whole, model.ladder, model.degrees.params))
        for feedback in unit.residuals.values():
            feedback.sender.zero_()
            feedback.owner.zero_()
    model.counters[1] = -1


def part_of_shard(unit: Unit, model: ShardedModel) -> Tensor:
    """The optimizer's part of a unit's shard: a view."""
    degrees, ladder = model.degrees, model.ladder
    begin = ladder.begin(unit.numel, degrees.optim) - ladder.begin(unit.numel, degrees.params)
    return unit.shard[begin : begin + unit.master.numel()]


def check_same(
    model: ShardedModel, what: str, tensors: Callable[[Unit], Sequence[Tensor]], degree: int
) -> None:
    """Raise MismatchError, on every rank, unless ranks that hold the same part at ``degree`` have the same bits."""
    mine = [digest(tensors(unit)) for unit in model.units]
    everyone: list[list[bytes]] = from_all(mine)
    for unit in model.units:
        for rank, found in enumerate(everyone):
            if found[unit.index] != everyone[rank % degree][unit.index]:
                raise MismatchError(
                    f"unit {unit.name}: {what} of rank {rank} are not those of rank {rank % degree}, which holds the same "
                    "part; give all ranks the same model (one seed, or a broadcast) before it is cut"
                )


def from_all(value: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _agree(kind: type[Exception], wrong: str | None) -> None:
    """Raise on every rank if something is wrong on any."""
    texts: list[str | None] = from_all(wrong)
    for rank, text in enumerate(texts):
        if text is not None:
            raise kind(f"rank {rank}: {text}")


def _digest(unit: Unit) -> Tensor:
    return torch.frombuffer(bytearray(digest([unit.shard])), dtype=torch.uint8)

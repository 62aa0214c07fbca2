"""What a checkpoint holds of each thing that has a state, and what of it has a meaning for another number of ranks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CheckpointError, UnsupportedError
from ..group import ThinwireGroup
from .ddp import DdpCompression
from .fsdp import FsdpCompression
from .gradients import GradientSync
from .sharded import ShardedModel

Layout = dict[str, Any]
"""How a part's tensors lie in messages, of JSON's types."""
_CALLS, _STATES = "calls", "states"
_OWNER, _Q, _STEPS = ".owner", ".q", "steps"


class Saved(Protocol):
    """What ``ranks`` ranks have saved of a part."""

    ranks: int

    def names(self, rank: int = 0) -> list[str]: ...

    def read(self, rank: int, names: Sequence[str] | None = None) -> dict[str, Tensor]: ...


class Part(ABC):
    """Something with a state, over the ranks of a group. first: the group's first rank in the world."""

    kind: str

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = group.rank() if group is not None else 0
        self.size = group.size() if group is not None else 1
        if group is not None:
            self.first = dist.get_process_group_ranks(group)[0]
        else:
            self.first = dist.get_rank() if dist.is_initialized() else 0

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The state, sharing memory with the live tensors."""

    def layout(self) -> Layout:
        return {}

    def fits(self, layout: Layout) -> bool:
        """Whether as many ranks as those that had this layout can each go on with what they have saved themselves."""
        return layout == self.layout()

    @abstractmethod
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take this rank's own state back."""

    @abstractmethod
    def load_other(self, saved: Saved, layout: Layout) -> list[str]:
        """Take what has a meaning here of what other ranks have saved; what begins anew, in words."""


def group_part(group: ThinwireGroup) -> Part:
    return _Group(group)


def part_of(thing: object) -> Part:
    """The part of something that is not a group. Raises UnsupportedError if it has no state."""
    if isinstance(thing, GradientSync):
        return _Sync(thing)
    if isinstance(thing, DdpCompression):
        return _Ddp(thing)
    if isinstance(thing, FsdpCompression):
        return _Fsdp(thing)
    if isinstance(thing, ShardedModel):
        return _Cut(thing)
    raise UnsupportedError(
        f"{type(thing).__name__} has no state of compression; GradientSync, DdpCompression, FsdpCompression, ShardedModel "
        "and thinwire groups have"
    )


class _Group(Part):
    """Counters of calls, which seeds depend on; codebooks, and what monitors know."""

    def __init__(self, group: ThinwireGroup) -> None:
        super().__init__(group)
        self._group = group
        self.kind = f"group-{group.axis()}"

    def tensors(self) -> dict[str, Tensor]:
        states = torch.frombuffer(bytearray(self._group.codec_states()), dtype=torch.uint8)
        return {_CALLS: self._group.calls, _STATES: states}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._group.load_codec_states(bytes(tensors[_STATES].tolist()))
        self._group.calls.copy_(tensors[_CALLS])

    def load_other(self, saved: Saved, layout: Layout) -> list[str]:
        calls = [saved.read(rank, [_CALLS])[_CALLS] for rank in range(saved.ranks)]
        # The same on all ranks, and new for each call: no rank has had more.
        self._group.calls.copy_(torch.stack(calls).amax(0))
        states = json.loads(bytes(saved.read(0, [_STATES])[_STATES].tolist()) or b"{}")
        # Of collectives all ranks know the same; a send's peer may be no more.
        monitors = {k: v for k, v in states.get("monitors", {}).items() if k.endswith(" collectives")}
        self._group.load_codec_states(json.dumps({"codecs": [], "calls": 0, "monitors": monitors}).encode())
        return [f"codebooks of axis {self._group.axis()}"] if any(states.get("codecs", [])) else []


class _Fsdp(Part):
    kind = "fsdp"

    def __init__(self, compression: FsdpCompression) -> None:
        super().__init__(compression.group)
        self._compression = compression

    def tensors(self) -> dict[str, Tensor]:
        return self._compression.state_dict()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._compression.load_state_dict(tensors)

    def load_other(self, saved: Saved, layout: Layout) -> list[str]:
        # FSDP runs its collectives with one rank, too, so residuals are there.
        self._compression.load_state_dict({**saved.read(0, [_STEPS]), **mean_residuals(saved)})
        return []


class _Cut(Part):
    """Each rank's parts are a part of their own: no two ranks need have the same."""

    kind = "cut"

    def __init__(self, model: ShardedModel) -> None:
        super().__init__(None)
        self._model = model

    def tensors(self) -> dict[str, Tensor]:
        return self._model.state_dict()

    def layout(self) -> Layout:
        units = [[unit.name, unit.numel] for unit in self._model.units]
        return {"degrees": str(self._model.degrees), "ranks": self._model.ladder.world, "units": units}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._model.load_state_dict(tensors)

    def load_other(self, saved: Saved, layout: Layout) -> list[str]:
        raise CheckpointError(
            f"cut state was saved with degrees {layout['degrees']} on {layout['ranks']} ranks, here are "
            f"{self._model.degrees} on {self._model.ladder.world}, or other units: save ShardedModel.parameters(), "
            "too, and load those with load_parameters"
        )


class _Ddp(Part):
    kind = "ddp"

    def __init__(self, compression: DdpCompression) -> None:
        super().__init__(compression.group)
        self._compression = compression

    def tensors(self) -> dict[str, Tensor]:
        return self._compression.state_dict()

    def layout(self) -> Layout:
        return {"buckets": self._compression.buckets()}

    def fits(self, layout: Layout) -> bool:
        return True  # residuals find their places when DDP makes its buckets

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._compression.load_state_dict(tensors)

    def load_other(self, saved: Saved, layout: Layout) -> list[str]:
        if self.size == 1:
            return _dropped(saved)
        residuals = mean_residuals(saved)
        # Owners compensate a mean.
        add_owners(residuals, saved, layout["buckets"], 1.0)
        same = saved.read(0, [name for name in saved.names() if name.endswith(_Q) or name == _STEPS])
        self._compression.load_state_dict({**residuals, **same})
        return _begun(saved)


class _Sync(Part):
    kind = "sync"

    def __init__(self, sync: GradientSync) -> None:
        super().__init__(sync.group)
        self._sync = sync

    def tensors(self) -> dict[str, Tensor]:
        # The group's counter is the group's.
        return {name: tensor for name, tensor in self._sync.state_dict().items() if name != _CALLS}

    def layout(self) -> Layout:
        buckets = [[[m.name, m.end - m.begin] for m in b.members] for b in self._sync.buckets]
        return {"sharded": self._sync.sharded, "buckets": buckets}

    def load(self, tensors: dict[str, Tensor]) -> None:
        calls = {name: t for name, t in self._sync.state_dict().items() if name == _CALLS}
        self._sync.load_state_dict({**tensors, **calls})

    def load_other(self, saved: Saved, layout: Layout) -> list[str]:
        live = self._sync.state_dict()
        masters = self._masters(saved, layout)
        self._check_same_parameters(masters)
        residuals = mean_residuals(saved)
        # Owners compensate a sum, which is divided after they have encoded it.
        add_owners(residuals, saved, layout["buckets"], 1.0 / saved.ranks)
        state = {name: t for name, t in live.items() if name == _CALLS}
        for index, bucket in enumerate(self._sync.buckets):
            state[f"bucket{index}.master"] = self._sync.shard_of(bucket, masters)
        state |= {name: torch.zeros_like(t) for name, t in live.items() if name.endswith(_OWNER)}
        state |= residuals | saved.read(0, [name for name in saved.names() if name.endswith(_Q)])
        if saved.ranks == 1:
            state = {n: torch.zeros_like(t) if _is_residual(n) else t for n, t in live.items()} | state
        self._sync.load_state_dict(state)
        return _dropped(saved) if self.size == 1 else _begun(saved)

    def _masters(self, saved: Saved, layout: Layout) -> dict[str, Tensor]:
        """The masters by parameter, whole."""
        masters: dict[str, Tensor] = {}
        ranks = range(saved.ranks if layout["sharded"] else 1)
        for index, members in enumerate(layout["buckets"]):
            name = f"bucket{index}.master"
            flat = torch.cat([saved.read(rank, [name])[name] for rank in ranks])
            masters |= _cut(flat, members)
        return masters

    def _check_same_parameters(self, masters: Mapping[str, Tensor]) -> None:
        mine = {m.name: m.end - m.begin for bucket in self._sync.buckets for m in bucket.members}
        theirs = {name: master.numel() for name, master in masters.items()}
        if mine != theirs:
            differ = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
            raise CheckpointError(
                f"gradient sync: the checkpoint is of other parameters: {', '.join(differ)} differ in size, or are in "
                "one of the two only"
            )


def mean_residuals(saved: Saved) -> dict[str, Tensor]:
    """The mean over the old ranks of each sender's residual, fp32, flat, by name.

    A mean gradient over W ranks is (g_1 + r_1 + ... + g_W + r_W) / W. With the mean of r on each of W' ranks, the mean over
    these has the same correction.
    """
    sums: dict[str, Tensor] = {}
    for rank in range(saved.ranks):
        names = [name for name in saved.names(rank) if _is_residual(name)]
        for name, tensor in saved.read(rank, names).items():
            values = tensor.reshape(-1).float()
            sums[name] = sums[name].add_(values) if name in sums else values
    return {name: total.div_(saved.ranks) for name, total in sums.items()}


def add_owners(
    residuals: dict[str, Tensor], saved: Saved, buckets: Sequence[Sequence[Sequence[Any]]], unit: float
) -> None:
    """Add what the owners of chunks held to the residuals. buckets: [name, numel] of members, as they lay in messages.

    unit: of owners' residuals, in means.
    """
    for members in buckets:
        owner = next(
            (n for n in saved.names() if n.endswith(_OWNER) and n.startswith(f"{members[0][0]}@")), None
        )
        if owner is None:
            continue
        axis = owner.removesuffix(_OWNER).rpartition("@")[2]
        parts = [saved.read(r, [owner])[owner] for r in range(saved.ranks) if owner in saved.names(r)]
        for name, values in _cut(torch.cat(parts), members).items():
            residual = residuals.get(f"{name}@{axis}")
            if residual is not None:
                residual.add_(values, alpha=unit)


def _cut(flat: Tensor, members: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
    return dict(_slices(flat, members))


def _slices(flat: Tensor, members: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Tensor]]:
    begin = 0
    for name, numel in members:
        yield name, flat[begin : begin + numel]
        begin += numel


def _is_residual(name: str) -> bool:
    return "@" in name and not name.endswith((_OWNER, _Q))


def _dropped(saved: Saved) -> list[str]:
    had = any(map(_is_residual, saved.names()))
    return ["residuals, which one rank has no use for"] if had else []


def _begun(saved: Saved) -> list[str]:
    return ["residuals, which one rank did not have"] if saved.ranks == 1 else []

"""Compression's state in ``torch.distributed.checkpoint``: residuals, masters, low-rank starts, codebooks, counters.

All of it is a rank's own, so names in the checkpoint hold the rank. ::

    dcp.save({"model": model.state_dict(), **thinwire.compression_state(sync)}, checkpoint_id=path)
    ...
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    thinwire.load_compression(sync, checkpoint_id=path)

The same number of ranks goes on bit for bit. Another number gets what has a meaning there, see :func:`load_compression`.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from ..errors import CheckpointError
from ..group import ThinwireGroup
from .checkpoint_parts import Part, group_part, part_of
from .ddp import DdpCompression
from .fsdp import FsdpCompression
from .gradients import GradientSync
from .sharded import ShardedModel

Compression = GradientSync | DdpCompression | FsdpCompression | ShardedModel | ThinwireGroup
"""What has a state."""
_LAYOUT = "layout"


@dataclass(frozen=True)
class LoadedCompression:
    """What became of a saved state. exact: the run goes on bit for bit. ranks: how many had saved it.

    reset: what begins anew, in words; empty if ``exact``.
    """

    exact: bool
    ranks: int
    reset: tuple[str, ...] = ()


def compression_state(*parts: Compression, name: str = "compression") -> dict[str, Tensor]:
    """This rank's entries for a distributed checkpoint of ``parts``, and of the thinwire groups that they use.

    Every rank calls it, between steps (no calls under way), with its parts in the same order, and gives the entries to
    ``dcp.save`` as they are. Tensors share memory with the live ones; no process group is among them. name: what the
    entries' names begin with. Raises UnsupportedError for something that has no state.
    """
    state: dict[str, Tensor] = {}
    for index, part in enumerate(_with_groups(parts)):
        place = f"{_prefix(name, index, part)}.from{part.first}.rank{part.rank}of{part.size}/"
        state |= {place + key: tensor for key, tensor in part.tensors().items()}
        state[place + _LAYOUT] = _bytes(json.dumps(part.layout()).encode())
    return state


def load_compression(
    *parts: Compression,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    name: str = "compression",
) -> LoadedCompression:
    """Give ``parts`` the state of :func:`compression_state` in a checkpoint; every rank calls it, before the first step.

    checkpoint_id, storage_reader: as of ``dcp.load``; with the first alone, a folder. As many ranks, and the same buckets:
    everything is as it was, bit for bit. Otherwise:

    - Residuals: every rank gets the mean of the old ranks' residuals, what the owners of chunks held included. So what is
      still to be sent of each mean gradient is what it was.
    - Masters of GradientSync are cut anew, exactly, Q of low-rank reductions are kept, and so are counters.
    - Codebooks begin anew (the first messages are larger), and so does what monitors know of sends and receives.
    - The state of a ShardedModel is for the same ranks and degrees only.
    - One rank encodes nothing: residuals are dropped. From one rank: they begin at 0.

    Nothing is changed in the checkpoint, and ranks do not talk. Warns, and says in what it returns, what begins anew. Raises
    CheckpointError if the state is not there, or is of other parameters; parts before the one that fails are loaded then.
    """
    if storage_reader is None:
        if checkpoint_id is None:
            raise CheckpointError("give checkpoint_id, or a storage_reader")
        storage_reader = FileSystemReader(checkpoint_id)
    elif checkpoint_id is not None:
        storage_reader.reset(checkpoint_id)
    where = str(checkpoint_id if checkpoint_id is not None else storage_reader)
    try:
        entries = storage_reader.read_metadata().state_dict_metadata
    except (OSError, CheckpointException) as e:
        raise CheckpointError(f"{where} is no distributed checkpoint: {e}") from e
    exact, ranks, reset = True, 0, list[str]()
    everything = [
        (part, _find(entries, _prefix(name, index, part), part, storage_reader, where))
        for index, part in enumerate(_with_groups(parts))
    ]
    # Groups first: the counters that other parts hold are theirs.
    for part, saved in reversed(everything):
        layout = json.loads(bytes(saved.read(0, [_LAYOUT])[_LAYOUT].tolist()))
        ranks = max(ranks, saved.ranks)
        if saved.ranks == part.size and part.fits(layout):
            tensors = saved.read(part.rank)
            del tensors[_LAYOUT]
            part.load(tensors)
        else:
            exact = False
            reset += part.load_other(saved, layout)
    if not exact:
        now = max((part.size for part, _ in everything), default=1)
        begins = f"; begins anew: {', '.join(reset)}" if reset else ""
        warnings.warn(
            f"compression's state was saved by {ranks} rank(s) and is loaded by {now}, or with other buckets: the run does "
            f"not go on bit for bit{begins}",
            stacklevel=2,
        )
    return LoadedCompression(exact, ranks, tuple(reset))


class Saved:
    """A part's entries in a checkpoint: tensors by name, for each of the ranks that saved it."""

    def __init__(
        self,
        by_rank: Mapping[int, Mapping[str, tuple[str, TensorStorageMetadata]]],
        reader: StorageReader,
        where: str,
    ) -> None:
        self._by_rank = by_rank
        self._reader = reader
        self._where = where
        self.ranks = len(by_rank)

    def names(self, rank: int = 0) -> list[str]:
        """What a rank has saved."""
        return list(self._by_rank[rank])

    def read(self, rank: int, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Tensors of one of the old ranks, new ones, on the CPU. names: None: all. Raises CheckpointError."""
        found = self._by_rank[rank]
        wanted = {key: found[key] for key in (found if names is None else names)}
        tensors: dict[str, Any] = {
            entry: torch.empty(stored.size, dtype=stored.properties.dtype)
            for entry, stored in wanted.values()
        }
        try:
            with warnings.catch_warnings():
                # That nobody else takes part is what is wanted.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                state_dict_loader.load(tensors, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, OSError, RuntimeError) as e:
            raise CheckpointError(f"{self._where} cannot be loaded: {e}") from e
        return {key: tensors[entry] for key, (entry, _) in wanted.items()}


def _with_groups(parts: Sequence[Compression]) -> list[Part]:
    """The parts as they are given, then each thinwire group in them once."""
    found = [part_of(p) for p in parts if not isinstance(p, ThinwireGroup)]
    groups: list[ThinwireGroup] = []
    for part in parts:
        group = part if isinstance(part, ThinwireGroup) else getattr(part, "group", None)
        if isinstance(group, ThinwireGroup) and not any(group is known for known in groups):
            groups.append(group)
    return [*found, *map(group_part, groups)]


def _prefix(name: str, index: int, part: Part) -> str:
    return f"{name}/{index}.{part.kind}"


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _find(entries: Mapping[str, Any], prefix: str, part: Part, reader: StorageReader, where: str) -> Saved:
    """The entries of the group of ranks that saved what this rank's group now loads."""
    # Whoever nests the entries in a dict of their own has a name in front of them.
    pattern = re.compile(rf"(?:^|\.){re.escape(prefix)}\.from(\d+)\.rank(\d+)of(\d+)/(.+)$")
    groups: dict[int, dict[int, dict[str, tuple[str, TensorStorageMetadata]]]] = {}
    sizes: dict[int, int] = {}
    for entry, stored in entries.items():
        match = pattern.search(entry)
        if match is not None and isinstance(stored, TensorStorageMetadata):
            first, rank, size = (int(match[i]) for i in (1, 2, 3))
            groups.setdefault(first, {}).setdefault(rank, {})[match[4]] = entry, stored
            sizes[first] = size
    if not groups:
        raise CheckpointError(
            f"{where} has no {prefix}: save with thinwire.compression_state, with the same parts in the same order and the "
            "same name"
        )
    first = part.first if part.first in groups else min(groups)
    if part.first not in groups and len(groups) > 1:
        raise CheckpointError(
            f"{where} has {prefix} of groups that began at ranks {sorted(groups)}, this rank's begins at {part.first}: "
            "which of them it was is not known; give the groups of each place in the mesh a name of their own"
        )
    found = groups[first]
    if sorted(found) != list(range(sizes[first])):
        raise CheckpointError(
            f"{where} is incomplete: {prefix} was saved by {sizes[first]} ranks, those of {sorted(found)} are there"
        )
    return Saved(found, reader, where)

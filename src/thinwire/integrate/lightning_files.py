"""Residuals beside Lightning's checkpoints: a file for each rank, where the checkpoint itself is one file of rank 0's.

Gathered into that file they would cost rank 0 the memory, and the network the bytes, of a model for each rank. ::

    checkpoints/epoch=0-step=100.ckpt                   Lightning's; it holds the mark
    checkpoints/thinwire-rank0/epoch=0-step=100.ckpt    rank 0's residuals, and the same mark
    checkpoints/thinwire-rank1/epoch=0-step=100.ckpt

A rank reads only what it has written itself, so a folder that hosts do not share will do as well. Lightning's plugin reads
and writes them, so they lie where its checkpoints do. (:mod:`.rank_files` is for checkpoints that are folders.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import CheckpointError

KEY = "thinwire"
"""Where a checkpoint, and a rank's file, hold the mark."""
Path = str | os.PathLike[str]
Read = Callable[[str], Mapping[str, Any]]
"""Loads a file; raises FileNotFoundError if there is none."""


@dataclass(frozen=True)
class Mark:
    """What the files of one checkpoint have in common. id: different for each saving. ranks: how many have written.
    policy: its text."""

    id: str
    ranks: int
    policy: str


def rank_path(checkpoint: Path, rank: int) -> str:
    """A rank's file for a checkpoint. One folder a rank, so that who lists a folder of checkpoints finds only these."""
    folder, name = os.path.split(os.fspath(checkpoint))
    return os.path.join(folder, f"thinwire-rank{rank}", name)


def contents(mark: Mark, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a rank's file holds; only what ``torch.load(weights_only=True)`` takes. states: of the models."""
    return {KEY: asdict(mark), "states": [dict(state) for state in states]}


def read(
    checkpoint: Path, saved: Any, rank: int, ranks: int, policy: str, load: Read
) -> list[dict[str, Any]]:
    """The states in a rank's file of ``checkpoint``.

    saved: the checkpoint's mark, as a dict. ranks, policy: of this run. load: see :data:`Read`. Raises CheckpointError,
    which says what to do, if they were written by other ranks or under another policy, or if the file is missing or
    belongs to another saving.
    """
    remedy = "or begin with none: resume_without_residuals=True"
    mark = Mark(**saved)
    if mark.ranks != ranks:
        raise CheckpointError(
            f"{checkpoint} has residuals of {mark.ranks} ranks, and this run has {ranks}: resume with {mark.ranks}, {remedy}"
        )
    if mark.policy != policy:
        raise CheckpointError(
            f"{checkpoint} was written under policy {mark.policy}, and this run has {policy}: resume with that, {remedy}"
        )
    # ModelCheckpoint(save_last="link") makes last.ckpt a link to a file that has another name.
    real = os.path.realpath(checkpoint) if os.path.islink(checkpoint) else checkpoint
    path = rank_path(real, rank)
    try:
        found = load(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{checkpoint} comes with residuals of rank {rank} in {path}, which does not exist: put it there, {remedy}"
        ) from None
    other = Mark(**found[KEY])
    if other.id != mark.id:
        raise CheckpointError(
            f"{path} belongs to another saving than {checkpoint} (one of them was overwritten): take both from one, {remedy}"
        )
    states: list[dict[str, Any]] = found["states"]
    return states

"""What compression keeps from step to step, in the folder of somebody else's checkpoint: ``thinwire_RANK.pt`` for each rank
(of further models ``thinwire_RANK_INDEX.pt``).

Residuals are a rank's own, so frameworks that let rank 0 write what all ranks share would lose those of the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError


class Stateful(Protocol):
    """:class:`~thinwire.DdpCompression`, :class:`~thinwire.FsdpCompression`, :class:`~thinwire.GradientSync`."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


def file_of(folder: str | os.PathLike[str], rank: int, index: int = 0) -> Path:
    """index: of a model among several."""
    return Path(folder) / (f"thinwire_{rank}_{index}.pt" if index else f"thinwire_{rank}.pt")


def save(
    folder: str | os.PathLike[str], rank: int, ranks: int, state: Mapping[str, Tensor], index: int = 0
) -> Path:
    """Write a rank's tensors into an existing folder. A file is whole, or not there."""
    path = file_of(folder, rank, index)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        torch.save({"rank": rank, "ranks": ranks, "state": dict(state)}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return path


def load(folder: str | os.PathLike[str], rank: int, ranks: int, index: int = 0) -> dict[str, Tensor]:
    """A rank's tensors, on the CPU. Raises CheckpointError for a missing file, or one of another number of ranks."""
    path = file_of(folder, rank, index)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        found, state = int(saved["ranks"]), saved["state"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the checkpoint was written without compression, or by fewer than {ranks} ranks; "
            "say resume_without_residuals=True to begin with none"
        ) from None
    except Exception as e:
        raise CheckpointError(f"{path} cannot be read: {type(e).__name__}: {e}") from e
    if found != ranks:
        raise CheckpointError(
            f"{path} was written by {found} ranks, there are {ranks}: residuals are a rank's own; say "
            "resume_without_residuals=True to begin with none"
        )
    tensors: dict[str, Tensor] = state
    return tensors

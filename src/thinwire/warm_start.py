"""Where the low-rank reduction of each parameter starts from: the Q of the step before (arXiv 1905.13727, Algorithm 1).

One power iteration a step is enough because the next one goes on from there. Held per (parameter name, axis), like
residuals, but the same on all ranks. It costs 4 rank bytes for each column, twice where skipped steps must be undone.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from .codecs import LowRank
from .collectives import Matrix
from .collectives.options import derive_seed
from .errors import CheckpointError
from .feedback import Span, StepState


class WarmStart(StepState):
    """The matrices of one flat message, and the Q of each.

    spans: with shapes; those that ``compressor`` sends exactly have no Q. seed: with a parameter's name it gives its first
    Q, so all ranks must have the same. known: Q that parameters have already (``NAME@AXIS.q``); it is taken over, not
    copied. device: where the messages live. Raises UnsupportedError for another device than the CPU.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        compressor: LowRank,
        *,
        axis: str,
        seed: int,
        device: torch.device,
        rollback: bool = False,
        known: Mapping[str, Tensor] | None = None,
    ) -> None:
        compressor.check_device(device)
        self._axis = axis
        self._state: dict[str, Tensor] = {}
        self.matrices: list[Matrix] = []
        for span in spans:
            shape = compressor.matrix(span.shape)
            if shape is None:
                continue
            key = q_key(span.name, axis)
            q = (known or {}).get(key)
            if q is None:
                q = compressor.first_q(shape[1], derive_seed(seed, zlib.crc32(span.name.encode())))
            self._state[key] = q
            self.matrices.append(Matrix(span.begin, *shape, q))
        super().__init__("low-rank start", tuple(self._state.values()), rollback)

    def forget(self, names: Collection[str]) -> None:
        keys = {q_key(name, self._axis) for name in names}
        for (key, live), saved in zip(self._state.items(), self._saved, strict=True):
            if key in keys:
                live.copy_(saved)

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors: ``NAME@AXIS.q`` (rank x columns) for each matrix."""
        return dict(self._state)


def q_key(name: str, axis: str) -> str:
    """What a parameter's Q is called in checkpoints."""
    return f"{name}@{axis}.q"


def check_saved_q(
    name: str, axis: str, shape: Sequence[int], compressor: LowRank, state: Mapping[str, Tensor]
) -> None:
    """Raise CheckpointError if a parameter's Q is of another shape, or its residual was saved without a Q."""
    matrix, key = compressor.matrix(shape), q_key(name, axis)
    saved = state.get(key)
    if matrix is None or (saved is None and f"{name}@{axis}" not in state):
        return
    expected = (compressor.rank, matrix[1])
    if saved is None or tuple(saved.shape) != expected:
        found = "nothing" if saved is None else f"{tuple(saved.shape)}"
        raise CheckpointError(
            f"low-rank start {key}: shape {expected} of {compressor} expected, found {found}; resume with the policy that "
            "the checkpoint was written with"
        )

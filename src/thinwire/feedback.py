"""Error feedback: what compression lost of a gradient is added to the next one (arXiv 1901.09847).

Residuals are held unscaled (a loss scale moves), in fp32, per (parameter name, axis): buckets may be rebuilt,
names stay. Two-shot reduction has two: the sender's, and at the owner of a chunk that of the second encoding.
They cost 4 bytes a parameter and rank, 8 where skipped steps must be undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import CheckpointError


@dataclass(frozen=True)
class Span:
    """A parameter's place in a flat message: elements [begin, end)."""

    name: str
    begin: int
    end: int


class Feedback:
    """The residuals of one flat message of ``numel`` values.

    owner_numel: length of this rank's chunk if the message is all-reduced, 0 if it is reduce-scattered.
    rollback: keep a copy from ``begin`` on, so that ``rollback()`` can undo a skipped step.
    """

    def __init__(
        self, spans: Sequence[Span], numel: int, *, axis: str, owner_numel: int = 0, rollback: bool = False
    ) -> None:
        self._spans = tuple(spans)
        self._axis = axis
        self.sender = torch.zeros(numel)
        self.owner = torch.zeros(owner_numel)
        self._saved = [torch.zeros_like(r) for r in (self.sender, self.owner)] if rollback else []

    @property
    def nbytes(self) -> int:
        """Memory of the residuals in bytes, copies included."""
        return 4 * (self.sender.numel() + self.owner.numel()) * (2 if self._saved else 1)

    def begin(self) -> None:
        """Before the residuals are used in a step."""
        for saved, live in zip(self._saved, (self.sender, self.owner), strict=False):
            saved.copy_(live)

    def rollback(self) -> None:
        """Undo what the step did: it was skipped. Raises RuntimeError without ``rollback=True``."""
        if not self._saved:
            raise RuntimeError(
                "residuals were made without rollback=True, so a skipped step cannot be undone"
            )
        for saved, live in zip(self._saved, (self.sender, self.owner), strict=True):
            live.copy_(saved)

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the live residuals: ``NAME@AXIS`` for each parameter, and the owner's."""
        state = {f"{s.name}@{self._axis}": self.sender[s.begin : s.end] for s in self._spans}
        if self.owner.numel():
            state[f"{self._spans[0].name}@{self._axis}.owner"] = self.owner
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take residuals back, by name. Raises CheckpointError for a missing one or another size."""
        for name, live in self.state_dict().items():
            saved = state.get(name)
            if saved is None or saved.numel() != live.numel():
                found = "nothing" if saved is None else f"{saved.numel()} values"
                raise CheckpointError(f"residual {name}: {live.numel()} values expected, {found} found")
            live.copy_(saved.reshape(-1))

"""Error feedback: what compression lost of a gradient is added to the next one (arXiv 1901.09847).

Residuals are held unscaled (a loss scale moves), in fp32, per (parameter name, axis): buckets may be rebuilt,
names stay. Two-shot reduction has two: the sender's, and at the owner of a chunk that of the second encoding.
They cost 4 bytes a parameter and rank, 8 where skipped steps must be undone; half of that if they are held in bf16,
rounded to nearest even between steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import CheckpointError


@dataclass(frozen=True)
class Span:
    """A parameter's place in a flat message: elements [begin, end). shape: the parameter's, where somebody asks for it."""

    name: str
    begin: int
    end: int
    shape: tuple[int, ...] = ()


class StepState:
    """Tensors that every step changes, a skipped step gives back, and a checkpoint holds.

    what: how errors call one. rollback: keep a copy from ``begin`` on, so that ``rollback()`` can undo a skipped step.
    """

    def __init__(self, what: str, tensors: Sequence[Tensor], rollback: bool) -> None:
        self._what = what
        self._tensors = tuple(tensors)
        self._saved = tuple(torch.zeros_like(t) for t in tensors) if rollback else ()

    @property
    def nbytes(self) -> int:
        """Memory of the tensors in bytes, copies included."""
        return sum(t.nbytes for t in (*self._tensors, *self._saved))

    def begin(self) -> None:
        """Before the tensors are used in a step."""
        for saved, live in zip(self._saved, self._tensors, strict=False):
            saved.copy_(live)

    def rollback(self) -> None:
        """Undo what the step did: it was skipped. Raises RuntimeError without ``rollback=True``."""
        if self._tensors and not self._saved:
            raise RuntimeError(f"a {self._what} without rollback=True cannot undo a skipped step")
        for saved, live in zip(self._saved, self._tensors, strict=True):
            live.copy_(saved)

    def forget(self, names: Collection[str]) -> None:
        """Undo what the step did to these parameters: its gradients were not used for them. Needs ``rollback=True``."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the live tensors by name."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take tensors back, by name. Raises CheckpointError, before any is changed, for a missing one or another size."""
        take_back(self.state_dict(), state, self._what)


def take_back(
    live: Mapping[str, Tensor], state: Mapping[str, Tensor], what: str, remedy: str | None = None
) -> None:
    """Copy saved tensors into the live ones of the same names.

    what: how errors call one; remedy: what they say to do. Raises CheckpointError, before any is changed, for a missing
    one or another size.
    """
    for name, tensor in live.items():
        saved = state.get(name)
        if saved is None or saved.numel() != tensor.numel():
            found = "nothing" if saved is None else f"{saved.numel()} values"
            wrong = f"{what} {name}: {tensor.numel()} values expected, {found} found"
            raise CheckpointError(wrong if remedy is None else f"{wrong}; {remedy}")
    for name, tensor in live.items():
        tensor.copy_(state[name].reshape(tensor.shape))


class Feedback(StepState):
    """The residuals of one flat message of ``numel`` values.

    owner_numel: length of this rank's chunk if the message is all-reduced, 0 if it is reduce-scattered; owner_begin: where
    the chunk begins in the message. dtype, device: of the sender's; whoever holds it in another dtype than fp32 compensates
    in fp32 all the same.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        numel: int,
        *,
        axis: str,
        owner_numel: int = 0,
        owner_begin: int = 0,
        rollback: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.spans = tuple(spans)
        self._axis = axis
        self._owner_begin = owner_begin
        self.sender = torch.zeros(numel, dtype=dtype, device=device)
        self.owner = torch.zeros(owner_numel)
        super().__init__("residual", (self.sender, self.owner), rollback)

    def forget(self, names: Collection[str]) -> None:
        for span in self.spans:
            if span.name in names:
                for saved, live, start in zip(
                    self._saved, self._tensors, (0, self._owner_begin), strict=True
                ):
                    part = slice(max(span.begin - start, 0), max(span.end - start, 0))
                    live[part] = saved[part]

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the live residuals: ``NAME@AXIS`` for each parameter, and the owner's."""
        state = {f"{s.name}@{self._axis}": self.sender[s.begin : s.end] for s in self.spans}
        if self.owner.numel():
            state[f"{self.spans[0].name}@{self._axis}.owner"] = self.owner
        return state

"""Residuals by name, made when they are first needed, of which a step changes some and a skipped step none."""

from __future__ import annotations

import torch
from torch import Tensor

from ..feedback import Feedback, Span


class StepResiduals:
    """Flat residuals of one dtype. rollback: keep copies, so that :meth:`undo` can take a step back."""

    def __init__(self, *, rollback: bool, dtype: torch.dtype) -> None:
        self._rollback = rollback
        self._dtype = dtype
        self._residuals: dict[str, Feedback] = {}
        self._changed: set[str] = set()  # in this step

    @property
    def nbytes(self) -> int:
        """Memory in bytes, copies included."""
        return sum(feedback.nbytes for feedback in self._residuals.values())

    def make(self, name: str, numel: int, *, axis: str, device: torch.device) -> Tensor:
        """The residual of this name, zeros if there is none of this size yet."""
        feedback = self._residuals.get(name)
        if feedback is None or feedback.sender.numel() != numel:
            self._changed.discard(name)
            feedback = self._residuals[name] = Feedback(
                [Span(name, 0, numel)],
                numel,
                axis=axis,
                rollback=self._rollback,
                dtype=self._dtype,
                device=device,
            )
        return feedback.sender

    def use(self, name: str, numel: int, *, axis: str, device: torch.device) -> Tensor:
        """The residual of this name, which the step is about to change."""
        sender = self.make(name, numel, axis=axis, device=device)
        if name not in self._changed:
            self._residuals[name].begin()
            self._changed.add(name)
        return sender

    def end_step(self) -> None:
        """The step was taken: what it changed stays."""
        self._changed.clear()

    def undo(self) -> None:
        """The step was not taken. Raises RuntimeError if it has changed anything and no copies are kept."""
        for name in self._changed:
            self._residuals[name].rollback()
        self._changed.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """The live residuals by ``NAME@AXIS``."""
        state: dict[str, Tensor] = {}
        for feedback in self._residuals.values():
            state |= feedback.state_dict()
        return state

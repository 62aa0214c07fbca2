"""What a step does between the backward pass and the next forward pass, whoever holds the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from .model import Stage


@dataclass(frozen=True)
class Gradient:
    """This rank's part of a mean gradient, fp32. counted: no other rank counts the same elements in the norm."""

    tensor: Tensor
    counted: bool


class Update(Protocol):
    """One step's way from gradients to updated parameters."""

    def wrapped(self, stages: Mapping[int, Stage]) -> dict[int, nn.Module]:
        """The stages as the forward pass calls them."""

    def start(self, micro_batches: int, scale: float) -> None:
        """Before the first backward pass; scale: what the loss was multiplied by."""

    def finish(self) -> list[Gradient]:
        """After the last: the mean gradients over dp, summed over tp where they are partial, without the scale."""

    def take(self, lr: float, factor: float) -> None:
        """Multiply the gradients by ``factor``, run the optimizer, bring all parameters up to date."""

    def skip(self) -> None:
        """Leave parameters and optimizer as they are."""

    def weights(self) -> dict[str, Tensor]:
        """The parameters by name, for a checkpoint of any layout; they share memory with the live ones."""

    def gradients(self) -> dict[str, Tensor]:
        """The last step's mean gradients by parameter, where this rank holds them whole; they share memory."""

    def state(self) -> dict[str, Tensor]:
        """What else this rank needs to go on bit for bit; shares memory with the live tensors."""

    def weights_changed(self) -> None:
        """The tensors of ``weights`` were set from outside, those of ``state`` were not."""

    def state_changed(self) -> None:
        """The tensors of ``state`` were set from outside: make again, and check, what follows from them."""

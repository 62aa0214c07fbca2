"""What all ranks must agree on before a step is taken: the loss, the gradient norm, whether it overflowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from thinwire.torch_names import all_gather_single

from .update import Gradient


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Each value summed over all ranks in fp64, in rank order: the same bits on every rank."""
    own = torch.tensor(values, dtype=torch.float64).view(torch.int64)  # as integers: no codec may touch them
    everyone = own.new_empty(dist.get_world_size() * len(own))
    all_gather_single(everyone, own)
    ranks = everyone.view(torch.float64).view(-1, len(own)).tolist()
    return [sum(column) for column in zip(*ranks, strict=True)]


def square_sum(gradients: Iterable[Gradient]) -> float:
    """Sum of squares, in fp64, of the elements that this rank counts; not finite if one of them is not."""
    return sum(
        float(torch.linalg.vector_norm(g.tensor, dtype=torch.float64)) ** 2 for g in gradients if g.counted
    )


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied by so that it is at most ``limit`` (0: no limit)."""
    return min(1.0, limit / norm) if limit > 0 and norm > 0 else 1.0


def agree(losses: Sequence[float], share: float, gradients: Iterable[Gradient]) -> tuple[float, float]:
    """(loss, gradient norm) of the step, the same on every rank; a norm that is not finite means: skip it.

    losses: this rank's micro-batches, if it is the one that reports them; share: 1 / all of them.
    """
    loss, squares = sum_over_ranks([sum(losses) * share, square_sum(gradients)])
    return loss, math.sqrt(squares)

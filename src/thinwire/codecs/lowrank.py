"""``lowrank``: the matrices of a gradient as products of two thin ones (PowerSGD, arXiv 1905.13727).

Not a codec: what is sent depends on what the other ranks have sent before, in two rounds, so the way from matrices to
messages is :mod:`thinwire.collectives.low_rank`. Here are its parameters and its arithmetic. The reference and the
kernels give the same bits, on any machine: sums have a fixed order, and no library multiplies matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, UnsupportedError
from .base import Compressor
from .cpu import lowrank as kernels


@dataclass(frozen=True)
class LowRank(Compressor):
    """A gradient's matrix M (m x n) is sent as P (m x rank) and Q (n x rank): M ~ P Q^T, fp32.

    A parameter of two or more dimensions is the matrix (first dimension) x (all others); where rank (m + n) is not
    smaller than m n, and for vectors, the values travel exactly. Larger ranks cost more and lose less.
    For gradients in all_reduce and reduce_scatter, with error feedback. fp32; 16-bit gradients are widened, what
    travels is fp32, and the result is rounded once to their dtype. CPU only.

    Non-finite input: a matrix that holds NaN or Inf on any rank is NaN throughout on all ranks.
    """

    rank: int = 4

    name: ClassVar[str] = "lowrank"
    lossless: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise SpecError(
                f"lowrank: rank is the number of columns of P and Q, at least 1, found {self.rank}"
            )

    def shrinks(self, dtype: torch.dtype) -> bool:
        return dtype in self.dtypes

    def matrix(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Rows and columns of the matrix that a parameter of this shape is, None if it travels exactly."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        return (rows, columns) if self.rank * (rows + columns) < rows * columns else None

    def first_q(self, columns: int, key: int) -> Tensor:
        """The Q^T (rank x columns, rows of length 1) that a matrix starts with: the same for the same ``key``.

        Counter-based (splitmix64) and uniform in each coordinate, where the paper draws normal values: any direction
        does for a start, and these need no library's logarithm, so they have the same bits everywhere.
        """
        place = np.arange(1, self.rank * columns + 1, dtype=np.uint64)
        z = np.uint64(key) + place * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        # Odd numbers of 24 bits: exact in fp32, and never 0.
        odd = (z >> np.uint64(40) | np.uint64(1)).astype(np.float32)
        q = torch.from_numpy((odd - np.float32(2**23)).reshape(self.rank, columns))
        return renew(q, torch.empty_like(q))

    def check_device(self, device: torch.device) -> None:
        """Raise UnsupportedError where there are no kernels."""
        if device.type != "cpu":
            raise UnsupportedError(f"{self} has no {device.type} kernel yet; use a codec there, or none")

    def warm_up(self) -> None:
        matrix, p, q = torch.ones(5, 6), torch.empty(5, self.rank), torch.empty(self.rank, 6)
        project(matrix, self.first_q(6, 0), p)
        orthonormalize(p)
        project_back(matrix, p, q)
        subtract(matrix, p, q)
        expand(p, q, 0, matrix.view(-1))


# All tensors: fp32, contiguous, on the CPU. Q is held transposed: rank x columns.


def project(matrix: Tensor, q: Tensor, p: Tensor) -> None:
    """P = M Q."""
    kernels.times_q(matrix.numpy(), q.numpy(), p.numpy())


def orthonormalize(p: Tensor) -> None:
    """Orthonormal columns with the same span, in place (Gram-Schmidt in fp64).

    A column within the span of those before it becomes 0, so that any P, also 0, gives an orthogonal projection.
    Where a value is not finite, all are NaN.
    """
    kernels.orthonormalize(p.numpy())


def project_back(matrix: Tensor, p: Tensor, q: Tensor) -> None:
    """Q = M^T P."""
    kernels.times_p(matrix.numpy(), p.numpy(), q.numpy())


def subtract(matrix: Tensor, p: Tensor, q: Tensor) -> None:
    """M -= P Q^T."""
    kernels.subtract(p.numpy(), q.numpy(), matrix.numpy())


def expand(p: Tensor, q: Tensor, first: int, out: Tensor) -> None:
    """Fill ``out`` (flat) with the values of P Q^T, row by row, from the one at ``first`` on."""
    kernels.product(p.numpy(), q.numpy(), np.uint64(first), out.numpy())


def renew(q: Tensor, start: Tensor) -> Tensor:
    """Make Q the start of the next step: columns of length 1, since only their directions matter, so that M Q has the
    magnitude of M and not of its square. Where a column is 0 or not finite, ``start`` keeps the one it has. Returns it.
    """
    kernels.renew(q.numpy(), start.numpy())
    return start

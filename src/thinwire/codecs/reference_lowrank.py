"""Plain, slow reference of the arithmetic of ``lowrank``. numpy arrays in, new arrays out; see cpu/lowrank.py."""

from __future__ import annotations

from typing import Any

import numpy as np

LANES = 64


def times_q(m: Any, q: Any) -> Any:
    """m q^T."""
    return _sums(m[:, None, :] * q[None, :, :])


def times_p(m: Any, p: Any) -> Any:
    """p^T m."""
    q = np.zeros((p.shape[1], m.shape[1]), np.float32)
    for row, factors in zip(m, p, strict=True):
        q = q + factors[:, None] * row
    return q


def subtract(m: Any, p: Any, q: Any) -> Any:
    """m - p q."""
    for column, row in zip(p.T, q, strict=True):
        m = m - column[:, None] * row
    return m


def product(p: Any, q: Any) -> Any:
    """p q."""
    total = p[:, :1] * q[0]
    for column, row in zip(p.T[1:], q[1:], strict=True):
        total = total + column[:, None] * row
    return total


def orthonormalize(p: Any) -> Any:
    """Orthonormal columns: Gram-Schmidt in fp64, twice each; a column in the span of those before it is 0."""
    if not np.isfinite(p).all():
        return np.full_like(p, np.nan)
    columns: list[Any] = []
    for column in p.T.astype(np.float64):
        before = np.sqrt(_sums(column * column))
        for _ in range(2):
            for other in columns:
                column = column - _sums(other * column) * other
        after = np.sqrt(_sums(column * column))
        columns.append(column / after if after > before * 2.0**-20 else np.zeros_like(column))
    return np.stack(columns, 1).astype(np.float32)


def renew(q: Any, start: Any) -> Any:
    """Rows of length 1; where a row is 0 or not finite, that of ``start``."""
    result = start.copy()
    for k, row in enumerate(q.astype(np.float64)):
        length = np.sqrt(_sums(row * row))
        if 0 < length < np.inf:
            result[k] = row / length
    return result


def _sums(terms: Any) -> Any:
    """Sums along the last axis: in 64 lanes, one term after the other, which are folded in halves."""
    lanes = np.zeros((*terms.shape[:-1], LANES), terms.dtype)
    for j in range(0, terms.shape[-1], LANES):
        part = terms[..., j : j + LANES]
        lanes[..., : part.shape[-1]] += part
    width = LANES // 2
    while width:
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
        width //= 2
    return lanes[..., 0]

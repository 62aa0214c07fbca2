"""Kernels of ``lowrank``: products of a matrix with thin ones, in a fixed order, and Gram-Schmidt; see codecs/lowrank.py.

m is a matrix (fp32, rows x columns); p (rows x rank) and q (rank x columns) are thin. An element of a product is one
rounding for each multiplication and each addition, never fused. Long sums run in 64 lanes, lane l over the places
with index mod 64 = l, which are then folded in halves, so their order does not depend on the machine.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped"

from __future__ import annotations

import numpy as np
from numba import njit

LANES = 64
LEAST = 2.0**-20
"""A column that keeps less than this share of its length beside the ones before it is in their span: fp32 rounds there."""


@njit(nogil=True, cache=True, forceinline=True)
def _fold(lanes):
    """Add the lanes up, in halves, into the first."""
    width = np.uint64(LANES // 2)
    while width:
        for l in range(width):
            lanes[l] = lanes[l] + lanes[l + width]
        width >>= np.uint64(1)


@njit(nogil=True, cache=True)
def times_q(m, q, p):
    """p = m q^T: lanes over the columns."""
    rows, columns = np.uint64(m.shape[0]), np.uint64(m.shape[1])
    rank, step = np.uint64(q.shape[0]), np.uint64(LANES)
    lanes = np.zeros((q.shape[0], LANES), np.float32)
    for i in range(rows):
        row = m[i]
        for k in range(rank):
            sums = lanes[k]
            for l in range(step):
                sums[l] = np.float32(0)
        for j in range(np.uint64(0), columns, step):
            width = min(step, columns - j)
            for k in range(rank):
                sums, other = lanes[k], q[k]
                for l in range(width):
                    sums[l] = np.float32(sums[l] + np.float32(row[j + l] * other[j + l]))
        for k in range(rank):
            _fold(lanes[k])
            p[i, k] = lanes[k, 0]


@njit(nogil=True, cache=True)
def times_p(m, p, q):
    """q = p^T m: one row of m after the other."""
    rows, columns = np.uint64(m.shape[0]), np.uint64(m.shape[1])
    rank, step = np.uint64(q.shape[0]), np.uint64(4)
    for k in range(rank):
        sums = q[k]
        for j in range(columns):
            sums[j] = np.float32(0)
    whole = rows - rows % step
    for i in range(np.uint64(0), whole, step):
        m0, m1, m2, m3 = m[i], m[i + np.uint64(1)], m[i + np.uint64(2)], m[i + np.uint64(3)]
        for k in range(rank):
            sums = q[k]
            p0, p1 = p[i, k], p[i + np.uint64(1), k]
            p2, p3 = p[i + np.uint64(2), k], p[i + np.uint64(3), k]
            for j in range(columns):
                s = np.float32(sums[j] + np.float32(p0 * m0[j]))
                s = np.float32(s + np.float32(p1 * m1[j]))
                s = np.float32(s + np.float32(p2 * m2[j]))
                sums[j] = np.float32(s + np.float32(p3 * m3[j]))
    for i in range(whole, rows):
        row = m[i]
        for k in range(rank):
            sums, factor = q[k], p[i, k]
            for j in range(columns):
                sums[j] = np.float32(sums[j] + np.float32(factor * row[j]))


@njit(nogil=True, cache=True)
def subtract(p, q, m):
    """m -= p q, one column of p after the other."""
    rows, columns, rank = np.uint64(m.shape[0]), np.uint64(m.shape[1]), np.uint64(q.shape[0])
    for i in range(rows):
        row = m[i]
        for k in range(rank):
            other, factor = q[k], p[i, k]
            for j in range(columns):
                row[j] = np.float32(row[j] - np.float32(factor * other[j]))


@njit(nogil=True, cache=True)
def product(p, q, first, out):
    """out = the values of p q (row by row, flat) from ``first`` (uint64) on, one column of p after the other."""
    columns, rank = np.uint64(q.shape[1]), np.uint64(q.shape[0])
    done, size = np.uint64(0), np.uint64(out.size)
    while done < size:
        i = (first + done) // columns
        start = first + done - i * columns
        width = min(columns - start, size - done)
        part, other, factor = out[done : done + width], q[0], p[i, 0]
        for j in range(width):
            part[j] = np.float32(factor * other[start + j])
        for k in range(np.uint64(1), rank):
            other, factor = q[k], p[i, k]
            for j in range(width):
                part[j] = np.float32(part[j] + np.float32(factor * other[start + j]))
        done += width


@njit(nogil=True, cache=True)
def _dot(a, b, lanes):
    """The sum of a b, fp64."""
    size, step = np.uint64(a.size), np.uint64(LANES)
    for l in range(step):
        lanes[l] = 0.0
    for j in range(np.uint64(0), size, step):
        for l in range(min(step, size - j)):
            lanes[l] = lanes[l] + a[j + l] * b[j + l]
    _fold(lanes)
    return lanes[0]


@njit(nogil=True, cache=True, error_model="numpy")
def orthonormalize(p):
    """Make p's columns orthonormal, in place, by Gram-Schmidt in fp64, twice each.

    A column in the span of those before it becomes 0. If a value is not finite, all become NaN.
    """
    rows, rank = np.uint64(p.shape[0]), np.uint64(p.shape[1])
    columns = np.zeros((p.shape[1], p.shape[0]), np.float64)
    lanes = np.zeros(LANES, np.float64)
    finite = True
    for i in range(rows):
        for k in range(rank):
            finite = finite and np.isfinite(p[i, k])
            columns[k, i] = np.float64(p[i, k])
    for k in range(rank):
        own = columns[k]
        before = np.sqrt(_dot(own, own, lanes))
        for _ in range(2):
            for l in range(k):
                other = columns[l]
                share = _dot(other, own, lanes)
                for i in range(rows):
                    own[i] = own[i] - share * other[i]
        after = np.sqrt(_dot(own, own, lanes))
        keep = after > before * LEAST
        for i in range(rows):
            own[i] = own[i] / after if keep else 0.0
    for i in range(rows):
        for k in range(rank):
            p[i, k] = np.float32(columns[k, i]) if finite else np.float32(np.nan)


@njit(nogil=True, cache=True, error_model="numpy")
def renew(q, start):
    """start = q with rows of length 1; rows of start whose new one is 0 or not finite stay."""
    rank, columns = np.uint64(q.shape[0]), np.uint64(q.shape[1])
    row, lanes = np.zeros(q.shape[1], np.float64), np.zeros(LANES, np.float64)
    for k in range(rank):
        for j in range(columns):
            row[j] = np.float64(q[k, j])
        length = np.sqrt(_dot(row, row, lanes))
        if length > 0.0 and np.isfinite(length):
            for j in range(columns):
                start[k, j] = np.float32(row[j] / length)

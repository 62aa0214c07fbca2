"""Steps 3 and 4 of ZFP, the lift and negabinary, in integers of 32 and of 64 bits; what else both widths share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .zfp_planes import U

SPECIAL = np.array([0.0, np.inf, -np.inf, np.nan], np.float32)
"""By class: the value of a slot in a block that is not finite."""


def _steps(integer: Any, unsigned: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """lift, unlift, negabinary and back. Each sum is narrowed: numba's have 64 bits."""

    @njit
    def lift(x, y, z, w):  # type: ignore[no-untyped-def]
        x = integer(x + w) >> 1
        w = integer(w - x)
        z = integer(z + y) >> 1
        y = integer(y - z)
        x = integer(x + z) >> 1
        z = integer(z - x)
        w = integer(w + y) >> 1
        y = integer(y - w)
        w = integer(w + (y >> 1))
        y = integer(y - (w >> 1))
        return x, y, z, w

    @njit
    def unlift(x, y, z, w):  # type: ignore[no-untyped-def]
        y = integer(y + (w >> 1))
        w = integer(w - (y >> 1))
        y = integer(y + w)
        w = integer((w << 1) - y)
        z = integer(z + x)
        x = integer((x << 1) - z)
        y = integer(y + z)
        z = integer((z << 1) - y)
        w = integer(w + x)
        x = integer((x << 1) - w)
        return x, y, z, w

    @njit
    def negabinary(i):  # type: ignore[no-untyped-def]
        return unsigned(unsigned(unsigned(i) + mask) ^ mask)

    @njit
    def from_negabinary(u):  # type: ignore[no-untyped-def]
        return integer(unsigned(unsigned(unsigned(u) ^ mask) - mask))

    return lift, unlift, negabinary, from_negabinary


lift32, unlift32, negabinary32, from_negabinary32 = _steps(np.int32, np.uint32, np.uint32(0xAAAAAAAA))
lift64, unlift64, negabinary64, from_negabinary64 = _steps(np.int64, np.uint64, U(0xAAAAAAAAAAAAAAAA))


@njit(inline="always")
def _class(bits, infinity, sign):  # type: ignore[no-untyped-def]
    magnitude = bits & (sign - U(1))
    if magnitude < infinity:
        return U(0)
    if magnitude > infinity:
        return U(3)
    return U(2) if bits & sign else U(1)


@njit(inline="always")
def classes_of(bits, at, infinity, sign):  # type: ignore[no-untyped-def]
    """The header of a block that is not finite: a zero bit, then two bits for each value. ``infinity``, ``sign``: bits."""
    return (
        _class(U(bits[at]), infinity, sign) << U(1)
        | _class(U(bits[at + 1]), infinity, sign) << U(3)
        | _class(U(bits[at + 2]), infinity, sign) << U(5)
        | _class(U(bits[at + 3]), infinity, sign) << U(7)
    )


@njit(nogil=True)
def padded(x):  # type: ignore[no-untyped-def]
    """The partial block at the end of x: slot 0 is repeated into 1, 1 into 2, 0 into 3."""
    block = np.empty(4, x.dtype)
    first = x.size & ~3
    block[:] = x[first]
    for j in range(1, x.size - first):
        block[j:3] = x[first + j]
    return block


@njit(inline="always")
def word_at(words, at):  # type: ignore[no-untyped-def]
    """A word of the stream; 0 beyond its end."""
    return words[at] if at < words.size else U(0)

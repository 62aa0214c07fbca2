"""The Walsh-Hadamard transform of blocks, in place. Butterflies of one addition each, in a fixed order."""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from .spans import load, span, store
from .vectors import fill, larger, largest, mirror, numbers, reinterpret

_LANES = np.uint64(16)
_ABS = np.int32(0x7FFFFFFF)


@njit(nogil=True, cache=True)
def transform(values, block, factor):
    """values (fp32; whole blocks) *= factor, then each block by the matrix of +1 and -1.

    block: a power of two from 32 on (uint64). Returns the bits of the largest magnitude, INF or more if one is not finite.
    """
    part, most = span(values), fill(np.int32(0), 16)
    last = block >> np.uint64(1)
    for first in range(np.uint64(0), np.uint64(values.size), block):
        for j in range(first, first + block, _LANES):
            v = load(part, j, 16) * factor
            v = _fold(v, mirror(v, 1), np.uint32(31))
            v = _fold(v, mirror(v, 2), np.uint32(30))
            v = _fold(v, mirror(v, 4), np.uint32(29))
            v = _fold(v, mirror(v, 8), np.uint32(28))
            store(part, j, v)
        half = _LANES
        while half < block:
            for start in range(first, first + block, np.uint64(2) * half):
                for j in range(start, start + half, _LANES):
                    a, b = load(part, j, 16), load(part, j + half, 16)
                    c, d = a + b, a - b
                    store(part, j, c)
                    store(part, j + half, d)
                    if half == last:
                        most = larger(most, reinterpret(c, np.int32) & _ABS)
                        most = larger(most, reinterpret(d, np.int32) & _ABS)
            half = half << np.uint64(1)
    return largest(most)


@njit(nogil=True, cache=True, forceinline=True)
def _fold(v, mirrored, to_sign):
    """Butterflies of lanes with those that ``mirrored`` has in their places.

    to_sign: how far the bit in which the two lanes' numbers differ is from the sign's.
    """
    minus = (numbers(np.uint32, 16) << to_sign) & np.uint32(0x80000000)
    return mirrored + reinterpret(reinterpret(v, np.uint32) ^ minus, np.float32)

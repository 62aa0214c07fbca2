"""The Walsh-Hadamard transform of blocks, in place. Butterflies of one addition each, in a fixed order."""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped"

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def transform(values, block, factor):
    """values (fp32; whole blocks) *= factor, then each block by the matrix of +1 and -1. block: a power of two."""
    for first in range(np.uint64(0), np.uint64(values.size), block):
        part = values[first : first + block]
        for j in range(block):
            part[j] = np.float32(part[j] * factor)
        half = np.uint64(1)
        while half < block:
            for start in range(np.uint64(0), block, np.uint64(2) * half):
                for j in range(start, start + half):
                    a, b = part[j], part[j + half]
                    part[j], part[j + half] = np.float32(a + b), np.float32(a - b)
            half = half << np.uint64(1)

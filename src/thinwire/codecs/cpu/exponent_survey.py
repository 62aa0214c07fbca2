"""Counting the exponents of a message.

A count is read, raised and written for each value, which takes longer than anything else in it. So two exponents are counted
at once, in a table of 64 by 64: messages rarely have exponents that are further apart, and then any that are the same
modulo 64 are the same.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,assignment,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from .huffman import count
from .spans import load, span, store, zeros
from .vectors import any_bit, convert, fill, join, larger, largest, reinterpret, select, total

_TILE = 4096
_FEWEST = 4096  # values for which a table of pairs is worth its making
_SIDE = 64


@njit(nogil=True, cache=True)
def survey(x, mantissa_bits, counts):
    """Count the exponents (int64, 256). x: uint16 or uint32 bits."""
    counts[:] = 0
    whole = x.size // 32 * 32 if x.size >= _FEWEST else 0
    if whole:
        pairs, places = np.zeros(_SIDE * _SIDE, np.uint32), np.empty(_TILE // 2, np.uint16)
        lowest, highest, none = _count_pairs(x, np.uint64(whole), mantissa_bits, pairs, places)
        if highest - lowest < _SIDE:
            _of_pairs(pairs, lowest, highest, none, counts)
        else:
            whole = 0
    count(x[whole:], mantissa_bits, (1 << (8 * x.itemsize - 1 - mantissa_bits)) - 1, counts)


@njit(nogil=True, cache=True)
def all_bits(x):
    """The bits that are set in any value."""
    values, whole = span(x), np.uint64(x.size) & ~np.uint64(31)
    ored = zeros(values, 32)
    for j in range(np.uint64(0), whole, np.uint64(32)):
        ored = ored | load(values, j, 32)
    found = np.int64(any_bit(ored))
    for v in x[whole:]:
        found |= np.int64(v)
    return found


@njit(nogil=True, cache=True)
def _count_pairs(x, n, mantissa_bits, pairs, places):
    """Count the exponents modulo 64 of n values (a multiple of 32), by two.

    Returns the lowest exponent but 0, the highest, and how many are 0. pairs: zeros. places: scratch.
    """
    values, place = span(x), span(places)
    none, absent = fill(np.uint16(0), 32), np.int64(0)
    highest, below = none, none  # below: how far the lowest is below 256
    for first in range(np.uint64(0), n, np.uint64(_TILE)):
        m = min(np.uint64(_TILE), n - first)
        zero = none
        for j in range(np.uint64(0), m, np.uint64(32)):
            e = _exponents(values, first + j, mantissa_bits)
            two = reinterpret(e, np.uint32)
            store(place, j >> np.uint64(1), convert((two & 63) | ((two >> 10) & 0xFC0), np.uint16))
            highest = larger(highest, e)
            below = larger(below, (none - e) & 255)  # 0 for 0
            zero = zero + select(e == np.uint16(0), np.uint16(1), none)
        absent += np.int64(total(zero))
        for j in range(m >> np.uint64(1)):
            pairs[places[j]] += np.uint32(1)
    most, least = np.int64(largest(highest)), np.int64(256) - np.int64(largest(below))
    return min(least, most), most, absent


def _exponents(values, at, mantissa_bits):
    """The exponents of 32 values, as uint16."""


@overload(_exponents, jit_options={"forceinline": True})
def _exponents_overload(values, at, mantissa_bits):
    if values.dtype == types.uint16:

        def exponents16(values, at, mantissa_bits):
            v = load(values, at, 32)
            return (v >> 10) & 31 if mantissa_bits == 10 else (v >> 7) & 255

        return exponents16

    def exponents32(values, at, mantissa_bits):
        v, w = load(values, at, 16), load(values, at + np.uint64(16), 16)
        return join(convert(v >> 23, np.uint16), convert(w >> 23, np.uint16)) & 255

    return exponents32


@njit(nogil=True, cache=True)
def _of_pairs(pairs, lowest, highest, none, counts):
    """The counts of single exponents. All but 0 are from ``lowest`` to ``highest``; ``none``: how many are 0."""
    single = np.zeros(_SIDE, np.int64)
    for b in range(_SIDE):
        for a in range(_SIDE):
            count = np.int64(pairs[b * _SIDE + a])
            single[a] += count
            single[b] += count
    single[0] -= none
    counts[0] = none
    for s in range(max(lowest, 1), highest + 1):
        counts[s] = single[s % _SIDE]

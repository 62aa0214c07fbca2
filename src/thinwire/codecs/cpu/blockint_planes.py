"""Codes of 2 to 8 bits in planes: the payload of the block integers behind its scales, see docs/wire-format.md.

``q`` is 2**(bits-1). Codes are written and read 32 at a time; planes are uint8 arrays or, in the inner functions, spans.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from .spans import load, store
from .vectors import convert, reinterpret


@njit(nogil=True, cache=True, forceinline=True)
def low_bits(q):
    """Width of the first plane: codes of 4 to 6 bits keep their low 4 bits there, those of 2 and 3 bits 2."""
    return np.uint64(8 if q == 128 else 4 if q >= 8 else 2)


@njit(nogil=True, cache=True, forceinline=True)
def high_bits(q):
    """Width of the second plane: what the first leaves."""
    return np.uint64(2 if q == 32 else 1 if q == 16 or q == 4 else 0)


@njit(nogil=True, cache=True, forceinline=True)
def nbytes_of(count, width):
    """Bytes of ``count`` values of ``width`` bits."""
    return (count * width + np.uint64(7)) >> np.uint64(3)


@njit(nogil=True, cache=True)
def planes(payload, blocks, size, q):
    """The two planes of a payload of so many values."""
    low_plane = np.uint64(4) * blocks
    high_plane = low_plane + nbytes_of(size, low_bits(q))
    return payload[low_plane:high_plane], payload[high_plane : high_plane + nbytes_of(size, high_bits(q))]


@njit(nogil=True, cache=True, forceinline=True)
def pack(even, odd, first, q, low_plane, high_plane):
    """Write 32 codes to the planes (uint8) of values, as those from value ``first`` on.

    even, odd: the codes of even and odd places in the low bits of int32. Two make a pair, pairs make a byte.
    """
    low, high = np.int32(low_bits(q)), high_bits(q)
    pairs = _pairs(even, odd, low)
    if low == 8:
        store(low_plane, first, reinterpret(convert(pairs, np.uint16), np.uint8))
    elif low == 4:
        store(low_plane, first >> np.uint64(1), convert(pairs, np.uint8))
    else:
        store(low_plane, first >> np.uint64(2), _fours(pairs))
    if high == 2:
        store(high_plane, first >> np.uint64(2), _fours(_pairs(even >> low, odd >> low, np.int32(2))))
    elif high == 1:
        bits = reinterpret(_pairs(even >> low, odd >> low, np.int32(1)), np.uint64)
        fours = reinterpret(convert(bits | (bits >> 30), np.uint8), np.uint16)
        store(high_plane, first >> np.uint64(3), convert(fours | (fours >> 4), np.uint8))


@njit(nogil=True, cache=True, forceinline=True)
def _pairs(even, odd, width):
    """The low bits of one beside those of the other."""
    mask = np.int32((np.int32(1) << width) - np.int32(1))
    return (even & mask) | ((odd & mask) << width)


@njit(nogil=True, cache=True, forceinline=True)
def _fours(pairs):
    """Two pairs of two bits each as one byte."""
    two = reinterpret(pairs, np.uint64)
    return convert(two | (two >> 28), np.uint8)


@njit(nogil=True, cache=True, forceinline=True)
def unpack(first, q, low_plane, high_plane):
    """The 32 codes (int8) from value ``first`` on."""
    if q == 128:
        return reinterpret(load(low_plane, first, 32), np.int8)
    low, high = low_bits(q), high_bits(q)
    if low == 4:
        nibbles = convert(load(low_plane, first >> np.uint64(1), 16), np.uint16)
        codes = reinterpret((nibbles & 15) | ((nibbles << 4) & 0xF00), np.uint8)
    else:
        codes = reinterpret(_spread_crumbs(load(low_plane, first >> np.uint64(2), 8)), np.uint8)
    if high == 2:
        upper = _spread_crumbs(load(high_plane, first >> np.uint64(2), 8)) << np.uint32(low)
        codes = codes | reinterpret(upper, np.uint8)
    elif high == 1:
        upper = _spread_bits(load(high_plane, first >> np.uint64(3), 4)) << low
        codes = codes | reinterpret(upper, np.uint8)
    return reinterpret((codes ^ np.uint8(q)) - np.uint8(q), np.int8)


@njit(nogil=True, cache=True, forceinline=True)
def _spread_crumbs(packed):
    """The inverse: four bytes of two bits each."""
    p = convert(packed, np.uint32)
    return (p | (p << 6) | (p << 12) | (p << 18)) & np.uint32(0x03030303)


@njit(nogil=True, cache=True, forceinline=True)
def _spread_bits(packed):
    """Eight bytes of one bit each; the lowest bit comes first."""
    p = (convert(packed, np.uint64) * np.uint64(0x0101010101010101)) & np.uint64(0x8040201008040201)
    return ((p + np.uint64(0x7F7F7F7F7F7F7F7F)) >> 7) & np.uint64(0x0101010101010101)


@njit(nogil=True, cache=True)
def last_planes(low_plane, high_plane, rest, block, q):
    """The planes of the last, shorter block, as long as those of a whole one."""
    low = np.zeros(nbytes_of(block, low_bits(q)), np.uint8)
    high = np.zeros(nbytes_of(block, high_bits(q)), np.uint8)
    _get_end(low, low_plane, nbytes_of(rest, low_bits(q)))
    _get_end(high, high_plane, nbytes_of(rest, high_bits(q)))
    return low, high


@njit(nogil=True, cache=True)
def _get_end(part, plane, count):
    """Read the end of ``plane`` to the first bytes of ``part``."""
    part[:count] = plane[np.uint64(plane.size) - count :]


@njit(nogil=True, cache=True)
def put_end(part, plane, count):
    """Write the first bytes of ``part`` to the end of ``plane``."""
    plane[np.uint64(plane.size) - count :] = part[:count]

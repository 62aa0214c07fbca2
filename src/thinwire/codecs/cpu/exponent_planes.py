"""An exponent's place in a value and what remains of it, which ``exponent`` sends as it is: planes of bytes and bits.

Blocks of values go through buffers of exponents, which the streams are made of, and of rests: sign and mantissa.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,assignment,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from .spans import load, store, zeros
from .vectors import any_bit, convert, fill, lane, larger, largest, select


@njit(nogil=True, cache=True)
def plane_nbytes(n, width):
    """Bytes of the planes of n rests of 8, 11 or 24 bits."""
    return n * (width // 8) + (3 * n + 7) // 8 * (width % 8 != 0)


@njit(nogil=True, cache=True)
def split_upper(values, first, m, exponents, rests, at, lowest):
    """Exponents and rests (sign, mantissa; to ``at``) of m bf16 values, or of the upper halves of fp32 ones.

    All arrays are spans. Returns how far an exponent other than 0 is above ``lowest`` (under it: a large number), and
    all values or-ed.
    """
    whole = m & ~np.uint64(31)
    above, ored = fill(np.uint8(0), 32), zeros(values, 32)
    for j in range(np.uint64(0), whole, np.uint64(32)):
        v = load(values, first + j, 32)
        ored = ored | v
        above = larger(above, _split_some(v, exponents, j, rests, at + j, lowest))
    most, bits = np.int64(largest(above)), np.int64(any_bit(ored))
    for j in range(whole, m):
        v = load(values, first + j, 1)
        bits |= np.int64(lane(v, 0))
        most = max(most, np.int64(lane(_split_some(v, exponents, j, rests, at + j, lowest), 0)))
    return most, bits


@njit(nogil=True, cache=True, forceinline=True)
def _split_some(v, exponents, j, rests, at, lowest):
    """:func:`split_upper` of a vector of values."""
    h = _upper_halves(v)
    e = convert(h >> 7, np.uint8)
    store(exponents, j, e)
    store(rests, at, convert((h & 127) | ((h >> 8) & 128), np.uint8))
    return select(e == np.uint8(0), e, e - lowest)  # modulo 256


def _upper_halves(v):
    """The bits of bf16 that a vector of 16-bit values is, or that fp32 values begin with."""


@overload(_upper_halves, jit_options={"forceinline": True})
def _upper_halves_overload(v):
    if v.dtype == types.uint16:
        return lambda v: v
    return lambda v: convert(v >> 16, np.uint16)


@njit(nogil=True, cache=True)
def split(tile, mantissa_bits, drop, exponents, rests, lowest):
    """:func:`split_upper` for any dtype. rests: uint32, without the ``drop`` low bits."""
    gone, kept = np.uint32(drop), mantissa_bits - drop
    low, sign, top = np.uint32((1 << kept) - 1), np.uint32(8 * tile.itemsize - 1), np.uint32(kept)
    most, base = np.uint8(0), np.uint8(lowest)
    ored = np.uint32(0)
    shift, mask = np.uint32(mantissa_bits), np.uint32((1 << (8 * tile.itemsize - 1 - mantissa_bits)) - 1)
    for j in range(tile.size):
        v = np.uint32(tile[j])
        e = np.uint8((v >> shift) & mask)
        exponents[j] = e
        ored |= v
        rests[j] = ((v >> gone) & low) | ((v >> sign) << top)
    for e in exponents[: tile.size]:
        above = np.uint8(e - base)  # modulo 256: large for those under the lowest
        most = max(most, np.uint8(above * np.uint8(e != 0)))
    return np.int64(most), np.int64(ored)


@njit(nogil=True, cache=True)
def put_planes(rests, first, m, n, width, planes, out):
    """Write m rests from value ``first`` on to the planes of n values."""
    for p in range(width // 8):
        plane = out[planes + p * n + first : planes + p * n + first + m]
        for j in range(m):
            plane[j] = np.uint8((rests[j] >> np.uint32(8 * p)) & np.uint32(255))
    if width % 8:
        at = planes + n + 3 * first // 8
        whole = m // 8
        for g in range(whole):
            three = np.uint32(0)
            for i in range(8):
                three |= (rests[8 * g + i] >> np.uint32(8)) << np.uint32(3 * i)
            out[at + 3 * g] = np.uint8(three & np.uint32(255))
            out[at + 3 * g + 1] = np.uint8((three >> np.uint32(8)) & np.uint32(255))
            out[at + 3 * g + 2] = np.uint8(three >> np.uint32(16))
        three = np.uint32(0)
        for i in range(8 * whole, m):
            three |= (rests[i] >> np.uint32(8)) << np.uint32(3 * (i - 8 * whole))
        for i in range((3 * (m - 8 * whole) + 7) // 8):
            out[at + 3 * whole + i] = np.uint8((three >> np.uint32(8 * i)) & np.uint32(255))


@njit(nogil=True, cache=True)
def merge(exponents, rests, values, mantissa_bits, drop):
    """The inverse of :func:`split`."""
    kept = mantissa_bits - drop
    shift, low = np.uint32(mantissa_bits), np.uint32((1 << kept) - 1)
    sign, top, gap = np.uint32(8 * values.itemsize - 1), np.uint32(kept), np.uint32(drop)
    for j in range(values.size):
        v = (rests[j] & low) << gap
        values[j] = v | ((rests[j] >> top) << sign) | (np.uint32(exponents[j]) << shift)


@njit(nogil=True, cache=True)
def merge_upper(exponents, row, rests, at, values, first, m):
    """The inverse of :func:`split_upper`: m values from ``first`` on."""
    whole = m & ~np.uint64(31)
    for j in range(np.uint64(0), whole, np.uint64(32)):
        _merge_some(load(exponents, row + j, 32), load(rests, at + j, 32), values, first + j)
    for j in range(whole, m):
        _merge_some(load(exponents, row + j, 1), load(rests, at + j, 1), values, first + j)


@njit(nogil=True, cache=True, forceinline=True)
def _merge_some(exponents, rests, values, at):
    """:func:`merge_upper` of vectors."""
    e, r = convert(exponents, np.uint16), convert(rests, np.uint16)
    _put_halves(values, at, (r & 127) | ((r & 128) << 8) | (e << 7))


def _put_halves(into, at, halves):
    """Write values of 16 bits, or fp32 values that begin with them and have zeros behind."""


@overload(_put_halves, jit_options={"forceinline": True})
def _put_halves_overload(into, at, halves):
    if into.dtype == types.uint16:
        return lambda into, at, halves: store(into, at, halves)
    return lambda into, at, halves: store(into, at, convert(halves, np.uint32) << 16)


@njit(nogil=True, cache=True)
def get_planes(payload, first, m, n, width, planes, rests):
    plane = payload[planes + first : planes + first + m]
    for j in range(m):
        rests[j] = plane[j]
    for p in range(1, width // 8):
        plane = payload[planes + p * n + first : planes + p * n + first + m]
        for j in range(m):
            rests[j] |= np.uint32(plane[j]) << np.uint32(8 * p)
    if width % 8:
        at = planes + n + 3 * first // 8
        whole = m // 8
        for g in range(whole):
            three = np.uint32(payload[at + 3 * g]) | (np.uint32(payload[at + 3 * g + 1]) << np.uint32(8))
            three |= np.uint32(payload[at + 3 * g + 2]) << np.uint32(16)
            for i in range(8):
                rests[8 * g + i] |= ((three >> np.uint32(3 * i)) & np.uint32(7)) << np.uint32(8)
        three = np.uint32(0)
        for i in range((3 * (m - 8 * whole) + 7) // 8):
            three |= np.uint32(payload[at + 3 * whole + i]) << np.uint32(8 * i)
        for i in range(8 * whole, m):
            rests[i] |= ((three >> np.uint32(3 * (i - 8 * whole))) & np.uint32(7)) << np.uint32(8)

"""Values of any dtype in and out of vectors, as fp32: what ``values`` does one by one.

16-bit values are uint16 bits; ``half`` tells fp16 from bf16. fp32 values are read as int32 bits. Memory is a span.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from .spans import load, store
from .values import INF, prefetch, widen
from .vectors import convert, evens, fill, larger, largest, odds, reinterpret, select, smaller

_BF16_MAX = np.int32(0x7F7F0000).view(np.float32)


@njit(nogil=True, cache=True, forceinline=True)
def widen_lanes(u, half):
    """``widen`` of values whose bits are int32; gives fp32."""
    if half:
        a = (u & np.int32(0x7FFF)) << 13
        r = select(a < np.int32(0x0F800000), a + np.int32(0x38000000), a + np.int32(0x70000000))
        s = reinterpret(a + np.int32(0x38800000), np.float32) - np.float32(2.0**-14)
        r = select(a < np.int32(0x00800000), reinterpret(s, np.int32), r)
        return reinterpret(r | ((u & np.int32(0x8000)) << 16), np.float32)
    return reinterpret(u << 16, np.float32)


@njit(nogil=True, cache=True, forceinline=True)
def narrow_lanes(values, half, most):
    """``narrow`` of fp32 values whose magnitudes are at most that of ``most``; gives uint16 bits as uint32."""
    u = reinterpret(values, np.uint32)
    if half:
        a = reinterpret(u & np.uint32(0x7FFFFFFF), np.int32)
        r = (a - np.int32(0x38000000 - 0xFFF) + ((a >> 13) & np.int32(1))) >> 13
        r = smaller(r, np.int32(0x7BFF))
        # 0.5 has the ulp 2**-24, which is fp16's subnormal step.
        s = reinterpret(reinterpret(a, np.float32) + np.float32(0.5), np.int32) - np.int32(0x3F000000)
        r = select(a < np.int32(0x38800000), s, r)
        r = select(a > INF, np.int32(0x7E00), r)
        return reinterpret(r, np.uint32) | ((u >> 16) & np.uint32(0x8000))
    if abs(most) <= _BF16_MAX:  # nothing to cut, and no NaN
        return (u + np.uint32(0x7FFF) + ((u >> 16) & np.uint32(1))) >> 16
    a = reinterpret(u & np.uint32(0x7FFFFFFF), np.int32)
    r = smaller((a + np.int32(0x7FFF) + ((a >> 16) & np.int32(1))) >> 16, np.int32(0x7F7F))
    r = select(a > INF, np.int32(0x7FC0), r)
    return reinterpret(r, np.uint32) | ((u >> 16) & np.uint32(0x8000))


@njit(nogil=True, cache=True, forceinline=True)
def round_floats(values, half, most):
    """fp32 values of magnitudes up to that of ``most`` (NaN: any), to fp16 (half) or bf16 and back."""
    return widen_lanes(reinterpret(narrow_lanes(values, half, most), np.int32), half)


def get_floats(x, at, half):
    """The 16 values of x from ``at`` on, as fp32."""


@overload(get_floats, jit_options={"forceinline": True})
def _get_floats_overload(x, at, half):
    if x.dtype == types.int32:
        return lambda x, at, half: reinterpret(load(x, at, 16), np.float32)
    return lambda x, at, half: widen_lanes(convert(load(x, at, 16), np.int32), half)


def get_pairs(x, at, half):
    """The 32 values of x from ``at`` on, as fp32: those of even places, and those of odd ones."""


@overload(get_pairs, jit_options={"forceinline": True})
def _get_pairs_overload(x, at, half):
    if x.dtype == types.int32:

        def pairs32(x, at, half):
            first, second = load(x, at, 16), load(x, at + np.uint64(16), 16)
            return (
                reinterpret(evens(first, second), np.float32),
                reinterpret(odds(first, second), np.float32),
            )

        return pairs32

    def pairs16(x, at, half):
        words = reinterpret(load(x, at, 32), np.int32)
        if half:
            return widen_lanes(words & np.int32(0xFFFF), half), widen_lanes(
                (words >> 16) & np.int32(0xFFFF), half
            )
        return reinterpret(words << 16, np.float32), reinterpret(words & np.int32(-65536), np.float32)

    return pairs16


def put_floats(out, at, values, half, most):
    """16 fp32 values of magnitudes up to that of ``most`` (NaN: any) to out from ``at`` on, rounded to its dtype."""


@overload(put_floats, jit_options={"forceinline": True})
def _put_floats_overload(out, at, values, half, most):
    if out.dtype == types.float32:
        return lambda out, at, values, half, most: store(out, at, values)
    return lambda out, at, values, half, most: store(
        out, at, convert(narrow_lanes(values, half, most), np.uint16)
    )


def extremes(x, first, n, half):
    """The largest of n values (a multiple of 32) of x from ``first`` on and the largest negated one, as fp32 bits.

    Both are at least 0; one is INF or more where a value is not finite.
    """


@overload(extremes, jit_options={"forceinline": True})
def _extremes_overload(x, first, n, half):
    # Floats of one sign sort as their bits do; as unsigned numbers, those with a sign are the largest.
    wide = x.dtype == types.int32
    signed, unsigned = (np.int32, np.uint32) if wide else (np.int16, np.uint16)
    lanes = 16 if wide else 32
    step, sign = np.uint64(lanes), unsigned(1 << (8 * np.dtype(unsigned).itemsize - 1))

    def extremes_of(x, first, n, half):
        high, low = fill(signed(0), lanes), fill(unsigned(0), lanes)
        for j in range(first, first + n, step):
            v = load(x, j, lanes)
            high = larger(high, reinterpret(v, signed))
            low = larger(low, reinterpret(v, unsigned))
        most, least = largest(high), largest(low)
        least = unsigned(least ^ sign) if least >= sign else unsigned(0)
        if wide:
            return np.int32(most), np.int32(least)
        return widen(most, half), widen(least, half)

    return extremes_of


def ahead(x, at, distance):
    """Ask for the 32 values that lie ``distance`` after x[at]. The memory works on them while others are coded."""


@overload(ahead, jit_options={"forceinline": True})
def _ahead_overload(x, at, distance):
    if x.dtype.bitwidth == 32:

        def ahead32(x, at, distance):
            prefetch(x, at + distance)
            prefetch(x, at + distance + np.uint64(16))

        return ahead32
    return lambda x, at, distance: prefetch(x, at + distance)


@njit(nogil=True, cache=True)
def copy_bytes(source, at, target, to, n):
    """n bytes (uint64) of a span from index ``at`` to another from ``to``."""
    whole = n & ~np.uint64(31)
    for j in range(np.uint64(0), whole, np.uint64(32)):
        store(target, to + j, load(source, at + j, 32))
    for j in range(whole, n):  # what has just been written in smaller pieces could not be read in one
        store(target, to + j, load(source, at + j, 1))

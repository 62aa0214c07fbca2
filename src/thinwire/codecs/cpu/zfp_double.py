"""ZFP kernels: fp64 values to blocks of a fixed number of bits, and back. ``reference_zfp`` specifies them.

As in the kernels of fp32 the arithmetic of a batch of blocks is done at once. A block of fp64 can have 256 bits, so its
planes, four words of 16 nibbles from plane 63 down, go to the stream and come from it a word at a time: few bits by
table until all four slots are significant, then planes as they are.

The compiled code is cached by this file's date: after a change of zfp_planes.py, zfp_lift.py or reference_zfp.py, this
file has to be touched.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .zfp_lift import (
    SPECIAL,
    classes_of,
    from_negabinary64,
    lift64,
    negabinary64,
    padded,
    unlift64,
)
from .zfp_planes import DECODE, ENCODE, LAST, U, coefficients_of, planes_of, trailing_zeros

BATCH = 128  # blocks whose arithmetic is done at once, as vector operations over the blocks
HEADER = U(12)
PIECE = U(0xFFFF)
INFINITY, SIGN = U(0x7FF0000000000000), U(0x8000000000000000)
MAGNITUDE, LARGEST_FINITE = np.int64(0x7FFFFFFFFFFFFFFF), np.int64(0x7FEFFFFFFFFFFFFF)
EXPONENT_SHIFT, ONE = np.int64(52), np.int64(1)
# 2^(62 - emax) and 2^(emax - 62) may be beyond fp64, so values are scaled in two steps. Neither loses a bit that
# counts: on the way to integers what is rounded is far below 1, and on the way back only the second can be subnormal.
# Exponent fields of 2^(62 - emax), emax = E - 1022, E the exponent field of the block's largest value:
ENCODE_FIRST, ENCODE_SECOND = np.int64(1023 + 542), np.int64(1023 + 542)
# and of 2^(emax - 62), emax = e - 1023:
DECODE_FIRST, DECODE_SECOND = np.int64(1023 - 543), np.int64(1023 - 542)


@njit(nogil=True)
def _transform(x, bits, largest, first_bits, second_bits, first, second, integers, planes):  # type: ignore[no-untyped-def]
    """Steps 1 to 4 of whole blocks: the largest magnitude of each, as bits, and its planes.

    A block that is not finite gives planes without a meaning; nobody reads them.
    """
    count = x.size // 4
    for b in range(count):
        largest[b] = max(
            max(bits[4 * b] & MAGNITUDE, bits[4 * b + 1] & MAGNITUDE),
            max(bits[4 * b + 2] & MAGNITUDE, bits[4 * b + 3] & MAGNITUDE),
        )
    for b in range(count):
        exponent = largest[b] >> EXPONENT_SHIFT
        half = exponent >> ONE
        first_bits[b] = (ENCODE_FIRST - half) << EXPONENT_SHIFT
        second_bits[b] = (ENCODE_SECOND - (exponent - half)) << EXPONENT_SHIFT
    for b in range(count):
        for j in range(4):
            integers[4 * b + j] = np.int64(x[4 * b + j] * first[b] * second[b])
    for b in range(count):
        c0, c1, c2, c3 = lift64(
            integers[4 * b], integers[4 * b + 1], integers[4 * b + 2], integers[4 * b + 3]
        )
        u0, u1, u2, u3 = negabinary64(c0), negabinary64(c1), negabinary64(c2), negabinary64(c3)
        for q in range(4):
            s = U(48 - 16 * q)
            planes[4 * b + q] = (
                (u0 >> s & PIECE)
                | (u1 >> s & PIECE) << U(16)
                | (u2 >> s & PIECE) << U(32)
                | (u3 >> s & PIECE) << U(48)
            )
    for k in range(4 * count):
        planes[k] = planes_of(planes[k])


@njit(inline="always")
def _low(bits, size):  # type: ignore[no-untyped-def]
    """The low ``size`` bits, 64 being all."""
    return bits if size >= U(64) else bits & ((U(1) << size) - U(1))


@njit(nogil=True)
def _write(bits, largest, planes, budget, out, at, word, fill):  # type: ignore[no-untyped-def]
    """Append blocks to out, of which word number ``at`` has ``fill`` bits in ``word``: the new at, word and fill."""
    for b in range(bits.size // 4):
        # Bits to write, their number, planes that they are of, significant slots: those of four zeros.
        code, size, k, significant = U(0), U(0), np.int64(64), U(0)
        if largest[b] > LARGEST_FINITE:
            code, size = classes_of(bits, 4 * b, INFINITY, SIGN), HEADER
        elif largest[b] > 0:
            zeros = trailing_zeros(planes[4 * b]) >> U(2)
            code, size, k = U(2) * U(largest[b] >> EXPONENT_SHIFT) + U(3), HEADER + zeros, np.int64(zeros)
        left = U(budget)
        while left > U(0):
            while (
                significant < U(4) and k < 64 and size < min(left, U(48))
            ):  # two planes have 11 bits at most
                q, s = 4 * b + (k >> 4), U(4 * (k & 15))
                pair = planes[q] >> s
                if k & 15 == 15 and k < 63:
                    pair |= planes[q + 1] << U(4)
                entry = ENCODE[U(256) * significant + (pair & U(255))]
                code |= (entry & U(0xFFFF)) << size
                size += entry >> U(16) & U(255)
                significant = entry >> U(24)
                k += 2
            size = min(size, left)
            left -= size
            code = _low(code, size)
            word |= code << fill
            fill += size
            if fill >= U(64):
                out[at] = word
                at += 1
                fill -= U(64)
                word = (code >> U(1)) >> (size - fill - U(1))
            if k >= 64:
                code, size = U(0), U(64)
            elif significant < U(4):
                code, size = U(0), U(0)
            else:
                s = U(4 * (k & 15))
                code, size = planes[4 * b + (k >> 4)] >> s, U(64) - s
                k = (k | 15) + 1
    return at, word, fill


@njit(nogil=True, cache=True)
def encode(x, budget, out):  # type: ignore[no-untyped-def]
    """The payload of x, float64 (n,), with blocks of ``budget`` bits, to out, uint64, all of it."""
    largest, planes = np.empty(BATCH, np.int64), np.empty(4 * BATCH, np.uint64)
    first_bits, second_bits = np.empty(BATCH, np.int64), np.empty(BATCH, np.int64)
    first, second = first_bits.view(np.float64), second_bits.view(np.float64)
    integers = np.empty(4 * BATCH, np.int64)
    word, fill, at = U(0), U(0), 0
    whole = x.size & ~3
    start = 0
    while start < x.size:
        if start < whole:
            part = x[start : min(start + 4 * BATCH, whole)]
        else:
            part = padded(x)
        start += part.size
        _transform(
            part, part.view(np.int64), largest, first_bits, second_bits, first, second, integers, planes
        )
        at, word, fill = _write(part.view(np.uint64), largest, planes, budget, out, at, word, fill)
    if fill > U(0):
        out[at] = word


@njit(nogil=True)
def _read(words, position, budget, count, planes, first_bits, second_bits, special, classes):  # type: ignore[no-untyped-def]
    """Planes and scales of ``count`` blocks from a position on; the number of blocks that are not finite.

    special, classes: the first value of each such block, and the classes of its values.
    """
    planes[: 4 * count] = 0
    specials = 0
    for b in range(count):
        at, shift = position >> 6, U(position & 63)
        head = words[at] >> shift
        if at + 1 < words.size:
            head |= (words[at + 1] << U(1)) << (U(63) - shift)
        exponent = np.int64(head >> U(1) & U(2047))
        half = exponent >> ONE
        first_bits[b] = (DECODE_FIRST + half) << EXPONENT_SHIFT
        second_bits[b] = (DECODE_SECOND + (exponent - half)) << EXPONENT_SHIFT
        k, left, significant = np.int64(0), U(budget) - HEADER, U(0)
        if head & U(1) == U(0):
            k = np.int64(64)
            if head & U(510):
                special[specials] = 4 * b
                classes[specials] = head >> U(1)
                specials += 1
        place = position + 12
        while left > U(0) and k < 64:
            at, shift = place >> 6, U(place & 63)
            window = words[at] >> shift
            if at + 1 < words.size:
                window |= (words[at + 1] << U(1)) << (U(63) - shift)
            seen = min(left, U(64))
            window = _low(window, seen)
            found, n, taken = U(0), U(0), U(0)  # planes of this window, their number, the bits they take
            while significant < U(4) and seen - taken >= U(8) and n <= U(8):
                entry = DECODE[U(256) * significant + (window & U(255))]
                found |= (entry & U(0xFFFFFFFF)) << (U(4) * n)
                n += entry >> U(42) & U(63)
                size = entry >> U(32) & U(255)
                significant = entry >> U(48)
                window >>= size
                taken += size
            if left - taken < U(8):
                while significant < U(4) and taken < left and n < U(16):
                    entry = LAST[(U(4) * (left - taken) + significant) * U(128) + window]
                    found |= (entry & U(255)) << (U(4) * n)
                    n += U(1)
                    size = entry >> U(8) & U(255)
                    significant = entry >> U(16)
                    window >>= size
                    taken += size
            if significant == U(4) and n < U(16):
                # Planes as they are. What is here of one that goes on in the next window is read there once more.
                found |= window << (U(4) * n)
                size = min(U(64) - U(4) * n, seen - taken)
                if left > seen:
                    size &= ~U(3)
                n += (size + U(3)) >> U(2)
                taken += size
            q, s = 4 * b + (k >> 4), U(4 * (k & 15))
            planes[q] |= found << s
            if k < 48:
                planes[q + 1] |= (found >> U(1)) >> (U(63) - s)
            place += np.int64(taken)
            left -= taken
            k += np.int64(n)
        position += budget
    return specials


@njit(nogil=True)
def _restore(planes, first, second, limit, integers, out):  # type: ignore[no-untyped-def]
    """Steps 4 to 1 undone: planes of whole blocks to values."""
    count = out.size // 4
    for k in range(4 * count):
        planes[k] = coefficients_of(planes[k])
    for b in range(count):
        p0, p1, p2, p3 = planes[4 * b], planes[4 * b + 1], planes[4 * b + 2], planes[4 * b + 3]
        c0, c1, c2, c3 = unlift64(
            from_negabinary64(
                (p0 & PIECE) << U(48) | (p1 & PIECE) << U(32) | (p2 & PIECE) << U(16) | (p3 & PIECE)
            ),
            from_negabinary64(
                (p0 >> U(16) & PIECE) << U(48)
                | (p1 >> U(16) & PIECE) << U(32)
                | (p2 >> U(16) & PIECE) << U(16)
                | (p3 >> U(16) & PIECE)
            ),
            from_negabinary64(
                (p0 >> U(32) & PIECE) << U(48)
                | (p1 >> U(32) & PIECE) << U(32)
                | (p2 >> U(32) & PIECE) << U(16)
                | (p3 >> U(32) & PIECE)
            ),
            from_negabinary64(
                p0 >> U(48) << U(48) | p1 >> U(48) << U(32) | p2 >> U(48) << U(16) | p3 >> U(48)
            ),
        )
        integers[4 * b] = c0
        integers[4 * b + 1] = c1
        integers[4 * b + 2] = c2
        integers[4 * b + 3] = c3
    for b in range(count):
        for j in range(4):
            value = np.float64(integers[4 * b + j]) * first[b] * second[b]
            out[4 * b + j] = min(max(value, -limit), limit)


@njit(nogil=True, cache=True)
def decode(words, budget, limit, out):  # type: ignore[no-untyped-def]
    """The values of words, uint64, to out, float64 (n,). limit: the largest magnitude that a finite block decodes to."""
    first_bits, second_bits = np.empty(BATCH, np.int64), np.empty(BATCH, np.int64)
    first, second = first_bits.view(np.float64), second_bits.view(np.float64)
    integers, planes = np.empty(4 * BATCH, np.int64), np.empty(4 * BATCH, np.uint64)
    special, classes = np.empty(BATCH, np.int64), np.empty(BATCH, np.uint64)
    tail = np.zeros(4, np.float64)
    whole = out.size & ~3
    start = 0
    while start < out.size:
        part = out[start : min(start + 4 * BATCH, whole)] if start < whole else tail
        specials = _read(
            words,
            (start >> 2) * budget,
            budget,
            part.size // 4,
            planes,
            first_bits,
            second_bits,
            special,
            classes,
        )
        _restore(planes, first, second, limit, integers, part)
        for k in range(specials):
            for j in range(4):
                part[special[k] + j] = SPECIAL[classes[k] >> U(2 * j) & U(3)]
        if start >= whole:
            for j in range(out.size - whole):
                out[whole + j] = part[j]
        start += part.size

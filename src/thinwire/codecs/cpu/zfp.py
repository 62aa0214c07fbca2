"""ZFP kernels: fp32 values to blocks of a fixed number of bits, and back. ``reference_zfp`` specifies them.

The arithmetic of a batch of blocks is done at once, as vector operations; then each block's planes are coded in
registers, 128 bits wide. The compiled code is cached by this file's date: after a change of zfp_planes.py,
zfp_lift.py or reference_zfp.py, this file has to be touched.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .zfp_lift import (
    SPECIAL,
    classes_of,
    from_negabinary32,
    lift32,
    negabinary32,
    padded,
    unlift32,
    word_at,
)
from .zfp_planes import HEADER, U, block_of, coefficients_of, parse, planes_of

LOW_HALF, HIGH_HALF = np.uint32(0x0000FFFF), np.uint32(0xFFFF0000)

BATCH = 256  # blocks whose arithmetic is done at once, as vector operations over the blocks
# The exponent field of float64 2^(30 - emax) is this less the biased exponent of the largest value.
ENCODE_EXPONENT = U(1023 + 30 + 126)
# That of 2^(emax - 30) is this plus e = emax + 127.
DECODE_EXPONENT = U(1023 - 127 - 30)
EXPONENT_SHIFT = U(52)
INFINITY, SIGN = U(0x7F800000), U(0x80000000)


@njit(nogil=True)
def _transform(x, bits, largest, scale, scale_bits, integers, upper, lower):  # type: ignore[no-untyped-def]
    """Steps 1 to 4 of whole blocks: the largest magnitude of each, as bits, and planes 31..16 and 15..0.

    A block that is not finite gives planes without a meaning; nobody reads them.
    """
    count = x.size // 4
    upper32, lower32 = upper.view(np.uint32), lower.view(np.uint32)
    magnitude = np.uint32(0x7FFFFFFF)
    for b in range(count):
        largest[b] = max(
            max(bits[4 * b] & magnitude, bits[4 * b + 1] & magnitude),
            max(bits[4 * b + 2] & magnitude, bits[4 * b + 3] & magnitude),
        )
    for b in range(count):
        scale_bits[b] = (ENCODE_EXPONENT - U(largest[b] >> np.uint32(23))) << EXPONENT_SHIFT
    for b in range(count):
        for j in range(4):
            integers[4 * b + j] = np.int32(np.float64(x[4 * b + j]) * scale[b])
    for b in range(count):
        c0, c1, c2, c3 = lift32(
            integers[4 * b], integers[4 * b + 1], integers[4 * b + 2], integers[4 * b + 3]
        )
        u0, u1, u2, u3 = negabinary32(c0), negabinary32(c1), negabinary32(c2), negabinary32(c3)
        upper32[2 * b] = np.uint32(u0 >> np.uint32(16)) | np.uint32(u1 & HIGH_HALF)
        upper32[2 * b + 1] = np.uint32(u2 >> np.uint32(16)) | np.uint32(u3 & HIGH_HALF)
        lower32[2 * b] = np.uint32(u0 & LOW_HALF) | np.uint32(u1 << np.uint32(16))
        lower32[2 * b + 1] = np.uint32(u2 & LOW_HALF) | np.uint32(u3 << np.uint32(16))
    for b in range(count):
        upper[b] = planes_of(upper[b])
    for b in range(count):
        lower[b] = planes_of(lower[b])


@njit(nogil=True, cache=True)
def encode(x, budget, out):  # type: ignore[no-untyped-def]
    """The payload of x, float32 (n,), with blocks of `budget` bits, to out, uint64, all of it."""
    size = U(budget)
    keep_low = ~U(0) if budget >= 64 else (U(1) << size) - U(1)
    keep_high = ~U(0) if budget >= 128 else (U(0) if budget <= 64 else (U(1) << (size - U(64))) - U(1))
    largest, scale_bits = np.empty(BATCH, np.uint32), np.empty(BATCH, np.uint64)
    scale, integers = scale_bits.view(np.float64), np.empty(4 * BATCH, np.int32)
    upper, lower = np.empty(BATCH, np.uint64), np.empty(BATCH, np.uint64)
    word, fill, at = U(0), U(0), 0
    whole = x.size & ~3
    start = 0
    while start < x.size:
        if start < whole:
            part = x[start : min(start + 4 * BATCH, whole)]
        else:
            part = padded(x)
        start += part.size
        bits = part.view(np.uint32)
        _transform(part, bits, largest, scale, scale_bits, integers, upper, lower)
        for b in range(part.size // 4):
            high, low = U(0), U(0)
            if largest[b] >= np.uint32(0x7F800000):
                low = classes_of(bits, 4 * b, INFINITY, SIGN)
            elif largest[b] > np.uint32(0):
                high, low = block_of(upper[b], lower[b], U(largest[b] >> np.uint32(23)))
            low, high = low & keep_low, high & keep_high
            word |= low << fill
            if budget < 64:
                fill += size
                if fill >= U(64):
                    out[at] = word
                    at += 1
                    fill -= U(64)
                    word = low >> (size - fill)
            else:
                out[at] = word
                at += 1
                word = (low >> U(1)) >> (U(63) - fill) | high << fill
                fill += size - U(64)
                if fill >= U(64):
                    out[at] = word
                    at += 1
                    fill -= U(64)
                    word = (high >> U(1)) >> (size - U(65) - fill)
    if fill > U(0):
        out[at] = word


@njit(nogil=True)
def _restore(upper, lower, scale, limit, integers, add, out):  # type: ignore[no-untyped-def]
    """Steps 4 to 1 undone: planes of whole blocks to values."""
    count = out.size // 4
    upper32, lower32 = upper.view(np.uint32), lower.view(np.uint32)
    for b in range(count):
        upper[b] = coefficients_of(upper[b])
    for b in range(count):
        lower[b] = coefficients_of(lower[b])
    for b in range(count):
        u01, u23, l01, l23 = upper32[2 * b], upper32[2 * b + 1], lower32[2 * b], lower32[2 * b + 1]
        c0, c1, c2, c3 = unlift32(
            from_negabinary32(np.uint32(u01 << np.uint32(16)) | np.uint32(l01 & LOW_HALF)),
            from_negabinary32(np.uint32(u01 & HIGH_HALF) | np.uint32(l01 >> np.uint32(16))),
            from_negabinary32(np.uint32(u23 << np.uint32(16)) | np.uint32(l23 & LOW_HALF)),
            from_negabinary32(np.uint32(u23 & HIGH_HALF) | np.uint32(l23 >> np.uint32(16))),
        )
        integers[4 * b] = c0
        integers[4 * b + 1] = c1
        integers[4 * b + 2] = c2
        integers[4 * b + 3] = c3
    if add:
        for b in range(count):
            for j in range(4):
                value = min(max(np.float64(integers[4 * b + j]) * scale[b], -limit), limit)
                out[4 * b + j] += np.float32(value)
    else:
        for b in range(count):
            for j in range(4):
                value = min(max(np.float64(integers[4 * b + j]) * scale[b], -limit), limit)
                out[4 * b + j] = np.float32(value)


@njit(nogil=True, cache=True)
def decode(words, budget, limit, add, out):  # type: ignore[no-untyped-def]
    """The values of words, uint64, to out, float32 (n,), or added to it.

    limit: the largest magnitude that a finite block decodes to.
    """
    size = U(budget)
    keep_low = ~U(0) if budget >= 64 else (U(1) << size) - U(1)
    keep_high = ~U(0) if budget >= 128 else (U(0) if budget <= 64 else (U(1) << (size - U(64))) - U(1))
    scale_bits, integers = np.empty(BATCH, np.uint64), np.empty(4 * BATCH, np.int32)
    scale = scale_bits.view(np.float64)
    upper, lower = np.empty(BATCH, np.uint64), np.empty(BATCH, np.uint64)
    special, classes = np.empty(BATCH, np.int64), np.empty(BATCH, np.uint64)
    padded = np.zeros(4, np.float32)
    whole = out.size & ~3
    start = 0
    while start < out.size:
        if start < whole:
            part = out[start : min(start + 4 * BATCH, whole)]
        else:
            part = padded
            for j in range(out.size - whole):
                part[j] = out[whole + j]
        specials = 0
        for b in range(part.size // 4):
            offset = ((start >> 2) + b) * budget
            at, shift = offset >> 6, U(offset & 63)
            first, second = words[at], word_at(words, at + 1)
            low = (first >> shift | (second << U(1)) << (U(63) - shift)) & keep_low
            high = U(0)
            if budget > 64:
                high = (second >> shift | (word_at(words, at + 2) << U(1)) << (U(63) - shift)) & keep_high
            scale_bits[b] = (DECODE_EXPONENT + (low >> U(1) & U(255))) << EXPONENT_SHIFT
            if low & U(1):
                high, low = high >> HEADER, low >> HEADER | high << (U(64) - HEADER)
                upper[b], lower[b] = parse(high, low, size - HEADER)
            else:
                upper[b], lower[b] = U(0), U(0)
                if low & U(510):
                    special[specials] = 4 * b
                    classes[specials] = low >> U(1)
                    specials += 1
        _restore(upper, lower, scale, limit, integers, add, part)
        for k in range(specials):
            for j in range(4):
                value = SPECIAL[classes[k] >> U(2 * j) & U(3)]
                part[special[k] + j] = part[special[k] + j] + value if add else value
        if start >= whole:
            for j in range(out.size - whole):
                out[whole + j] = part[j]
        start += part.size

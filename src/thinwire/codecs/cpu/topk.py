"""Kernels of ``topk``: the largest values of each block of 4096, their places and their sizes; see codecs/topk.py.

The k-th largest magnitude is found by counting the leading bits of fp32 magnitudes, which sort like integers.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from . import spans
from .values import INF, load, round_to_16_bits, store
from .vectors import fill, first_bit, larger, largest, mask, select, total

BLOCK = 4096
_ABS = np.int32(0x7FFFFFFF)
_MAX = np.finfo(np.float32).max
_LANES = np.uint64(16)


@njit(nogil=True, cache=True, forceinline=True)
def _above(keys, least):
    """How many keys of a block are larger than ``least``."""
    count = none = fill(np.int32(0), 16)
    for j in range(np.uint64(0), np.uint64(BLOCK), _LANES):
        count = count + select(spans.load(keys, j, 16) > least, np.int32(1), none)
    return np.int64(total(count))


@njit(nogil=True, cache=True)
def _threshold(keys, high, k):
    """The k-th largest of the keys (a span), and how many equal to it are among the k largest. high: the largest."""
    found = np.int32(0)
    for bit in range(30, -1, -1):  # the largest number that k keys reach, bit by bit
        raised = np.int32(found | np.int32(np.int32(1) << np.int32(bit)))
        if raised <= high and _above(keys, np.int32(raised - np.int32(1))) >= k:
            found = raised
    return found, np.int64(k) - _above(keys, found)


@njit(nogil=True, cache=True)
def encode(x, half, payload, k, bits):
    """Encode x (int32 or uint16 bits) into payload (uint8, exactly sized)."""
    values, keys = np.zeros(BLOCK, np.int32), np.zeros(BLOCK, np.int32)
    _encode_blocks(x, half, payload, k, bits, values, keys, np.zeros(2, np.float32))


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_blocks(x, half, payload, k, bits, values, keys, limits):
    """:func:`encode` with what to work in: values and keys of a block, its limits."""
    size = x.size
    blocks = (size + BLOCK - 1) // BLOCK
    kept = kept_of(size, k)
    ranges, codes_at = 8 * blocks, 8 * blocks + (12 * kept + 7) // 8
    source, key_of = spans.span(values), spans.span(keys)
    limit_bytes = limits.view(np.uint8)
    payload[ranges:] = 0
    most = np.float32((1 << (bits - 1)) - 1)
    at = 0  # of the next kept value
    for b in range(blocks):
        first = b * BLOCK
        n = min(BLOCK, size - first)
        load(x, first, n, half, values)
        top = fill(np.int32(0), 16)
        for j in range(np.uint64(0), np.uint64(BLOCK), _LANES):
            key = spans.load(source, j, 16) & _ABS
            spans.store(key_of, j, key)
            top = larger(top, key)
        high = largest(top)
        if n < BLOCK:
            keys[n:] = np.int32(-1)  # less than any
            high = np.int32(keys[:n].max())
        threshold, ties = _threshold(key_of, high, min(k, n))
        finite = high < INF
        low = np.int32(threshold).view(np.float32)
        reach = np.float32(np.int32(high).view(np.float32) - low)
        limits[0] = low if finite else np.float32(np.nan)
        limits[1] = np.int32(high).view(np.float32) if finite else np.float32(np.nan)
        for j in range(8):
            payload[8 * b + j] = limit_bytes[j]
        for start in range(np.uint64(0), np.uint64(n), _LANES):
            left = mask(spans.load(key_of, start, 16) > np.int32(threshold - np.int32(1)))
            while left:
                j = np.int64(start) + np.int64(first_bit(left))
                left = np.uint16(left & np.uint16(left - np.uint16(1)))
                key = keys[j]
                if key == threshold:
                    if ties == 0:
                        continue
                    ties -= 1
                code = np.int64(0)
                if finite:
                    magnitude = np.int32(key).view(np.float32)
                    if reach > 0:
                        part = np.float32(np.float32(magnitude - low) / reach)
                        code = np.int64(np.rint(np.float32(part * most)))
                    if values[j] < 0:
                        code |= 1 << (bits - 1)
                _put(payload, 8 * ranges + 12 * at, j, 12)
                _put(payload, 8 * codes_at + bits * at, code, bits)
                at += 1


@njit(nogil=True, cache=True, forceinline=True)
def _put(payload, position, value, width):
    """Write ``width`` bits at a bit position of zeroed bytes, the lowest first; up to 12 bits, so three bytes."""
    byte = position >> 3
    wide = value << (position & 7)
    end = (position & 7) + width
    payload[byte] |= np.uint8(wide & 0xFF)
    if end > 8:
        payload[byte + 1] |= np.uint8((wide >> 8) & 0xFF)
    if end > 16:
        payload[byte + 2] |= np.uint8((wide >> 16) & 0xFF)


@njit(nogil=True, cache=True, forceinline=True)
def _get(payload, position, width):
    """Read ``width`` bits at a bit position."""
    byte = position >> 3
    end = (position & 7) + width
    wide = np.int64(payload[byte])
    if end > 8:
        wide |= np.int64(payload[byte + 1]) << 8
    if end > 16:
        wide |= np.int64(payload[byte + 2]) << 16
    return (wide >> (position & 7)) & ((1 << width) - 1)


@njit(nogil=True, cache=True)
def kept_of(size, k):
    """Number of values that a message of ``size`` keeps."""
    return size // BLOCK * k + min(k, size % BLOCK)


@njit(nogil=True, cache=True)
def check(payload, size, k):
    """Whether every block's places rise and lie inside of it."""
    blocks = (size + BLOCK - 1) // BLOCK
    at = 0
    for b in range(blocks):
        n = min(BLOCK, size - b * BLOCK)
        last = -1
        for _ in range(min(k, n)):
            place = _get(payload, 64 * blocks + 12 * at, 12)
            if place <= last or place >= n:
                return False
            last = place
            at += 1
    return True


@njit(nogil=True, cache=True, forceinline=True)
def _limits(payload, b, limits):
    """Read the smallest and largest kept magnitude of a block; whether they can be some."""
    limit_bytes = limits.view(np.uint8)
    for j in range(8):
        limit_bytes[j] = payload[8 * b + j]
    return limits[0] >= 0 and limits[1] >= limits[0] and limits[1] <= _MAX


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _value(code, bits, limits):
    """The value of a code: its magnitude lies between the limits, which it never leaves."""
    most = np.float32((1 << (bits - 1)) - 1)
    step = np.float32(np.float32(code & ((1 << (bits - 1)) - 1)) / most)
    magnitude = np.float32(limits[0] + np.float32(step * np.float32(limits[1] - limits[0])))
    magnitude = np.float32(min(magnitude, limits[1]))
    return np.float32(-magnitude) if code >> (bits - 1) else magnitude


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _decode_block(payload, size, b, at, k, bits, limits, values, n):
    """The values of block b, whose kept values start at number ``at``; returns how many there are."""
    blocks = (size + BLOCK - 1) // BLOCK
    codes_at = 8 * blocks + (12 * kept_of(size, k) + 7) // 8
    here = min(k, n)
    if not _limits(payload, b, limits):
        values[:n] = np.float32(np.nan)
        return here
    values[:n] = np.float32(0)
    for i in range(at, at + here):
        place = _get(payload, 64 * blocks + 12 * i, 12)
        values[place] = _value(_get(payload, 8 * codes_at + bits * i, bits), bits, limits)
    return here


@njit(nogil=True, cache=True)
def decode(payload, out, half, k, bits):
    """Decode payload (exactly sized, checked) to out: float32, or uint16 bits."""
    size, at = out.size, 0
    limits, values = np.zeros(2, np.float32), np.zeros(BLOCK, np.float32)
    for b in range((size + BLOCK - 1) // BLOCK):
        n = min(BLOCK, size - b * BLOCK)
        at += _decode_block(payload, size, b, at, k, bits, limits, values, n)
        store(values, out, b * BLOCK, n, half)


@njit(nogil=True, cache=True)
def decode_add(payload, out, half, narrow, k, bits):
    """out (float32) += decoded values, first rounded to fp16 (half) or bf16 if ``narrow``. Touches kept values only."""
    size, at = out.size, 0
    blocks = (size + BLOCK - 1) // BLOCK
    codes_at = 8 * blocks + (12 * kept_of(size, k) + 7) // 8
    limits = np.zeros(2, np.float32)
    value, narrowed = np.zeros(1, np.float32), np.zeros(1, np.uint16)
    for b in range(blocks):
        first = b * BLOCK
        n = min(BLOCK, size - first)
        here = min(k, n)
        if not _limits(payload, b, limits):
            out[first : first + n] = np.float32(np.nan)
        else:
            for i in range(at, at + here):
                place = _get(payload, 64 * blocks + 12 * i, 12)
                value[0] = _value(_get(payload, 8 * codes_at + bits * i, bits), bits, limits)
                if narrow:
                    round_to_16_bits(value, narrowed, np.uint64(1), half)
                out[first + place] += value[0]
        at += here

"""Kernels of ``bounded``: integers of as many bits as each 32 values need; see codecs/bounded.py.

A block whose values do not all come back within the bound is written as it is, so the bound needs no proof about
rounding: the encoder decodes what it writes and looks.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,assignment"

from __future__ import annotations

import numpy as np
from numba import njit

from .values import load, store

BLOCK = 32
GROUP = 4096
"""Values that share a bound where it is relative to their range."""
HEADER_NBYTES = 4
RAW = 255
"""Width of a block that is written as it is."""
MOST_BITS = 24
_ABS = np.int32(0x7FFFFFFF)
_LARGEST = np.float32(2.0**22)
_MAX = np.finfo(np.float32).max


@njit(nogil=True, cache=True)
def groups_of(size, relative):
    """Number of bounds that a payload holds."""
    return (size + GROUP - 1) // GROUP if relative else 0


@njit(nogil=True, cache=True, error_model="numpy")
def group_bounds(x, half, relative, bounds):
    """Fill ``bounds`` (float64, one per group): relative times the range of the group's finite values."""
    buffer = np.zeros(GROUP, np.int32)
    values = buffer.view(np.float32)
    for g in range(bounds.size):
        n = min(GROUP, x.size - g * GROUP)
        load(x, g * GROUP, n, half, buffer)
        low, high = np.float32(np.inf), np.float32(-np.inf)
        for j in range(n):
            if abs(values[j]) <= _MAX:
                low, high = min(low, values[j]), max(high, values[j])
        bounds[g] = relative * (np.float64(high) - np.float64(low)) if low <= high else 0.0


@njit(nogil=True, cache=True, error_model="numpy")
def encode(x, half, absolute, relative, steps, out):
    """Encode x (int32 or uint16 bits) into out; returns the bytes written.

    steps: the quantisation step as a multiple of the bound (2; 1 where values are rounded to 16 bits once more).
    """
    size, raw_nbytes = x.size, x.size * x.itemsize
    blocks, groups = (size + BLOCK - 1) // BLOCK, groups_of(size, relative > 0)
    narrow = x.itemsize == 2
    bounds = np.full(1, absolute) if relative == 0 else np.empty(groups, np.float64)
    if relative > 0:
        group_bounds(x, half, relative, bounds)
    step = np.zeros(1, np.float32)
    step_bytes = step.view(np.uint8)
    out[0], out[1], out[2], out[3] = 1, 0, 0, 0
    widths = HEADER_NBYTES + 4 * groups
    at = widths + blocks
    end = HEADER_NBYTES + raw_nbytes
    bits, back = np.zeros(BLOCK, np.int32), np.zeros(BLOCK, np.float32)
    values = bits.view(np.float32)
    narrowed = np.zeros(BLOCK, np.uint16)
    codes = np.zeros(BLOCK, np.uint32)
    data = x.view(np.uint8)
    fits = at <= end
    b = 0
    while fits and b < blocks:
        first = b * BLOCK
        n = min(BLOCK, size - first)
        bound = bounds[first // GROUP] if relative > 0 else bounds[0]
        if relative == 0 or first % GROUP == 0:
            step[0] = np.float32(steps * bound)
            if relative > 0:
                for j in range(4):
                    out[HEADER_NBYTES + 4 * (first // GROUP) + j] = step_bytes[j]
        load(x, first, n, half, bits)
        for j in range(n, BLOCK):
            bits[j] = np.int32(0)
        width = _quantize(values, bound, step[0], codes, back, narrow, half, narrowed, n)
        nbytes = n * x.itemsize if width == RAW else 4 * width
        if at + nbytes > end:
            fits = False
            break
        out[widths + b] = width
        if width == RAW:
            for j in range(nbytes):
                out[at + j] = data[first * x.itemsize + j]
        elif width:
            _pack(codes, width, out, at)
        at += nbytes
        b += 1
    if fits:
        return at
    out[0] = 0
    for j in range(raw_nbytes):
        out[HEADER_NBYTES + j] = data[j]
    return end


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _quantize(values, bound, step, codes, back, narrow, half, narrowed, n):
    """Codes of a block and their width; RAW if some value would not come back within the bound."""
    good, ored = True, np.uint32(0)
    for j in range(BLOCK):
        y = np.float32(values[j] / step) if step > 0 else np.float32(0)
        good &= abs(y) <= _LARGEST
        q = np.int32(np.rint(y)) if abs(y) <= _LARGEST else np.int32(0)
        back[j] = np.float32(np.float32(q) * step)
        # The sign goes to the lowest bit, so that small numbers of either sign have few bits.
        codes[j] = np.uint32(np.int32(q << np.int32(1)) ^ np.int32(q >> np.int32(31)))
        ored |= codes[j]
    if narrow:
        store(back, narrowed, 0, BLOCK, half)
        load(narrowed, 0, BLOCK, half, back.view(np.int32))
    for j in range(n):
        good &= abs(np.float64(back[j]) - np.float64(values[j])) <= bound
    if not good:
        return RAW
    width = 0
    while ored >> np.uint32(width):
        width += 1
    return width


@njit(nogil=True, cache=True, forceinline=True)
def _pack(codes, width, out, at):
    """32 codes of ``width`` bits to 4 * width bytes, the first lowest."""
    held, filled = np.uint64(0), np.uint64(0)
    w = np.uint64(width)
    for j in range(BLOCK):
        held |= np.uint64(codes[j]) << filled
        filled += w
        while filled >= np.uint64(8):
            out[at] = np.uint8(held & np.uint64(255))
            at += 1
            held >>= np.uint64(8)
            filled -= np.uint64(8)


@njit(nogil=True, cache=True, forceinline=True)
def _unpack(payload, at, width, codes):
    """The inverse."""
    held, filled = np.uint64(0), np.uint64(0)
    w, mask = np.uint64(width), np.uint64((1 << width) - 1)
    for j in range(BLOCK):
        while filled < w:
            held |= np.uint64(payload[at]) << filled
            at += 1
            filled += np.uint64(8)
        codes[j] = np.uint32(held & mask)
        held >>= w
        filled -= w


@njit(nogil=True, cache=True)
def check(payload, size, itemsize, relative):
    """0 if decode may read the payload; else the index of what is wrong with it."""
    if payload.size < HEADER_NBYTES:
        return 1
    if payload[0] > 1 or payload[1] or payload[2] or payload[3]:
        return 2
    if payload[0] == 0:
        return 0 if payload.size == HEADER_NBYTES + size * itemsize else 1
    blocks = (size + BLOCK - 1) // BLOCK
    widths = HEADER_NBYTES + 4 * groups_of(size, relative)
    need = widths + blocks
    if payload.size < need:
        return 1
    for b in range(blocks):
        width = np.int64(payload[widths + b])
        if width != RAW and width > MOST_BITS:
            return 3
        need += min(BLOCK, size - b * BLOCK) * itemsize if width == RAW else 4 * width
    return 0 if need == payload.size else 1


@njit(nogil=True, cache=True)
def decode(payload, out, half, absolute_step, relative):
    """Decode a payload that passed :func:`check` to out: int32 or uint16 bits."""
    size, itemsize = out.size, out.itemsize
    data = out.view(np.uint8)
    if payload[0] == 0:
        for j in range(data.size):
            data[j] = payload[HEADER_NBYTES + j]
        return
    widths = HEADER_NBYTES + 4 * groups_of(size, relative)
    at = widths + (size + BLOCK - 1) // BLOCK
    step = np.full(1, absolute_step, np.float32)
    step_bytes = step.view(np.uint8)
    codes, values = np.zeros(BLOCK, np.uint32), np.zeros(BLOCK, np.float32)
    for b in range((size + BLOCK - 1) // BLOCK):
        first = b * BLOCK
        n = min(BLOCK, size - first)
        if relative and first % GROUP == 0:
            for j in range(4):
                step_bytes[j] = payload[HEADER_NBYTES + 4 * (first // GROUP) + j]
        width = np.int64(payload[widths + b])
        if width == RAW:
            for j in range(n * itemsize):
                data[first * itemsize + j] = payload[at + j]
            at += n * itemsize
            continue
        _unpack(payload, at, width, codes)
        at += 4 * width
        for j in range(BLOCK):
            q = np.int32(np.int32(codes[j] >> np.uint32(1)) ^ np.int32(-np.int32(codes[j] & np.uint32(1))))
            values[j] = np.float32(np.float32(q) * step[0])
        if itemsize == 4:
            store(values, out.view(np.float32), first, n, half)
        else:
            store(values, out.view(np.uint16), first, n, half)

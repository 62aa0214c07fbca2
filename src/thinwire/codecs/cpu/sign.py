"""Kernels of ``sign``: a bit per value and the mean magnitude of a block; see codecs/sign.py.

The mean is a sum in 32 lanes that are folded in halves, so that its order is that of the definition on any machine.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from .spans import load, read, span, store, write
from .values import INF, prefetch
from .vector_values import ahead, get_floats, put_floats, round_floats
from .vectors import (
    fill,
    lane,
    larger,
    largest,
    lower_half,
    mask,
    numbers,
    reinterpret,
    upper_half,
)

_ABS = np.int32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)
_MAX = np.finfo(np.float32).max
_NAN = np.float32(np.nan)
_LANES, _TILE = np.uint64(16), np.uint64(1024)


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _mean(values, first, n, count, half):
    """Mean magnitude of a block of n values (a multiple of 32; those from ``count`` on are 0); NaN if not finite."""
    share = np.float32(np.float32(1) / np.float32(count))
    high, lower, upper = fill(np.int32(0), 16), fill(np.float32(0), 16), fill(np.float32(0), 16)
    for j in range(first, first + n, np.uint64(32)):
        ahead(values, j, _TILE)
        a = reinterpret(get_floats(values, j, half), np.int32) & _ABS
        b = reinterpret(get_floats(values, j + _LANES, half), np.int32) & _ABS
        high = larger(larger(high, a), b)
        lower = lower + reinterpret(a, np.float32) * share
        upper = upper + reinterpret(b, np.float32) * share
    if largest(high) >= INF:
        return _NAN
    eight = lower_half(lower + upper) + upper_half(lower + upper)
    four = lower_half(eight) + upper_half(eight)
    two = lower_half(four) + upper_half(four)
    return np.float32(min(np.float32(lane(two, 0) + lane(two, 1)), _MAX))


@njit(nogil=True, cache=True, forceinline=True)
def _signs(values, at, half):
    """The signs of 16 values, the first lowest."""
    return mask(reinterpret(get_floats(values, at, half), np.int32) < np.int32(0))


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_blocks(x, blocks, count, half, scales, signs, block):
    """Encode blocks; the last has ``count`` values, and zeros behind them."""
    values, scale, sign = span(x), span(scales), span(signs)
    for b in range(blocks):
        first = b * block
        mean = _mean(values, first, block, block if b + np.uint64(1) < blocks else count, half)
        write(scale, np.uint64(4) * b, mean)
        for j in range(first, first + block, np.uint64(32)):
            write(sign, j >> np.uint64(3), _signs(values, j, half))
            write(sign, (j >> np.uint64(3)) + np.uint64(2), _signs(values, j + _LANES, half))


@njit(nogil=True, cache=True)
def encode(x, half, payload, block):
    """Encode x (int32 or uint16 bits) into payload (uint8, exactly sized). block: uint64."""
    size = np.uint64(x.size)
    whole, rest = size // block, size % block
    scales_nbytes = np.uint64(4) * (whole + np.uint64(rest > 0))
    _encode_blocks(x, whole, block, half, payload, payload[scales_nbytes:], block)
    if rest:
        padded, signs = np.zeros(block, x.dtype), np.zeros(block >> np.uint64(3), np.uint8)
        padded[:rest] = x[whole * block :]
        _encode_blocks(padded, np.uint64(1), rest, half, payload[np.uint64(4) * whole :], signs, block)
        at = scales_nbytes + (whole * block >> np.uint64(3))
        payload[at:] = signs[: (rest + np.uint64(7)) >> np.uint64(3)]


@njit(nogil=True, cache=True, forceinline=True)
def _values(signs, at, scale):
    """The 16 values from ``at`` on; NaN if the scale is."""
    kept = _SIGN if scale == scale else np.uint32(0)  # there is one NaN
    bits = np.uint32(read(signs, at >> np.uint64(3), np.uint16))
    signed = (fill(bits, 16) << (fill(np.uint32(31), 16) - numbers(np.uint32, 16))) & kept
    return reinterpret(signed ^ reinterpret(fill(scale, 16), np.uint32), np.float32)


@njit(nogil=True, cache=True, forceinline=True)
def _scale_of(scales, b):
    """The mean of block b, NaN if it is not finite."""
    scale = read(scales, np.uint64(4) * b, np.float32)
    return scale if abs(scale) <= _MAX else _NAN


@njit(nogil=True, cache=True)
def _decode_blocks(scales, signs, blocks, out, half, block):
    """Decode whole blocks."""
    scale_bytes, sign, values = span(scales), span(signs), span(out)
    for b in range(blocks):
        scale = _scale_of(scale_bytes, b)
        for j in range(b * block, (b + np.uint64(1)) * block, _LANES):
            put_floats(values, j, _values(sign, j, scale), half, scale)


@njit(nogil=True, cache=True)
def _add_blocks(scales, signs, blocks, out, half, narrow, block):
    """Decode whole blocks and add them to ``out``."""
    scale_bytes, sign, sums = span(scales), span(signs), span(out)
    for b in range(blocks):
        scale = _scale_of(scale_bytes, b)
        for j in range(b * block, (b + np.uint64(1)) * block, _LANES):
            v = _values(sign, j, scale)
            prefetch(sums, j + _TILE)
            if narrow:
                v = round_floats(v, half, scale)
            store(sums, j, load(sums, j, 16) + v)


@njit(nogil=True, cache=True)
def _last_signs(payload, at, rest, block):
    """The signs of the last, shorter block, as long as those of a whole one."""
    signs = np.zeros(block >> np.uint64(3), np.uint8)
    signs[: (rest + np.uint64(7)) >> np.uint64(3)] = payload[at:]
    return signs


@njit(nogil=True, cache=True)
def decode(payload, out, half, block):
    """Decode payload (exactly sized) to out: float32, or uint16 bits. block: uint64."""
    size = np.uint64(out.size)
    whole, rest = size // block, size % block
    scales_nbytes = np.uint64(4) * (whole + np.uint64(rest > 0))
    _decode_blocks(payload, payload[scales_nbytes:], whole, out, half, block)
    if rest:
        signs = _last_signs(payload, scales_nbytes + (whole * block >> np.uint64(3)), rest, block)
        values = np.empty(block, out.dtype)
        _decode_blocks(payload[np.uint64(4) * whole :], signs, np.uint64(1), values, half, block)
        out[whole * block :] = values[:rest]


@njit(nogil=True, cache=True)
def decode_add(payload, out, half, narrow, block):
    """out (float32) += decoded values, first rounded to fp16 (half) or bf16 if ``narrow``. block: uint64."""
    size = np.uint64(out.size)
    whole, rest = size // block, size % block
    scales_nbytes = np.uint64(4) * (whole + np.uint64(rest > 0))
    _add_blocks(payload, payload[scales_nbytes:], whole, out, half, narrow, block)
    if rest:
        signs = _last_signs(payload, scales_nbytes + (whole * block >> np.uint64(3)), rest, block)
        sums = np.zeros(block, np.float32)
        sums[:rest] = out[whole * block :]
        _add_blocks(payload[np.uint64(4) * whole :], signs, np.uint64(1), sums, half, narrow, block)
        out[whole * block :] = sums[:rest]

"""Kernels of the block floats: codes of 4 or 8 bits, a scale per block; see codecs/blockfloat.py.

A format is given as (mantissa_bits, bias, top, width); ``scaling`` is FP32, E8M0 or TWO_LEVEL. Rounding is integer
arithmetic on the bits of fp32, or the add of a power of two where the format is subnormal; fastmath stays off.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from .spans import load, span, store
from .values import INF, prefetch
from .values import load as load_values
from .vector_values import ahead, copy_bytes, get_floats, put_floats, round_floats
from .vectors import convert, fill, lane, larger, reinterpret, select, smaller
from .vectors import largest as largest_lane

FP32, E8M0, TWO_LEVEL = 0, 1, 2
GROUP = 1024
"""Values that share the upper scale of TWO_LEVEL."""

_ABS = np.int32(0x7FFFFFFF)
_MAX = np.finfo(np.float32).max
_NAN = np.float32(np.nan)
_NAN_BITS = np.int32(0x7FC00000)
_LEAST = np.float32(2.0**-149)
_TINY = np.float32(2.0**-100)  # below it 1/scale could overflow: divide at 2**100 times the size
_LIFT = np.float32(2.0**100)
_E4M3 = (np.int32(3), np.int32(7), np.int32(0x7E), np.int32(8))
_E4M3_NAN = np.uint8(0x7F)
_LANES = np.uint64(16)


@njit(nogil=True, cache=True, forceinline=True)
def _power(exponent):
    """The bits of 2**exponent as fp32, for exponents of normal numbers."""
    return np.int32(np.int32(np.int32(exponent) + np.int32(127)) << np.int32(23))


@njit(nogil=True, cache=True, forceinline=True)
def _codes(y, mantissa_bits, bias, top, width):
    """The codes of finite fp32 values: nearest, ties to the even code, ``top`` beyond the range."""
    u = reinterpret(y, np.int32)
    a = u & _ABS
    shift = np.int32(np.int32(23) - mantissa_bits)
    half = np.int32(np.int32(np.int32(1) << np.int32(shift - np.int32(1))) - np.int32(1))
    r = a - np.int32((np.int32(127) - bias) << np.int32(23))
    r = (r + half + ((r >> shift) & 1)) >> shift
    # Subnormal: at this power of two the ulp of fp32 is the format's step.
    magic = _power(np.int32(24) - bias - mantissa_bits)
    s = reinterpret(reinterpret(a, np.float32) + np.int32(magic).view(np.float32), np.int32) - magic
    c = smaller(select(a < np.int32((np.int32(128) - bias) << np.int32(23)), s, r), top)
    sign = (u >> np.int32(np.int32(32) - width)) & np.int32(np.int32(1) << np.int32(width - np.int32(1)))
    return convert(c | sign, np.uint8)


@njit(nogil=True, cache=True, forceinline=True)
def _values(codes, mantissa_bits, bias, top, width):
    """The fp32 values of codes; NaN above ``top``."""
    u = convert(codes, np.int32)
    m = u & np.int32(np.int32(np.int32(1) << np.int32(width - np.int32(1))) - np.int32(1))
    normal = (m << np.int32(np.int32(23) - mantissa_bits)) + np.int32((np.int32(127) - bias) << np.int32(23))
    quantum = np.int32(_power(np.int32(1) - bias - mantissa_bits)).view(np.float32)
    subnormal = reinterpret(convert(m, np.float32) * quantum, np.int32)
    v = select(m < np.int32(np.int32(1) << mantissa_bits), subnormal, normal)
    v = v | ((u >> np.int32(width - np.int32(1))) << 31)
    return reinterpret(
        select(m > top, _NAN_BITS, v), np.float32
    )  # without the sign, so that there is one NaN


@njit(nogil=True, cache=True, forceinline=True)
def _code(y, mantissa_bits, bias, top, width):
    """``_codes`` of one value."""
    return lane(_codes(fill(np.float32(y), 1), mantissa_bits, bias, top, width), 0)


@njit(nogil=True, cache=True, forceinline=True)
def _value(code, mantissa_bits, bias, top, width):
    """``_values`` of one code."""
    return lane(_values(fill(np.uint8(code), 1), mantissa_bits, bias, top, width), 0)


@njit(nogil=True, cache=True, forceinline=True)
def _largest(inputs, at, n):
    """Bits of the largest magnitude of n values of a span; INF or more if one is not finite."""
    high = fill(np.int32(0), 16)
    for j in range(at, at + n, _LANES):
        high = larger(high, reinterpret(load(inputs, j, 16), np.int32) & _ABS)
    return largest_lane(high)


@njit(nogil=True, cache=True, forceinline=True)
def _shared_exponent(high, largest):
    """E8M0 code of the smallest power of two p with high <= largest * p; 255 if high is not finite."""
    if high >= INF:
        return np.uint8(255)
    top = np.float32(largest).view(np.int32)
    e = np.int32((high >> np.int32(23)) - (top >> np.int32(23)) + np.int32(127))
    if (high & np.int32(0x7FFFFF)) > (top & np.int32(0x7FFFFF)):
        e = np.int32(e + np.int32(1))
    return np.uint8(max(e, np.int32(0)))


@njit(nogil=True, cache=True, forceinline=True)
def _of_exponent(code):
    """The fp32 value of an E8M0 code: 2**(code - 127); NaN for 255."""
    if code == 255:
        return _NAN
    return np.int32(max(np.int32(code) << np.int32(23), np.int32(0x00400000))).view(np.float32)


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _scale(high, largest):
    """fp32 scale of a block whose largest magnitude has the bits ``high``; 0 for zeros, NaN if not finite."""
    if high >= INF:
        return _NAN
    if high == 0:
        return np.float32(0)
    return np.float32(max(np.float32(np.int32(high).view(np.float32) / np.float32(largest)), _LEAST))


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _two_level(highs, count, largest, lower, scales):
    """The upper scale of a group; its blocks' codes (E4M3) to ``lower`` and their scales to ``scales``."""
    most = np.int32(0)
    for g in range(count):
        if highs[g] < INF:
            most = np.int32(max(most, highs[g]))
    upper = _scale(most, np.float32(largest * 448.0))
    for g in range(count):
        if highs[g] >= INF:
            lower[g], scales[g] = _E4M3_NAN, _NAN
        elif highs[g] == 0:
            lower[g], scales[g] = np.uint8(0), np.float32(0)
        else:
            wanted = np.float32(np.float32(np.int32(highs[g]).view(np.float32) / np.float32(largest)) / upper)
            code = _code(wanted, _E4M3[0], _E4M3[1], _E4M3[2], _E4M3[3])
            lower[g] = np.uint8(max(code, np.uint8(1)))
            scales[g] = np.float32(upper * _value(lower[g], _E4M3[0], _E4M3[1], _E4M3[2], _E4M3[3]))
    return upper


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _quantize(inputs, at, n, scale, mantissa_bits, bias, top, width, codes):
    """Codes of a block. inputs, codes: spans."""
    if scale == np.float32(0) or scale != scale:
        for j in range(at, at + n, _LANES):
            store(codes, j, fill(np.uint8(0), 16))
        return
    lift = _LIFT if scale < _TINY else np.float32(1)
    rate = np.float32(np.float32(1) / np.float32(scale * lift))
    for j in range(at, at + n, _LANES):
        y = (load(inputs, j, 16) * lift) * rate
        store(codes, j, _codes(y, mantissa_bits, bias, top, width))


@njit(nogil=True, cache=True, forceinline=True)
def _multiplied(values, scale, largest):
    """16 values times the scale; NaN if that is not finite; products of finite numbers stay finite."""
    if not abs(scale) <= _MAX:
        return fill(_NAN, 16)
    v = values * scale
    if not abs(scale) <= np.float32(_MAX / np.float32(np.float32(2) * largest)):
        v = select(v > _MAX, _MAX, v)
        v = select(v < -_MAX, np.float32(-_MAX), v)
    return v


@njit(nogil=True, cache=True)
def _tile(block):
    """Values that are coded in one go: whole blocks and groups, small enough for the L1 cache."""
    return block * max(np.uint64(1), np.uint64(GROUP) // block)


@njit(nogil=True, cache=True, forceinline=True)
def _planes(size, block, scaling):
    """Where the lower scales and the codes begin."""
    blocks = (size + block - np.uint64(1)) // block
    if scaling == FP32:
        return np.uint64(0), np.uint64(4) * blocks
    upper = np.uint64(0)
    if scaling == TWO_LEVEL:
        upper = np.uint64(4) * ((size + np.uint64(GROUP - 1)) // np.uint64(GROUP))
    return upper, upper + blocks


@njit(nogil=True, cache=True, error_model="numpy")
def _put_scales(highs, count, first, block, largest, scaling, lower_plane, lower, scales, upper, payload):
    """Choose the scales of a tile's blocks and write them; ``scales`` are what values are divided by."""
    b0 = first // block
    if scaling == FP32:
        for g in range(count):
            scales[g] = _scale(highs[g], largest)
        _put_words(scales, count, payload, np.uint64(4) * b0)
        return
    if scaling == E8M0:
        for g in range(count):
            lower[g] = _shared_exponent(highs[g], largest)
            scales[g] = _of_exponent(lower[g])
    else:
        upper[0] = _two_level(highs, count, largest, lower, scales)
        _put_words(upper, np.uint64(1), payload, np.uint64(4) * (first // np.uint64(GROUP)))
    for g in range(count):
        payload[lower_plane + b0 + g] = lower[g]


@njit(nogil=True, cache=True)
def _put_words(values, count, payload, at):
    """Write fp32 values at any address."""
    data = values.view(np.uint8)
    for j in range(np.uint64(4) * count):
        payload[at + j] = data[j]


@njit(nogil=True, cache=True, error_model="numpy")
def encode(x, half, payload, block, mantissa_bits, bias, top, width, largest, scaling):
    """Encode x (int32 or uint16 bits) into payload (uint8, exactly sized). block: uint64; largest: the format's."""
    tile = _tile(block)
    inputs, codes = np.zeros(tile, np.float32), np.zeros(tile, np.uint8)
    highs, lower = np.zeros(tile // block, np.int32), np.zeros(tile // block, np.uint8)
    scales, upper = np.zeros(tile // block, np.float32), np.zeros(1, np.float32)
    _encode_tiles(
        x, half, payload, block, mantissa_bits, bias, top, width, largest, scaling, inputs, codes, highs, lower, scales,
        upper,
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_tiles(
    x, half, payload, block, mantissa_bits, bias, top, width, largest, scaling, inputs, codes, highs, lower, scales,
    upper,
):  # fmt: skip
    """:func:`encode` with what to work in."""
    size, tile = np.uint64(x.size), _tile(block)
    lower_plane, code_plane = _planes(size, block, scaling)
    source, values, code, out = span(x), span(inputs), span(codes), span(payload)
    for first in range(np.uint64(0), size, tile):
        n = min(tile, size - first)
        if n == tile:
            for j in range(np.uint64(0), n, np.uint64(32)):
                ahead(source, first + j, n)
                store(values, j, get_floats(source, first + j, half))
                store(values, j + _LANES, get_floats(source, first + j + _LANES, half))
        else:
            inputs[:] = np.float32(0)
            load_values(x, first, n, half, inputs.view(np.int32))
        count = (n + block - np.uint64(1)) // block
        for g in range(count):
            highs[g] = _largest(values, g * block, block)
        _put_scales(highs, count, first, block, largest, scaling, lower_plane, lower, scales, upper, payload)
        for g in range(count):
            _quantize(values, g * block, block, scales[g], mantissa_bits, bias, top, width, code)
        if width == 8:
            copy_bytes(code, np.uint64(0), out, code_plane + first, n)
        else:
            _pack(code, n)
            nbytes = (n + np.uint64(1)) >> np.uint64(1)
            copy_bytes(code, np.uint64(0), out, code_plane + (first >> np.uint64(1)), nbytes)


@njit(nogil=True, cache=True)
def _pack(codes, n):
    """Bytes to half bytes, in place; n of them, and what is behind up to a multiple of 32."""
    for j in range(np.uint64(0), n, np.uint64(32)):
        pairs = reinterpret(load(codes, j, 32), np.uint16)
        store(codes, j >> np.uint64(1), convert((pairs & 15) | (pairs >> 4), np.uint8))


@njit(nogil=True, cache=True)
def _unpack(codes, tile):
    """The half bytes in the second half of a tile's codes to bytes in all of it."""
    half = tile >> np.uint64(1)
    for j in range(np.uint64(0), half, _LANES):
        p = convert(load(codes, half + j, 16), np.uint16)
        store(codes, np.uint64(2) * j, reinterpret((p & 15) | ((p << 4) & 0xF00), np.uint8))


@njit(nogil=True, cache=True)
def _get_scales(payload, size, first, n, block, scaling, scales, upper):
    """The scales of the blocks of one tile."""
    lower_plane, _ = _planes(size, block, scaling)
    b0 = first // block
    count = (n + block - np.uint64(1)) // block
    if scaling == FP32:
        scales.view(np.uint8)[: np.uint64(4) * count] = payload[
            np.uint64(4) * b0 : np.uint64(4) * (b0 + count)
        ]
    elif scaling == E8M0:
        for g in range(count):
            scales[g] = _of_exponent(payload[lower_plane + b0 + g])
    else:
        at = np.uint64(4) * (first // np.uint64(GROUP))
        upper.view(np.uint8)[:] = payload[at : at + np.uint64(4)]
        for g in range(count):
            lower = _value(payload[lower_plane + b0 + g], _E4M3[0], _E4M3[1], _E4M3[2], _E4M3[3])
            scales[g] = np.float32(upper[0] * lower)


@njit(nogil=True, cache=True)
def _get_codes(payload, first, n, code_plane, width, codes, tile):
    """The codes of one tile, one in a byte; those from n on are any. payload, codes: spans."""
    if width == 8:
        copy_bytes(payload, code_plane + first, codes, np.uint64(0), n)
    else:
        half = tile >> np.uint64(1)
        nbytes = (n + np.uint64(1)) >> np.uint64(1)
        copy_bytes(payload, code_plane + (first >> np.uint64(1)), codes, half, nbytes)
        _unpack(codes, tile)


@njit(nogil=True, cache=True)
def decode(payload, out, half, block, mantissa_bits, bias, top, width, largest, scaling):
    """Decode payload (exactly sized) to out: float32, or uint16 bits. block: uint64."""
    tile = _tile(block)
    codes, last = np.zeros(tile, np.uint8), np.empty(tile, out.dtype)
    scales, upper = np.zeros(tile // block, np.float32), np.zeros(1, np.float32)
    _decode_tiles(
        payload,
        out,
        half,
        block,
        mantissa_bits,
        bias,
        top,
        width,
        largest,
        scaling,
        codes,
        scales,
        upper,
        last,
    )


@njit(nogil=True, cache=True)
def _decode_tiles(
    payload, out, half, block, mantissa_bits, bias, top, width, largest, scaling, codes, scales, upper, last
):
    """:func:`decode` with what to work in; last: as many values as a tile has."""
    size, tile = np.uint64(out.size), _tile(block)
    _, code_plane = _planes(size, block, scaling)
    source, code, values, padded = span(payload), span(codes), span(out), span(last)
    for first in range(np.uint64(0), size, tile):
        n = min(tile, size - first)
        into, start = (values, first) if n == tile else (padded, np.uint64(0))
        _get_scales(payload, size, first, n, block, scaling, scales, upper)
        _get_codes(source, first, n, code_plane, width, code, tile)
        for g in range((n + block - np.uint64(1)) // block):
            for j in range(g * block, (g + np.uint64(1)) * block, _LANES):
                v = _multiplied(
                    _values(load(code, j, 16), mantissa_bits, bias, top, width), scales[g], largest
                )
                put_floats(into, start + j, v, half, _NAN)
        if n < tile:
            out[first:] = last[:n]


@njit(nogil=True, cache=True)
def decode_add(payload, out, half, narrow, block, mantissa_bits, bias, top, width, largest, scaling):
    """out (float32) += decoded values, first rounded to fp16 (half) or bf16 if ``narrow``. block: uint64."""
    tile = _tile(block)
    codes, last = np.zeros(tile, np.uint8), np.zeros(tile, np.float32)
    scales, upper = np.zeros(tile // block, np.float32), np.zeros(1, np.float32)
    _add_tiles(
        payload,
        out,
        half,
        narrow,
        block,
        mantissa_bits,
        bias,
        top,
        width,
        largest,
        scaling,
        codes,
        scales,
        upper,
        last,
    )


@njit(nogil=True, cache=True)
def _add_tiles(
    payload,
    out,
    half,
    narrow,
    block,
    mantissa_bits,
    bias,
    top,
    width,
    largest,
    scaling,
    codes,
    scales,
    upper,
    last,
):
    """:func:`decode_add` with what to work in; last: as many values as a tile has."""
    size, tile = np.uint64(out.size), _tile(block)
    _, code_plane = _planes(size, block, scaling)
    source, code, sums, padded = span(payload), span(codes), span(out), span(last)
    for first in range(np.uint64(0), size, tile):
        n = min(tile, size - first)
        into, start = (sums, first) if n == tile else (padded, np.uint64(0))
        if n < tile:
            last[:n] = out[first:]
        _get_scales(payload, size, first, n, block, scaling, scales, upper)
        _get_codes(source, first, n, code_plane, width, code, tile)
        for g in range((n + block - np.uint64(1)) // block):
            for j in range(g * block, (g + np.uint64(1)) * block, _LANES):
                v = _multiplied(
                    _values(load(code, j, 16), mantissa_bits, bias, top, width), scales[g], largest
                )
                prefetch(into, start + j + tile)
                if narrow:
                    v = round_floats(v, half, _NAN)
                store(into, start + j, load(into, start + j, 16) + v)
        if n < tile:
            out[first:] = last[:n]

"""Kernels of the block integers. ``q`` is 2**(bits-1): codes are -q .. q-1, a code's value is c * (code/q).

Arrays are flat: fp32 values as int32 bits, 16-bit values as uint16 bits (``half`` tells fp16 from bf16),
payloads as uint8, at any alignment. Each block goes through buffers that stay in the L1 cache; the last one is
padded with zeros there, so every inner loop runs over whole blocks and needs no scalar tail.

Bytes must not depend on the compiler: rounding is the add of 1.5 * 2**23 after a division (nothing to fuse) or
integer arithmetic, and fastmath stays off. Indices are unsigned, which spares numba's test for negative ones.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped"

from __future__ import annotations

import numpy as np
from numba import njit

from .values import INF, load, prefetch, round_to_16_bits, store

_SIGN = np.int32(-(2**31))
_NAN = np.float32(np.nan)  # 0x7FC00000
_MAX = np.finfo(np.float32).max
_MAGIC = np.float32(1.5 * 2**23)  # adding it leaves round-half-even(y) in the low mantissa bits
_MAGIC_BITS = np.int32(0x4B400000)
_TINY = np.float32(2.0**-100)  # below it c/q could be subnormal: divide at 2**100 times the size
_LIFT = np.float32(2.0**100)
_WHOLE = np.uint64(2**64 - 32)  # block & _WHOLE is block, and tells the compiler that 32 divides it


@njit(nogil=True, cache=True)
def _block_key(seed, b):
    """64-bit key of block b: splitmix64's b-th output (Steele, Lea, Flood 2014)."""
    z = np.uint64(seed + np.uint64(b + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(nogil=True, cache=True)
def _random24(lane, k0, k1):
    """24 random bits for one lane of a block: lowbias32 with a second key word between its rounds."""
    h = np.uint32(np.uint32(lane) + k0)
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * np.uint32(0x21F0AAAD))
    h = np.uint32(h ^ (h >> np.uint32(15)))
    h = np.uint32(h + k1)
    h = np.uint32(h * np.uint32(0xD35A2D97))
    h = np.uint32(h ^ (h >> np.uint32(15)))
    return np.int32(h >> np.uint32(8))


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _scale(bits, at, n, q):
    """c of a block of fp32 bits: NaN for a block with NaN or Inf, 0 for zeros."""
    high = np.int32(0)  # bits of the largest value; fp32 of one sign sort like their bits
    low = np.int32(0)  # bits of the largest negated value
    for j in range(n):
        high = np.int32(max(high, bits[at + j]))
        low = np.int32(max(low, np.int32(bits[at + j] ^ _SIGN)))
    if max(high, low) >= INF:
        return _NAN
    big = np.int32(max(high, low)).view(np.float32)
    small = np.int32(min(high, low)).view(np.float32)
    c = np.float32(np.float32(small / np.float32(q - 1)) * np.float32(q))
    c = np.float32(max(min(c, _MAX), big))
    return np.float32(-c) if high > low else c


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _quantize(inputs, at, n, q, c, stochastic, key, codes):
    """Codes (int8) of a block."""
    if c == np.float32(0) or c != c:
        for j in range(n):
            codes[at + j] = np.int8(0)
        return
    lift = _LIFT if abs(c) < _TINY else np.float32(1)
    step = np.float32(np.float32(c * lift) * np.float32(1.0 / q))
    top = np.int32(q - 1)
    if not stochastic:
        rate = np.float32(np.float32(1) / step)
        for j in range(n):
            y = np.float32(np.float32(inputs[at + j] * lift) * rate)
            t = np.float32(y + _MAGIC).view(np.int32)
            codes[at + j] = np.int8(min(np.int32(t - _MAGIC_BITS), top))
    else:
        k0, k1 = np.uint32(key), np.uint32(key >> np.uint64(32))
        most = np.float32(q - 1)
        for j in range(n):
            y = np.float32(np.float32(inputs[at + j] * lift) / step)
            # 24 fraction bits: -128 <= y <= 127, so this fits 32 bits. Truncation moves y by under 2**-24.
            t = np.int32(np.float32(np.float32(min(y, most)) * np.float32(2.0**24)))
            codes[at + j] = np.int8(np.int32(t + _random24(j, k0, k1)) >> np.int32(24))


@njit(nogil=True, cache=True, forceinline=True)
def _values(codes, at, n, c, q, values):
    """values (fp32) = c * (code/q), one rounding; NaN throughout if c is not finite."""
    if not abs(c) <= _MAX:
        for j in range(n):
            values[at + j] = _NAN
        return
    unit = np.float32(1.0 / q)
    for j in range(n):
        values[at + j] = np.float32(c * np.float32(np.float32(codes[at + j]) * unit))


@njit(nogil=True, cache=True, forceinline=True)
def _low_bits(q):
    """Width of the first plane: codes of 4 to 6 bits keep their low 4 bits there, those of 2 and 3 bits 2."""
    return np.uint64(8 if q == 128 else 4 if q >= 8 else 2)


@njit(nogil=True, cache=True, forceinline=True)
def _high_bits(q):
    """Width of the second plane: what the first leaves."""
    return np.uint64(2 if q == 32 else 1 if q == 16 or q == 4 else 0)


@njit(nogil=True, cache=True, forceinline=True)
def _bytes(count, width):
    """Bytes of ``count`` values of ``width`` bits."""
    return (count * width + np.uint64(7)) >> np.uint64(3)


@njit(nogil=True, cache=True, forceinline=True)
def _pack(codes, pairs, quads, octets, payload, at, high_at, n, q):
    """Write n codes to the planes at ``at`` and ``high_at``; pairs, quads, octets are codes as uint16, 32 and 64."""
    low, high = _low_bits(q), _high_bits(q)
    if low == 8:
        for j in range(n):
            payload[at + j] = np.uint8(codes[j])
    elif low == 4:
        for j in range(_bytes(n, low)):
            p = pairs[j]
            payload[at + j] = np.uint8((p & np.uint16(15)) | ((p >> np.uint16(4)) & np.uint16(0xF0)))
    else:
        for j in range(_bytes(n, low)):
            payload[at + j] = _crumbs(quads[j])
    if high == 2:
        for j in range(_bytes(n, high)):
            payload[high_at + j] = _crumbs(np.uint32(quads[j] >> np.uint32(low)))
    elif high == 1:
        for j in range(_bytes(n, high)):
            # Bit ``low`` of eight bytes to the eight bits of one, the first byte's lowest.
            p = (octets[j] >> low) & np.uint64(0x0101010101010101)
            payload[high_at + j] = np.uint8((p * np.uint64(0x0102040810204080)) >> np.uint64(56))


@njit(nogil=True, cache=True, forceinline=True)
def _crumbs(p):
    """The low two bits of four bytes as one byte, the first byte's lowest."""
    two = np.uint32(p & np.uint32(0x03030303))
    return np.uint8(two | (two >> np.uint32(6)) | (two >> np.uint32(12)) | (two >> np.uint32(18)))


@njit(nogil=True, cache=True, forceinline=True)
def _spread_crumbs(b):
    """The inverse: four bytes of two bits each."""
    p = np.uint32(b)
    return np.uint32(
        (p | (p << np.uint32(6)) | (p << np.uint32(12)) | (p << np.uint32(18))) & np.uint32(0x03030303)
    )


@njit(nogil=True, cache=True, forceinline=True)
def _spread_bits(b):
    """Eight bytes of one bit each; the lowest bit comes first."""
    p = (np.uint64(b) * np.uint64(0x0101010101010101)) & np.uint64(0x8040201008040201)
    return ((p + np.uint64(0x7F7F7F7F7F7F7F7F)) >> np.uint64(7)) & np.uint64(0x0101010101010101)


@njit(nogil=True, cache=True, forceinline=True)
def _unpack(payload, at, high_at, n, codes, pairs, quads, octets, q):
    """Read n codes."""
    low, high = _low_bits(q), _high_bits(q)
    if q == 128:
        for j in range(n):
            codes[j] = np.int8(payload[at + j])
        return
    if q == 8:
        for j in range(_bytes(n, low)):
            p = np.uint16(payload[at + j])
            # Nibbles to bytes, each with its sign in all high bits.
            first = np.uint16(((p & np.uint16(15)) ^ np.uint16(8)) - np.uint16(8))
            second = np.uint16(((p >> np.uint16(4)) ^ np.uint16(8)) - np.uint16(8))
            pairs[j] = np.uint16((first & np.uint16(0xFF)) | (second << np.uint16(8)))
        return
    if low == 4:
        for j in range(_bytes(n, low)):
            p = np.uint16(payload[at + j])
            pairs[j] = np.uint16((p & np.uint16(15)) | ((p >> np.uint16(4)) << np.uint16(8)))
    else:
        for j in range(_bytes(n, low)):
            quads[j] = _spread_crumbs(payload[at + j])
    if high == 2:
        for j in range(_bytes(n, high)):
            quads[j] = np.uint32(quads[j] | (_spread_crumbs(payload[high_at + j]) << np.uint32(low)))
    elif high == 1:
        for j in range(_bytes(n, high)):
            octets[j] = octets[j] | (_spread_bits(payload[high_at + j]) << low)
    sign = np.int8(q)
    for j in range(n):
        codes[j] = np.int8((codes[j] ^ sign) - sign)


@njit(nogil=True, cache=True)
def _residual(inputs, codes, at, n, c, q, residual, first):
    """x - decoded value of n values of a block; c is finite or NaN."""
    unit = np.float32(1.0 / q)
    for j in range(n):
        value = np.float32(c * np.float32(np.float32(codes[at + j]) * unit))
        residual[first + at + j] = inputs[at + j] - value


@njit(nogil=True, cache=True)
def _tile(block):
    """Values that are coded in one go: whole blocks, enough that one block's latency hides in the next."""
    return (block * max(np.uint64(1), np.uint64(1024) // block)) & _WHOLE


@njit(nogil=True, cache=True, error_model="numpy")
def encode(x, half, payload, residual, block, q, stochastic, seed):
    """Encode x (int32 or uint16 bits) into payload (uint8, exactly sized).

    residual: fp32, x - decoded value; may be the memory of x; empty if not wanted. block, seed: uint64.
    """
    size, block = np.uint64(x.size), block & _WHOLE
    blocks = (size + block - np.uint64(1)) // block
    tile = _tile(block)
    bits = np.zeros(tile, np.int32)
    inputs = bits.view(np.float32)
    codes = np.zeros(tile, np.int8)
    pairs, quads, octets = codes.view(np.uint16), codes.view(np.uint32), codes.view(np.uint64)
    scales = np.empty(tile // block, np.float32)
    scale_bytes = scales.view(np.uint8)
    low, high = _low_bits(q), _high_bits(q)
    high_plane = np.uint64(4) * blocks + _bytes(size, low)
    line = np.uint64(64 // x.itemsize)
    for first in range(np.uint64(0), size, tile):
        n = min(tile, size - first)
        load(x, first, n, half, bits)
        for j in range(n, tile):
            bits[j] = np.int32(0)
        b0 = first // block
        count = (n + block - np.uint64(1)) // block
        for g in range(count):
            scales[g] = _scale(bits, g * block, block, q)
        for g in range(count):
            ahead = first + tile + g * block  # the memory works on the next tile while this one is computed
            for j in range(np.uint64(0), block, line):
                prefetch(x, ahead + j)
            key = _block_key(seed, b0 + g)
            _quantize(inputs, g * block, block, q, scales[g], stochastic, key, codes)
        for j in range(np.uint64(4) * count):
            payload[np.uint64(4) * b0 + j] = scale_bytes[j]
        at, high_at = np.uint64(4) * blocks + _bytes(first, low), high_plane + _bytes(first, high)
        _pack(codes, pairs, quads, octets, payload, at, high_at, n, q)
        if residual.size:
            for g in range(count):
                m = min(block, n - g * block)
                _residual(inputs, codes, g * block, m, scales[g], q, residual, first)


@njit(nogil=True, cache=True)
def decode(payload, out, half, block, q):
    """Decode payload (exactly sized) to out: float32, or uint16 bits. block: uint64."""
    size, block = np.uint64(out.size), block & _WHOLE
    blocks = (size + block - np.uint64(1)) // block
    tile = _tile(block)
    codes = np.zeros(tile, np.int8)
    pairs, quads, octets = codes.view(np.uint16), codes.view(np.uint32), codes.view(np.uint64)
    values = np.empty(tile, np.float32)
    scales = np.empty(tile // block, np.float32)
    scale_bytes = scales.view(np.uint8)
    low, high = _low_bits(q), _high_bits(q)
    high_plane = np.uint64(4) * blocks + _bytes(size, low)
    for first in range(np.uint64(0), size, tile):
        n = min(tile, size - first)
        b0 = first // block
        count = (n + block - np.uint64(1)) // block
        for j in range(np.uint64(4) * count):
            scale_bytes[j] = payload[np.uint64(4) * b0 + j]
        at, high_at = np.uint64(4) * blocks + _bytes(first, low), high_plane + _bytes(first, high)
        _unpack(payload, at, high_at, n, codes, pairs, quads, octets, q)
        for g in range(count):
            _values(codes, g * block, block, scales[g], q, values)
        store(values, out, first, n, half)


@njit(nogil=True, cache=True)
def decode_add(payload, out, half, narrow, block, q):
    """out (float32) += decoded values, first rounded to fp16 (half) or bf16 if ``narrow``. block: uint64."""
    size, block = np.uint64(out.size), block & _WHOLE
    blocks = (size + block - np.uint64(1)) // block
    tile = _tile(block)
    codes = np.zeros(tile, np.int8)
    pairs, quads, octets = codes.view(np.uint16), codes.view(np.uint32), codes.view(np.uint64)
    values = np.empty(tile, np.float32)
    narrowed = np.empty(tile, np.uint16)
    scales = np.empty(tile // block, np.float32)
    scale_bytes = scales.view(np.uint8)
    low, high = _low_bits(q), _high_bits(q)
    high_plane = np.uint64(4) * blocks + _bytes(size, low)
    for first in range(np.uint64(0), size, tile):
        n = min(tile, size - first)
        b0 = first // block
        count = (n + block - np.uint64(1)) // block
        for j in range(np.uint64(4) * count):
            scale_bytes[j] = payload[np.uint64(4) * b0 + j]
        at, high_at = np.uint64(4) * blocks + _bytes(first, low), high_plane + _bytes(first, high)
        _unpack(payload, at, high_at, n, codes, pairs, quads, octets, q)
        for g in range(count):
            _values(codes, g * block, block, scales[g], q, values)
        if narrow:
            round_to_16_bits(values, narrowed, tile, half)
        for j in range(n):
            out[first + j] += values[j]

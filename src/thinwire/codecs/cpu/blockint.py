"""Kernels of the block integers. ``q`` is 2**(bits-1): codes are -q .. q-1, a code's value is c * (code/q).

Arrays are flat: fp32 values as int32 bits, 16-bit values as uint16 bits (``half`` tells fp16 from bf16),
payloads as uint8, at any alignment. Whole blocks are coded where they lie, 32 values at a time, in registers; the last,
shorter one goes through buffers of a whole block, padded with zeros.

Bytes must not depend on the compiler: rounding is the add of 1.5 * 2**23 after a product (nothing to fuse) or
integer arithmetic, and fastmath stays off. Indices are unsigned, which spares numba's test for negative ones.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from .blockint_planes import high_bits, last_planes, low_bits, nbytes_of, pack, planes, put_end, unpack
from .spans import load, read, span, store, write
from .values import INF
from .vector_values import ahead, extremes, get_floats, get_pairs, put_floats, round_floats
from .vectors import convert, fill, lower_half, numbers, reinterpret, select, smaller, upper_half

_NAN = np.float32(np.nan)  # 0x7FC00000
_MAX = np.finfo(np.float32).max
_MAGIC = np.float32(1.5 * 2**23)  # adding it leaves round-half-even(y) in the low mantissa bits
_MAGIC_BITS = np.int32(0x4B400000)
_TINY = np.float32(2.0**-100)  # below it c/q could be subnormal: divide at 2**100 times the size
_TINY_BITS = _TINY.view(np.int32)
_LIFT = np.float32(2.0**100)
_CHUNK = np.uint64(32)  # divides every block
_TILE = np.uint64(1024)  # values that stay in the L1 cache


@njit(nogil=True, cache=True)
def _block_key(seed, b):
    """64-bit key of block b: splitmix64's b-th output (Steele, Lea, Flood 2014)."""
    z = np.uint64(seed + np.uint64(b + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(nogil=True, cache=True, forceinline=True)
def _random24(first, key):
    """24 random bits for each of 16 values of a block, every second from ``first`` on.

    lowbias32 with a second key word between its rounds.
    """
    h = numbers(np.uint32, 16) * np.uint32(2) + np.uint32(np.uint32(first) + np.uint32(key))
    h = (h ^ (h >> 16)) * np.uint32(0x21F0AAAD)
    h = (h ^ (h >> 15)) + np.uint32(key >> np.uint64(32))
    h = h * np.uint32(0xD35A2D97)
    return convert((h ^ (h >> 15)) >> 8, np.int32)


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _scale(high, low, q):
    """c of a block: NaN for a block with NaN or Inf, 0 for zeros. high, low: bits of its extremes, see ``extremes``."""
    if max(high, low) >= INF:
        return _NAN
    big = np.int32(max(high, low)).view(np.float32)
    small = np.int32(min(high, low)).view(np.float32)
    c = np.float32(np.float32(small / np.float32(q - 1)) * np.float32(q))
    c = np.float32(max(min(c, _MAX), big))
    return np.float32(-c) if high > low else c


@njit(nogil=True, cache=True, forceinline=True)
def _scale_of(scales, b):
    """c of block b."""
    return read(scales, np.uint64(4) * b, np.float32)


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _quantize(values, step, rate, q, first, key):
    """Codes of 16 values, every second from ``first`` on in its block: the low bits of int32.

    key: None for rounding to nearest.
    """
    top = np.int32(q - 1)
    if key is None:
        return smaller(reinterpret(values * rate + _MAGIC, np.int32), np.int32(_MAGIC_BITS + top))
    y, most = values / step, np.float32(top)
    # 24 fraction bits: -128 <= y <= 127, so this fits 32 bits. Truncation moves y by under 2**-24.
    t = convert(select(y < most, y, most) * np.float32(2.0**24), np.int32)
    return (t + _random24(first, key)) >> 24


@njit(nogil=True, cache=True, forceinline=True)
def _values(codes, c, q):
    """16 values (fp32) = c * (code/q), one rounding; c is not infinite."""
    return convert(convert(codes, np.int32), np.float32) * np.float32(1.0 / q) * c


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_blocks(x, blocks, b0, half, scales, low, high, residual, block, q, seed):
    """Encode whole blocks; the first is block ``b0`` of the message."""
    values, scale, low_plane, high_plane = span(x), span(scales), span(low), span(high)
    # Scales first, of some blocks: each is a chain of steps that wait for one another, so let them overlap.
    together = max(np.uint64(1), _TILE // block)
    for start in range(np.uint64(0), blocks, together):
        stop = min(start + together, blocks)
        for b in range(start, stop):
            most, least = extremes(values, b * block, block, half)
            write(scale, np.uint64(4) * b, _scale(most, least, q))
        # One loop for each width: with constants, nothing in it is left to decide.
        if half:
            _put_codes(values, start, stop, b0, True, scale, low_plane, high_plane, block, q, seed)
        elif q == 128:
            _put_codes(values, start, stop, b0, False, scale, low_plane, high_plane, block, 128, seed)
        elif q == 32:
            _put_codes(values, start, stop, b0, False, scale, low_plane, high_plane, block, 32, seed)
        elif q == 16:
            _put_codes(values, start, stop, b0, False, scale, low_plane, high_plane, block, 16, seed)
        elif q == 8:
            _put_codes(values, start, stop, b0, False, scale, low_plane, high_plane, block, 8, seed)
        elif q == 4:
            _put_codes(values, start, stop, b0, False, scale, low_plane, high_plane, block, 4, seed)
        else:
            _put_codes(values, start, stop, b0, False, scale, low_plane, high_plane, block, 2, seed)
        if residual is not None:
            _put_residual(values, start, stop, scale, low_plane, high_plane, span(residual), block, q)


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _put_codes(values, start, stop, b0, half, scale, low_plane, high_plane, block, q, seed):
    """Write the codes of blocks ``start`` to ``stop``, whose scales are written."""
    for b in range(start, stop):
        c = _scale_of(scale, b)
        size = np.int32(np.float32(c).view(np.int32) & np.int32(0x7FFFFFFF))
        tiny = size < _TINY_BITS
        step = np.float32(np.float32(c * (_LIFT if tiny else np.float32(1))) * np.float32(1.0 / q))
        rate = np.float32(np.float32(1) / step)
        key = seed
        if seed is not None:
            key = _block_key(seed, b0 + b)
        for j in range(np.uint64(0), block, _CHUNK):
            ahead(values, b * block + j, _TILE)
            even, odd = get_pairs(values, b * block + j, half)
            if tiny:
                even, odd = even * _LIFT, odd * _LIFT
            even = _quantize(even, step, rate, q, j, key)
            odd = _quantize(odd, step, rate, q, j + np.uint64(1), key)
            if size == 0 or size > INF:
                even, odd = fill(np.int32(0), 16), fill(np.int32(0), 16)
            pack(even, odd, b * block + j, q, low_plane, high_plane)


@njit(nogil=True, cache=True, forceinline=True)
def _put_residual(values, start, stop, scale, low_plane, high_plane, residual, block, q):
    """Write the residual of blocks whose codes are written; it may lie where the values do."""
    for b in range(start, stop):
        c = _scale_of(scale, b)
        for at in range(b * block, (b + np.uint64(1)) * block, _CHUNK):
            here, there = _decoded(at, c, q, low_plane, high_plane)
            store(residual, at, get_floats(values, at, False) - here)
            store(residual, at + np.uint64(16), get_floats(values, at + np.uint64(16), False) - there)


@njit(nogil=True, cache=True)
def encode(x, half, payload, residual, block, q, seed):
    """Encode x (int32 or uint16 bits) into payload (uint8, exactly sized).

    residual: fp32, x - decoded value, may be the memory of x; or None. seed: of stochastic rounding; or None.
    block, seed: uint64.
    """
    size = np.uint64(x.size)
    whole, rest = size // block, size % block
    low_plane, high_plane = planes(payload, whole + np.uint64(rest > 0), size, q)
    _encode_blocks(x, whole, np.uint64(0), half, payload, low_plane, high_plane, residual, block, q, seed)
    if rest:
        done = whole * block
        padded = np.zeros(block, x.dtype)
        padded[:rest] = x[done:]
        scale = payload[np.uint64(4) * whole :]
        low = np.empty(nbytes_of(block, low_bits(q)), np.uint8)
        high = np.empty(nbytes_of(block, high_bits(q)), np.uint8)
        if residual is None:
            _encode_blocks(padded, np.uint64(1), whole, half, scale, low, high, None, block, q, seed)
        else:
            lost = np.empty(block, np.float32)
            _encode_blocks(padded, np.uint64(1), whole, half, scale, low, high, lost, block, q, seed)
            residual[done:] = lost[:rest]
        put_end(low, low_plane, nbytes_of(rest, low_bits(q)))
        put_end(high, high_plane, nbytes_of(rest, high_bits(q)))


@njit(nogil=True, cache=True, forceinline=True)
def _decoded(first, c, q, low_plane, high_plane):
    """The 32 values (fp32) from value ``first`` on, of one block, as two vectors; NaN if c is not finite."""
    if abs(c) <= _MAX:
        codes = unpack(first, q, low_plane, high_plane)
        return _values(lower_half(codes), c, q), _values(upper_half(codes), c, q)
    return fill(_NAN, 16), fill(_NAN, 16)


@njit(nogil=True, cache=True)
def _decode_blocks(scales, low, high, blocks, out, half, block, q):
    """Decode whole blocks."""
    scale, low_plane, high_plane, values = span(scales), span(low), span(high), span(out)
    for b in range(blocks):
        c = _scale_of(scale, b)
        for j in range(b * block, (b + np.uint64(1)) * block, _CHUNK):
            here, there = _decoded(j, c, q, low_plane, high_plane)
            ahead(values, j, _TILE)
            put_floats(values, j, here, half, c)
            put_floats(values, j + np.uint64(16), there, half, c)


@njit(nogil=True, cache=True)
def _add_blocks(scales, low, high, blocks, out, half, narrow, block, q):
    """Decode whole blocks and add them to ``out``."""
    scale, low_plane, high_plane, sums = span(scales), span(low), span(high), span(out)
    for b in range(blocks):
        c = _scale_of(scale, b)
        for j in range(b * block, (b + np.uint64(1)) * block, _CHUNK):
            here, there = _decoded(j, c, q, low_plane, high_plane)
            ahead(sums, j, _TILE)
            if narrow:
                here, there = round_floats(here, half, c), round_floats(there, half, c)
            store(sums, j, load(sums, j, 16) + here)
            store(sums, j + np.uint64(16), load(sums, j + np.uint64(16), 16) + there)


@njit(nogil=True, cache=True)
def decode(payload, out, half, block, q):
    """Decode payload (exactly sized) to out: float32, or uint16 bits. block: uint64."""
    size = np.uint64(out.size)
    whole, rest = size // block, size % block
    low_plane, high_plane = planes(payload, whole + np.uint64(rest > 0), size, q)
    _decode_blocks(payload, low_plane, high_plane, whole, out, half, block, q)
    if rest:
        low, high = last_planes(low_plane, high_plane, rest, block, q)
        values = np.empty(block, out.dtype)
        _decode_blocks(payload[np.uint64(4) * whole :], low, high, np.uint64(1), values, half, block, q)
        out[whole * block :] = values[:rest]


@njit(nogil=True, cache=True)
def decode_add(payload, out, half, narrow, block, q):
    """out (float32) += decoded values, first rounded to fp16 (half) or bf16 if ``narrow``. block: uint64."""
    size = np.uint64(out.size)
    whole, rest = size // block, size % block
    low_plane, high_plane = planes(payload, whole + np.uint64(rest > 0), size, q)
    _add_blocks(payload, low_plane, high_plane, whole, out, half, narrow, block, q)
    if rest:
        low, high = last_planes(low_plane, high_plane, rest, block, q)
        sums = np.zeros(block, np.float32)
        sums[:rest] = out[whole * block :]
        _add_blocks(payload[np.uint64(4) * whole :], low, high, np.uint64(1), sums, half, narrow, block, q)
        out[whole * block :] = sums[:rest]

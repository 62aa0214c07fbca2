"""Kernels of ``sign``: a bit per value and the mean magnitude of a block; see codecs/sign.py.

The mean is a sum in 32 lanes that are folded in halves, so that its order is that of the definition on any machine.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped"

from __future__ import annotations

import numpy as np
from numba import njit

from .values import load, prefetch, round_to_16_bits, store

_ABS = np.int32(0x7FFFFFFF)
_MAX = np.finfo(np.float32).max
_NAN = np.float32(np.nan)
LANES = 32


@njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
def _mean(bits, at, n, count, lanes):
    """Mean magnitude of a block of n values (a multiple of 32; those from ``count`` on are 0); NaN if not finite."""
    share = np.float32(np.float32(1) / np.float32(count))
    for l in range(np.uint64(LANES)):
        lanes[l] = np.float32(0)
    high = np.int32(0)
    for j in range(np.uint64(0), n, np.uint64(LANES)):
        for l in range(np.uint64(LANES)):
            a = np.int32(bits[at + j + l] & _ABS)
            high = np.int32(max(high, a))
            lanes[l] = np.float32(lanes[l] + np.float32(np.int32(a).view(np.float32) * share))
    if high >= np.int32(0x7F800000):
        return _NAN
    width = np.uint64(LANES // 2)
    while width:
        for l in range(width):
            lanes[l] = np.float32(lanes[l] + lanes[l + width])
        width >>= np.uint64(1)
    return np.float32(min(lanes[0], _MAX))


@njit(nogil=True, cache=True, forceinline=True)
def _signs(words):
    """The signs of eight fp32 values (their bits) as one byte, the first lowest."""
    b = np.uint32(0)
    for l in range(8):
        b |= np.uint32(np.uint32(words[l]) >> np.uint32(31)) << np.uint32(l)
    return np.uint8(b)


@njit(nogil=True, cache=True)
def _tile(block):
    """Values that are coded in one go: whole blocks."""
    return block * max(np.uint64(1), np.uint64(1024) // block)


@njit(nogil=True, cache=True, error_model="numpy")
def encode(x, half, payload, block):
    """Encode x (int32 or uint16 bits) into payload (uint8, exactly sized). block: uint64."""
    size = np.uint64(x.size)
    blocks = (size + block - np.uint64(1)) // block
    tile = _tile(block)
    bits = np.zeros(tile, np.int32)
    lanes = np.zeros(LANES, np.float32)
    scale = np.zeros(1, np.float32)
    scale_bytes = scale.view(np.uint8)
    line = np.uint64(64 // x.itemsize)
    for first in range(np.uint64(0), size, tile):
        n = min(tile, size - first)
        load(x, first, n, half, bits)
        for j in range(n, tile):
            bits[j] = np.int32(0)
        for j in range(np.uint64(0), tile, line):
            prefetch(x, first + tile + j)
        for g in range((n + block - np.uint64(1)) // block):
            count = min(block, n - g * block)
            scale[0] = _mean(bits, g * block, block, count, lanes)
            for j in range(np.uint64(4)):
                payload[np.uint64(4) * (first // block + g) + j] = scale_bytes[j]
        at = np.uint64(4) * blocks + (first >> np.uint64(3))
        for j in range((n + np.uint64(7)) >> np.uint64(3)):
            payload[at + j] = _signs(bits[np.uint64(8) * j : np.uint64(8) * j + np.uint64(8)])


@njit(nogil=True, cache=True, forceinline=True)
def _decode_tile(payload, blocks, first, n, block, scale, bits):
    """The values of one tile, as fp32 bits."""
    scale_bits = scale.view(np.int32)
    scale_bytes = scale.view(np.uint8)
    at = np.uint64(4) * blocks + (first >> np.uint64(3))
    for j in range((n + np.uint64(7)) >> np.uint64(3)):
        b = np.int32(payload[at + j])
        for l in range(np.uint64(8)):
            bits[np.uint64(8) * j + l] = np.int32(np.int32(b >> np.int32(l)) << np.int32(31))
    for g in range((n + block - np.uint64(1)) // block):
        for j in range(np.uint64(4)):
            scale_bytes[j] = payload[np.uint64(4) * (first // block + g) + j]
        if abs(scale[0]) <= _MAX:
            for j in range(g * block, (g + np.uint64(1)) * block):
                bits[j] = np.int32(bits[j] ^ scale_bits[0])
        else:
            for j in range(g * block, (g + np.uint64(1)) * block):
                bits[j] = np.int32(0x7FC00000)


@njit(nogil=True, cache=True)
def decode(payload, out, half, block):
    """Decode payload (exactly sized) to out: float32, or uint16 bits. block: uint64."""
    size, tile = np.uint64(out.size), _tile(block)
    blocks = (size + block - np.uint64(1)) // block
    bits, scale = np.zeros(tile, np.int32), np.zeros(1, np.float32)
    for first in range(np.uint64(0), size, tile):
        n = min(tile, size - first)
        _decode_tile(payload, blocks, first, n, block, scale, bits)
        store(bits.view(np.float32), out, first, n, half)


@njit(nogil=True, cache=True)
def decode_add(payload, out, half, narrow, block):
    """out (float32) += decoded values, first rounded to fp16 (half) or bf16 if ``narrow``. block: uint64."""
    size, tile = np.uint64(out.size), _tile(block)
    blocks = (size + block - np.uint64(1)) // block
    bits, scale = np.zeros(tile, np.int32), np.zeros(1, np.float32)
    values, narrowed = bits.view(np.float32), np.zeros(tile, np.uint16)
    for first in range(np.uint64(0), size, tile):
        n = min(tile, size - first)
        _decode_tile(payload, blocks, first, n, block, scale, bits)
        if narrow:
            round_to_16_bits(values, narrowed, tile, half)
        for j in range(n):
            out[first + j] += values[j]

"""Plain, slow references of the block integers, and what references share: the format read off its definition.

The kernels must give the same bytes and the same values. Inputs are flat tensors, payloads are bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Bits of a code in each part of the payload, low bits first."""
_MAX = np.finfo(np.float32).max
_TINY = np.float32(2.0**-100)


def blockint_encode(x: Tensor, bits: int, block: int, *, stochastic: bool = False, seed: int = 0) -> bytes:
    """Payload of x (flat; fp32, fp16, bf16)."""
    q = 1 << (bits - 1)
    values = x.float().numpy()
    scales, codes = [], []
    for b, start in enumerate(range(0, len(values), block)):
        part = values[start : start + block]
        c = _scale(part, q)
        scales.append(c)
        codes.append(_codes(part, c, q, _random24(seed, b, len(part)) if stochastic else None))
    head = np.array(scales, "<f4").tobytes()
    flat = np.concatenate(codes).astype(np.int8) if codes else np.empty(0, np.int8)
    body, shift = b"", 0
    for width in PLANES[bits]:
        places = np.arange(shift, shift + width)
        body += np.packbits(flat[:, None] >> places & 1, bitorder="little").tobytes()
        shift += width
    return head + body


def blockint_decode(payload: bytes, numel: int, dtype: torch.dtype, bits: int, block: int) -> Tensor:
    """The values of a payload."""
    q = 1 << (bits - 1)
    blocks = -(-numel // block)
    scales = np.frombuffer(payload, "<f4", blocks)
    raw, at, shift = np.zeros(numel, np.int64), 4 * blocks, 0
    for width in PLANES[bits]:
        nbytes = -(-numel * width // 8)
        plane = np.frombuffer(payload, np.uint8, nbytes, at)
        digits = np.unpackbits(plane, bitorder="little")[: numel * width].reshape(numel, width)
        raw |= digits.astype(np.int64) @ (1 << np.arange(shift, shift + width))
        at, shift = at + nbytes, shift + width
    codes = ((raw ^ q) - q).astype(np.float32)
    c = np.repeat(scales, block)[:numel]
    with np.errstate(all="ignore"):
        values = c * (codes / np.float32(q))
    values[~np.isfinite(c)] = np.nan
    return rounded(values, dtype)


def rounded(values: Any, dtype: torch.dtype) -> Tensor:
    """Decoded fp32 values in a message's dtype: finite ones stay finite, NaN has one bit pattern."""
    limit = torch.finfo(dtype).max
    out = torch.from_numpy(values).clamp(-limit, limit).to(dtype)
    out[torch.from_numpy(np.isnan(values))] = torch.nan
    return out


def _scale(x: Any, q: int) -> Any:
    if not np.isfinite(x).all():
        return np.float32(np.nan)
    high, low = max(x.max(), np.float32(0)), max((-x).max(), np.float32(0))
    with np.errstate(over="ignore", under="ignore"):
        c = min(np.float32(min(high, low) / np.float32(q - 1)) * np.float32(q), _MAX)
    c = abs(max(c, high, low))
    return -c if high > low else c


def _codes(x: Any, c: Any, q: int, random: Any) -> Any:
    if c == 0 or np.isnan(c):
        return np.zeros(len(x), np.int8)
    lift = np.float32(2.0**100) if abs(c) < _TINY else np.float32(1)
    step = c * lift / np.float32(q)
    with np.errstate(over="ignore", under="ignore"):
        if random is None:
            y = (x * lift) * (np.float32(1) / step)
            return np.minimum(np.rint(y), q - 1).astype(np.int8)
        y = (x * lift) / step
    fixed = np.minimum((y * np.float32(2.0**24)).astype(np.int64), (q - 1) << 24)
    return ((fixed + random) >> 24).astype(np.int8)


def _random24(seed: int, block: int, n: int) -> Any:
    """24 random bits for each value of a block: splitmix64 gives the block's key, lowbias32 the values."""
    mask = (1 << 64) - 1
    z = (seed + (block + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    h: Any = (np.arange(n, dtype=np.uint32) + np.uint32(z & 0xFFFFFFFF)).astype(np.uint32)
    h = (h ^ h >> 16) * np.uint32(0x21F0AAAD)
    h = (h ^ h >> 15) + np.uint32(z >> 32)
    h = h * np.uint32(0xD35A2D97)
    return ((h ^ h >> 15) >> 8).astype(np.int64)

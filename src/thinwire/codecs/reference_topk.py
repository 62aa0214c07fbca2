"""Plain, slow reference of ``topk``. Inputs are flat tensors, payloads are bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .reference import rounded

BLOCK = 4096


def topk_encode(x: Tensor, k: int, bits: int) -> bytes:
    """Payload of x (flat; fp32, fp16, bf16)."""
    values = x.float().numpy()
    most = np.float32((1 << (bits - 1)) - 1)
    limits: list[np.float32] = []
    places: list[int] = []
    codes: list[int] = []
    for start in range(0, len(values), BLOCK):
        part = values[start : start + BLOCK]
        # NaN sorts as its bits do: above infinity.
        size = part.view(np.int32) & 0x7FFFFFFF
        kept = np.sort(np.argsort(-size.astype(np.int64), kind="stable")[:k])
        places += kept.tolist()
        if not np.isfinite(part).all():
            limits += [np.float32(np.nan)] * 2
            codes += [0] * len(kept)
            continue
        magnitudes = np.abs(part[kept])
        low, high = magnitudes.min(), magnitudes.max()
        limits += [low, high]
        for value, magnitude in zip(part[kept], magnitudes, strict=True):
            share = (magnitude - low) / (high - low) if high > low else np.float32(0)
            codes.append(int(np.rint(share * most)) | int(np.signbit(value)) << (bits - 1))
    return np.array(limits, "<f4").tobytes() + _pack(places, 12) + _pack(codes, bits)


def topk_decode(payload: bytes, numel: int, dtype: torch.dtype, k: int, bits: int) -> Tensor:
    """The values of a valid payload."""
    blocks = -(-numel // BLOCK)
    lengths = [min(BLOCK, numel - b * BLOCK) for b in range(blocks)]
    total = sum(min(k, n) for n in lengths)
    limits = np.frombuffer(payload, "<f4", 2 * blocks)
    places = _unpack(payload[8 * blocks :], 12, total)
    codes = _unpack(payload[8 * blocks + -(-12 * total // 8) :], bits, total)
    most, sign = np.float32((1 << (bits - 1)) - 1), 1 << (bits - 1)
    values, at = np.zeros(numel, np.float32), 0
    for b, n in enumerate(lengths):
        low, high = limits[2 * b : 2 * b + 2]
        kept = slice(at, at + min(k, n))
        at = kept.stop
        if not 0 <= low <= high < np.inf:
            values[b * BLOCK : b * BLOCK + n] = np.nan
            continue
        magnitudes = np.minimum(low + (codes[kept] % sign).astype(np.float32) / most * (high - low), high)
        values[b * BLOCK + places[kept]] = np.where(codes[kept] >= sign, -magnitudes, magnitudes)
    return rounded(values, dtype)


def _pack(numbers: list[int], width: int) -> bytes:
    digits = np.array(numbers, np.int64)[:, None] >> np.arange(width) & 1
    return np.packbits(digits.astype(np.uint8), bitorder="little").tobytes()


def _unpack(data: bytes, width: int, count: int) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: width * count]
    return bits.reshape(count, width).astype(np.int64) @ (1 << np.arange(width))

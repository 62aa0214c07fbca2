"""Plain, slow reference of ``sign``. Inputs are flat tensors, payloads are bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .reference import rounded

LANES = 32


def sign_encode(x: Tensor, block: int) -> bytes:
    """Payload of x (flat; fp32, fp16, bf16)."""
    values = x.float().numpy()
    means = [mean_magnitude(values[start : start + block]) for start in range(0, len(values), block)]
    # Of the values' own bits: widening a NaN may lose its sign.
    integers = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16).numpy()
    signs = np.packbits(integers < 0, bitorder="little")
    return np.array(means, "<f4").tobytes() + signs.tobytes()


def sign_decode(payload: bytes, numel: int, dtype: torch.dtype, block: int) -> Tensor:
    """The values of a payload."""
    blocks = -(-numel // block)
    means = np.repeat(np.frombuffer(payload, "<f4", blocks), block)[:numel]
    negative = np.unpackbits(np.frombuffer(payload, np.uint8, offset=4 * blocks), bitorder="little")[:numel]
    values = np.where(negative, -means, means)
    return rounded(np.where(np.isfinite(means), values, np.float32(np.nan)), dtype)


def mean_magnitude(x: Any) -> Any:
    """fp32: each |x| / n is added to lane (index mod 32) in order, then the lanes are folded in halves."""
    if not np.isfinite(x).all():
        return np.float32(np.nan)
    shares = np.abs(x) * (np.float32(1) / np.float32(len(x)))
    lanes = np.zeros(LANES, np.float32)
    for start in range(0, len(x), LANES):
        part = shares[start : start + LANES]
        lanes[: len(part)] += part
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return min(lanes[0], np.finfo(np.float32).max)

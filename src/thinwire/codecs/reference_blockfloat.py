"""Plain, slow reference of the block floats: tables of values and a search, with no bit tricks.

The kernels must give the same bytes and the same values. Inputs are flat tensors, payloads are bytes.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .minifloat import E4M3, Minifloat
from .reference import rounded

Scaling = Literal["fp32", "e8m0", "two-level"]
"""fp32: one for each block; e8m0: a power of two; two-level: an e4m3 for each block, an fp32 for each group."""

GROUP = 1024
"""Values that share the upper scale of two-level."""
_MAX = np.finfo(np.float32).max
_LEAST = np.float32(2.0**-149)


def blockfloat_encode(x: Tensor, element: Minifloat, block: int, scaling: Scaling) -> bytes:
    """Payload of x (flat; fp32, fp16, bf16)."""
    values = x.float().numpy()
    head, scales = scales_of(values, element, block, scaling)
    codes: Any = np.zeros(len(values), np.uint8)
    for b, scale in enumerate(scales):
        part = slice(b * block, (b + 1) * block)
        if scale != 0 and not np.isnan(scale):
            lift = np.float32(2.0**100) if scale < np.float32(2.0**-100) else np.float32(1)
            with np.errstate(under="ignore"):
                y = (values[part] * lift) * (np.float32(1) / (scale * lift))
            codes[part] = nearest_codes(y, element)
    if element.width == 4:
        codes = np.append(codes, np.zeros(len(codes) % 2, np.uint8))
        codes = codes[0::2] | codes[1::2] << 4
    return head + bytes(codes.astype(np.uint8))


def blockfloat_decode(
    payload: bytes, numel: int, dtype: torch.dtype, element: Minifloat, block: int, scaling: Scaling
) -> Tensor:
    """The values of a payload."""
    blocks, groups = -(-numel // block), -(-numel // GROUP)
    with np.errstate(all="ignore"):
        if scaling == "fp32":
            at = 4 * blocks
            scales = np.frombuffer(payload, "<f4", blocks)
        elif scaling == "e8m0":
            at = blocks
            exponents = np.frombuffer(payload, np.uint8, blocks)
            scales = np.where(exponents == 255, np.nan, 2.0 ** (exponents.astype(np.float64) - 127))
        else:
            at = 4 * groups + blocks
            upper = np.repeat(np.frombuffer(payload, "<f4", groups), GROUP // block)[:blocks]
            lower = values_of(np.frombuffer(payload, np.uint8, blocks, 4 * groups), E4M3)
            scales = upper * lower
        raw = np.frombuffer(payload, np.uint8, offset=at)
        if element.width == 4:
            raw = np.stack([raw & 15, raw >> 4], 1).reshape(-1)[:numel]
        factor = np.repeat(scales.astype(np.float32), block)[:numel]
        codes = values_of(raw, element)
        values = np.clip(codes * factor, -_MAX, _MAX)
    values[~np.isfinite(factor)] = np.nan
    return rounded(values, dtype)


def scales_of(x: Any, element: Minifloat, block: int, scaling: Scaling) -> tuple[bytes, Any]:
    """The scales as they are written, and each block's scale (fp32): NaN for a block that is not finite."""
    starts = range(0, len(x), block)
    highs = np.array([np.abs(x[s : s + block]).max() for s in starts], np.float32)
    highs[~np.isfinite(highs)] = np.nan
    largest = np.float32(element.largest)
    if scaling == "fp32":
        scales = _fp32_scales(highs, largest)
        return scales.astype("<f4").tobytes(), scales
    if scaling == "e8m0":
        # The smallest power of two p with high <= largest * p, in exact arithmetic: both are 53-bit numbers.
        exponents = np.array([_exponent(float(high), element.largest) for high in highs], np.int64)
        written = exponents + 127
        scales = np.where(written == 255, np.nan, 2.0 ** exponents.astype(np.float64))
        return written.astype(np.uint8).tobytes(), scales.astype(np.float32)
    return _two_level(highs, largest, GROUP // block)


def _two_level(highs: Any, largest: Any, blocks: int) -> tuple[bytes, Any]:
    """An fp32 scale for each group of ``blocks`` blocks, an e4m3 for each block."""
    uppers: list[Any] = []
    written: list[int] = []
    scales: list[Any] = []
    for start in range(0, len(highs), blocks):
        group = highs[start : start + blocks]
        finite = group[~np.isnan(group)]
        upper = _fp32_scales(np.array([finite.max() if len(finite) else 0.0], np.float32), largest * 448)[0]
        uppers.append(upper)
        for high in group:
            code = 0x7F
            if not np.isnan(high):
                code = int(nearest_codes(np.array([high / largest / upper]), E4M3)[0]) if high else 0
                code = max(code, 1) if high else 0
            written.append(code)
            with np.errstate(under="ignore"):
                scales.append(upper * values_of(np.array([code], np.uint8), E4M3)[0])
    head = np.array(uppers, "<f4").tobytes() + np.array(written, np.uint8).tobytes()
    return head, np.array(scales, np.float32)


def nearest_codes(y: Any, element: Minifloat) -> Any:
    """Codes of fp32 values: the nearest, of two the even one; the largest beyond the range."""
    table = np.array([element.value(c) for c in range(element.top + 1)])
    middles = (table[1:] + table[:-1]) / 2
    a = np.abs(y.astype(np.float64))
    low = np.searchsorted(middles, a, "left")  # the lower code at a tie
    codes = low + ((low % 2 == 1) & (low < element.top) & (a == np.append(middles, np.inf)[low]))
    return (codes | np.signbit(y).astype(np.int64) << (element.width - 1)).astype(np.uint8)


def values_of(codes: Any, element: Minifloat) -> Any:
    """fp32 values of codes; NaN for codes above the largest."""
    half = 1 << (element.width - 1)
    table = np.full(half, np.nan, np.float32)
    table[: element.top + 1] = [element.value(c) for c in range(element.top + 1)]
    values = table[codes & (half - 1)]
    return np.where(codes & half, -values, values)


def _fp32_scales(highs: Any, largest: Any) -> Any:
    with np.errstate(under="ignore", invalid="ignore"):
        return np.where(highs == 0, np.float32(0), np.maximum(highs / largest, _LEAST)).astype(np.float32)


def _exponent(high: float, largest: float) -> int:
    if np.isnan(high):
        return 128
    exponent = -127
    while high > largest * 2.0**exponent:
        exponent += 1
    return exponent

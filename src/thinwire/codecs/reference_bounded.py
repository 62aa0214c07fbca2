"""Plain, slow reference of ``bounded``. Inputs are flat tensors, payloads are bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .reference import rounded

BLOCK, GROUP, RAW = 32, 4096, 255


def bounded_encode(x: Tensor, absolute: float, relative: float) -> bytes:
    """Payload of x (flat; fp32, fp16, bf16). One of the two bounds is 0."""
    raw = x.view(torch.uint8).numpy().tobytes() if x.numel() else b""
    itemsize = x.dtype.itemsize
    steps, widths, body = [], [], b""
    for start in range(0, x.numel(), BLOCK):
        bound = absolute
        if relative:
            bound = _range(x[start // GROUP * GROUP :][:GROUP]) * relative
        with np.errstate(over="ignore", under="ignore"):
            step = np.float32((2.0 if itemsize == 4 else 1.0) * bound)
        if relative and start % GROUP == 0:
            steps.append(step)
        part = x[start : start + BLOCK]
        codes = _codes(part, bound, step)
        if codes is None:
            widths.append(RAW)
            body += raw[start * itemsize : (start + len(part)) * itemsize]
            continue
        signed = np.zeros(BLOCK, np.int64)
        signed[: len(part)] = codes
        folded = np.where(signed < 0, -2 * signed - 1, 2 * signed)
        width = int(folded.max()).bit_length()
        widths.append(width)
        digits = folded[:, None] >> np.arange(width) & 1
        body += np.packbits(digits.astype(np.uint8), bitorder="little").tobytes()
    coded = bytes([1, 0, 0, 0]) + np.array(steps, "<f4").tobytes() + bytes(widths) + body
    return coded if len(coded) <= len(raw) + 4 else bytes(4) + raw


def bounded_decode(
    payload: bytes, numel: int, dtype: torch.dtype, absolute: float, relative: float
) -> Tensor:
    """The values of a valid payload."""
    if payload[0] == 0:
        return torch.frombuffer(bytearray(payload[4:]), dtype=dtype) if numel else torch.empty(0, dtype=dtype)
    blocks, groups = -(-numel // BLOCK), -(-numel // GROUP) if relative else 0
    steps = np.frombuffer(payload, "<f4", groups, 4)
    widths = payload[4 + 4 * groups :][:blocks]
    at, out = 4 + 4 * groups + blocks, torch.empty(numel, dtype=dtype)
    for b, width in enumerate(widths):
        part = out[b * BLOCK : (b + 1) * BLOCK]
        if width == RAW:
            nbytes = part.nbytes
            part.copy_(torch.frombuffer(bytearray(payload[at : at + nbytes]), dtype=dtype))
            at += nbytes
            continue
        bits = np.unpackbits(np.frombuffer(payload, np.uint8, 4 * width, at), bitorder="little")
        folded = bits.reshape(BLOCK, width).astype(np.int64) @ (1 << np.arange(width))
        at += 4 * width
        q = np.where(folded % 2, -(folded + 1) // 2, folded // 2)
        step = (
            steps[b * BLOCK // GROUP]
            if relative
            else np.float32((2.0 if dtype.itemsize == 4 else 1.0) * absolute)
        )
        part.copy_(_narrowed(q.astype(np.float32) * step, dtype)[: len(part)])
    return out


def _codes(part: Tensor, bound: float, step: Any) -> Any:
    """Codes of a block, or None if some value would not come back within the bound."""
    values = part.float().numpy()
    with np.errstate(all="ignore"):
        y = values / step if step > 0 else np.zeros_like(values)
        if not (np.abs(y) <= 2.0**22).all():
            return None
        q = np.rint(y)
        back = _narrowed(q * step, part.dtype).double().numpy()
    return q.astype(np.int64) if (np.abs(back - values.astype(np.float64)) <= bound).all() else None


def _narrowed(values: Any, dtype: torch.dtype) -> Tensor:
    # An fp32 product beyond the range stays Inf here: the encoder has to see that it is not within the bound.
    return torch.from_numpy(values) if dtype == torch.float32 else rounded(values, dtype)


def _range(x: Tensor) -> float:
    finite = x[torch.isfinite(x)].double()
    return float(finite.max() - finite.min()) if finite.numel() else 0.0

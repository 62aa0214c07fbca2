"""``bf16`` and ``fp16``: the values in a 16-bit float format. Payload: 2 bytes a value, little-endian.

Rounding is to nearest even. Infinities stay; NaN becomes the quiet NaN of its sign; a finite value beyond the
format's range becomes the largest finite value of its sign, so a decoded infinity was one before. Input that
already has the format passes bit for bit.

``fp16`` has no scale: below 6.1e-5 its error is absolute (3e-8, half a subnormal step), above 65504 it clips.
Gradients of large models lie below that range; use bf16 or a block integer for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Codec, add, is_aligned
from .cpu import cast as kernels
from .registry import register

_CHUNK = 1 << 16  # values; what a chunk is widened to stays in the cache


class Cast(Codec):
    """A cast to ``wire``. Runs on any device."""

    lossless: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = True
    wire: ClassVar[torch.dtype]

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        nbytes = 2 * x.numel()
        head = out[:nbytes]
        if is_aligned(head, self.wire):
            convert(x, head.view(self.wire))
        else:
            values = torch.empty(x.numel(), dtype=self.wire, device=x.device)
            convert(x, values)
            head.copy_(values.view(torch.uint8))
        return nbytes

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        convert(self._wire_values(payload), out)

    def _decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        if dtype in (self.wire, torch.float32):
            add(payload, self.wire, out)
        else:
            narrowed = torch.empty(out.numel(), dtype=dtype, device=out.device)
            convert(self._wire_values(payload), narrowed)
            add(narrowed.view(torch.uint8), dtype, out)

    def _wire_values(self, payload: Tensor) -> Tensor:
        return (payload if is_aligned(payload, self.wire) else payload.clone()).view(self.wire)

    def error_bound(self, x: Tensor) -> Tensor:
        """Half an ulp of the format, and of x's dtype; beyond the format's range what is clipped; inf at NaN, Inf."""
        wire, own = torch.finfo(self.wire), torch.finfo(x.dtype)
        a = x.detach().abs().double()
        if x.dtype == self.wire:
            bound = torch.zeros_like(a)
        else:
            bound = _half_ulp(a, wire)
            if x.dtype != torch.float32:
                bound = bound + _half_ulp(a + bound, own)
            bound = torch.maximum(bound, a - wire.max)
        return torch.where(torch.isfinite(a), bound, torch.full_like(a, torch.inf))


@register
@dataclass(frozen=True)
class Bf16Codec(Cast):
    """bfloat16: 8 bits of precision over the range of fp32."""

    name: ClassVar[str] = "bf16"
    wire: ClassVar[torch.dtype] = torch.bfloat16


@register
@dataclass(frozen=True)
class Fp16Codec(Cast):
    """IEEE half: 11 bits of precision from 6.1e-5 to 65504; clipped above, absolute error 3e-8 below."""

    name: ClassVar[str] = "fp16"
    wire: ClassVar[torch.dtype] = torch.float16


def convert(x: Tensor, out: Tensor) -> None:
    """out = x rounded to nearest even in out's dtype; finite stays finite, NaN is quiet with x's sign. Both flat."""
    if x.dtype == out.dtype:
        out.copy_(x)
    elif x.is_cuda or torch.float64 in (x.dtype, out.dtype):
        out.copy_(x) if out.dtype == torch.float32 else _convert_all(x, out)
    elif out.dtype == torch.float32:
        kernels.widen(x.view(torch.uint8).numpy(), out.numpy(), x.dtype == torch.float16)
    else:
        for start in range(0, x.numel(), _CHUNK):
            part = x[start : start + _CHUNK].float().numpy()
            target = out[start : start + _CHUNK].view(torch.uint8).numpy()
            kernels.narrow(part, target, out.dtype == torch.float16)


def _convert_all(x: Tensor, out: Tensor) -> None:
    # torch's own casts differ between vector body and tail in the bits of NaN, so NaN is written here.
    limit = torch.finfo(out.dtype).max
    clipped = torch.where(torch.isinf(x), x.float(), x.float().clamp(-limit, limit))
    out.copy_(clipped)
    sign = torch.signbit(x).to(torch.int16) << 15
    quiet = sign | (0x7E00 if out.dtype == torch.float16 else 0x7FC0)
    bits = out.view(torch.int16)
    bits.copy_(torch.where(torch.isnan(x), quiet, bits))


def _half_ulp(a: Tensor, info: torch.finfo) -> Tensor:
    """Largest rounding error at magnitude a (float64, >= 0): half a step of its binade or of the subnormals."""
    _, exponent = torch.frexp(a.clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(a, info.eps / 4), exponent)

"""``topk``: the k largest values of each 4096, with 12-bit places and their magnitudes in a few bits; the rest is 0.

Payload: for each block the smallest and the largest kept magnitude (fp32), then all places, then all codes: a sign
and a magnitude between the two. Sources: sparsification with error feedback, arXiv 1809.07599; indices local to a block
and coarse values, arXiv 2508.15706 (SparseLoCo). Normative layout: docs/wire-format.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import SpecError, WireError
from .cpu import topk as kernels
from .kernel import KernelCodec, with_rounding
from .registry import register


@register
@dataclass(frozen=True)
class TopkCodec(KernelCodec):
    """k of each 4096 values (of equal magnitudes the first ones), ``bits`` each besides 12 for the place.

    k: 1 to 2048; the default 64 keeps 1.6 % and costs 0.27 bit a value with bits=4. bits: 2 to 8, the sign included.
    A last, shorter block keeps min(k, its length). For gradients with error feedback. fp32, fp16, bf16.

    Non-finite input: a block of 4096 that holds NaN or Inf decodes to NaN throughout; others are not touched.
    """

    k: int = 64
    bits: int = 4

    name: ClassVar[str] = "topk"
    lossless: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = True
    kernels: ClassVar[ModuleType] = kernels

    def __post_init__(self) -> None:
        if not 1 <= self.k <= kernels.BLOCK // 2:
            raise SpecError(
                f"topk: k is kept values per {kernels.BLOCK}, 1 to {kernels.BLOCK // 2}, found {self.k}"
            )
        if not 2 <= self.bits <= 8:
            raise SpecError(f"topk: bits of a kept value, 2 to 8, found {self.bits}")

    @property
    def granule(self) -> int:
        return kernels.BLOCK

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return sum(self.payload_parts(numel, dtype))

    def payload_parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        full, rest = divmod(numel, kernels.BLOCK)
        kept = full * self.k + min(self.k, rest)
        return 8 * (full + (rest > 0)), -(-12 * kept // 8), -(-self.bits * kept // 8)

    @property
    def _parameters(self) -> tuple[Any, ...]:
        return self.k, self.bits

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        self._check_places(payload, out.numel())
        super()._decode(payload, out)

    def _decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        self._check_places(payload, out.numel())
        super()._decode_add(payload, out, dtype)

    def _check_places(self, payload: Tensor, numel: int) -> None:
        if not kernels.check(payload.numpy(), numel, self.k):
            raise WireError(f"{self}: places of kept values do not rise, or lie outside of their block")

    def error_bound(self, x: Tensor) -> Tensor:
        """Kept: half a step between the block's limits. Others: what they are. inf in a non-finite block."""
        flat = x.detach().reshape(-1)
        bound = torch.empty(flat.numel(), dtype=torch.float64)
        for start in range(0, flat.numel(), kernels.BLOCK):
            a = flat[start : start + kernels.BLOCK].abs().double()
            part = bound[start : start + kernels.BLOCK]
            if not bool(torch.isfinite(a).all()):
                part.fill_(torch.inf)
                continue
            largest = a.topk(min(self.k, a.numel())).values
            step = (largest[0] - largest[-1]) / ((1 << (self.bits - 1)) - 1)
            # fp32: of the difference, its share, the step and the sum.
            kept = step / 2 + 6 * 2.0**-24 * largest[0] + 2.0**-149
            kept = with_rounding(kept, largest[0] + kept, x.dtype)
            part.copy_(torch.where(a >= largest[-1], torch.maximum(kept, a * (a == largest[-1])), a))
        return bound.reshape(x.shape)

"""``bounded``: every value comes back within a bound, absolute or relative to the range of values around it.

Values become multiples of a step, and each 32 of them take as many bits as their largest needs (fixed-length encoding of
blocks, as cuSZp: Huang et al., SC 2023). Payload: 4 bytes, the steps, a width per block, the blocks' bits. Normative
layout: docs/wire-format.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, WireError
from .base import CompiledCodec
from .cpu import bounded as kernels
from .kernel import bits_of
from .registry import register


@register
@dataclass(frozen=True)
class BoundedCodec(CompiledCodec):
    """|decoded - x| <= ``abs``, or <= ``rel`` times the range (largest minus smallest finite value) of each 4096 values.

    Give one of the two. The bound holds for every finite value, whatever its size: 32 values that would not all come
    back within it are sent as they are, which is also how NaN and Inf travel, with all their bits. So the payload is
    as small as the data allows and never larger than the raw values and 4 bytes. fp32, fp16, bf16.
    """

    abs: float = 0.0
    rel: float = 0.0

    name: ClassVar[str] = "bounded"
    lossless: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = False

    def __post_init__(self) -> None:
        given = [value for value in (self.abs, self.rel) if value != 0]
        if len(given) != 1 or not (0 < given[0] < math.inf):
            raise SpecError(
                f"bounded: give one positive bound, abs or rel; found abs={self.abs}, rel={self.rel}"
            )

    @property
    def granule(self) -> int:
        return kernels.GROUP if self.rel else kernels.BLOCK

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return kernels.HEADER_NBYTES + numel * dtype.itemsize

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        half = x.dtype == torch.float16
        return int(kernels.encode(bits_of(x), half, self.abs, self.rel, _steps(x.dtype), out.numpy()))

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        raw, numel = payload.numpy(), out.numel()
        error = _ERRORS[kernels.check(raw, numel, out.dtype.itemsize, self.rel > 0)]
        if error is not None:
            raise WireError(f"{self}: payload of {numel} values in {len(raw)} bytes: {error}")
        step = np.float32(min(_steps(out.dtype) * self.abs, float(np.finfo(np.float32).max)))
        kernels.decode(raw, bits_of(out), out.dtype == torch.float16, step, self.rel > 0)

    def error_bound(self, x: Tensor) -> Tensor:
        """The bound itself."""
        flat = x.detach().reshape(-1)
        if self.abs:
            return torch.full(x.shape, self.abs, dtype=torch.float64)
        bounds = np.empty(kernels.groups_of(flat.numel(), True), np.float64)
        for g in range(len(bounds)):
            part = flat[g * kernels.GROUP : (g + 1) * kernels.GROUP].double()
            finite = part[torch.isfinite(part)]
            bounds[g] = self.rel * float(finite.max() - finite.min()) if finite.numel() else 0.0
        spread = torch.from_numpy(bounds).repeat_interleave(kernels.GROUP)[: flat.numel()]
        return spread.reshape(x.shape)


_ERRORS = (
    None,
    "longer or shorter than what it announces",
    "unknown mode or flags",
    f"a block of more than {kernels.MOST_BITS} bits a value",
)


def _steps(dtype: torch.dtype) -> float:
    """The quantisation step, as a multiple of the bound: 16-bit dtypes are rounded to once more."""
    return 2.0 if dtype == torch.float32 else 1.0

"""``sign``: a bit per value and the mean magnitude of each block, in fp32. For gradients with error feedback.

Payload: the means, then the signs, eight to a byte. Source: signSGD with error feedback, arXiv 1901.09847.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .cpu import sign as kernels
from .kernel import KernelCodec, check_block, with_rounding
from .registry import register


@register
@dataclass(frozen=True)
class SignCodec(KernelCodec):
    """1 bit a value and 32 per block; 1.25 bits with block 128. NMSE on Gaussian values 0.36: needs error feedback.

    block: a multiple of 32 from 32 to 65536. Zeros count as positive. fp32, fp16, bf16.

    Non-finite input: a block that holds NaN or Inf decodes to NaN throughout; other blocks are not touched.
    """

    block: int = 128

    name: ClassVar[str] = "sign"
    lossless: ClassVar[bool] = False
    kernels: ClassVar[ModuleType] = kernels
    needs_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self.name, self.block)

    @property
    def granule(self) -> int:
        return self.block

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return sum(self.payload_parts(numel, dtype))

    def payload_parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        return 4 * -(-numel // self.block), -(-numel // 8)

    @property
    def _parameters(self) -> tuple[Any, ...]:
        return (np.uint64(self.block),)

    def error_bound(self, x: Tensor) -> Tensor:
        """The distance of |x| from the block's mean, and what fp32 and the dtype round; inf in a non-finite block."""
        flat = x.detach().reshape(-1).abs().double()
        n = flat.numel()
        padded = torch.nn.functional.pad(flat, (0, -n % self.block)).reshape(-1, self.block)
        finite = torch.isfinite(padded).all(1, keepdim=True)
        rows = torch.where(finite, padded, 0.0)
        counts = torch.full_like(rows[:, :1], self.block)
        if n % self.block:
            counts[-1] = n % self.block
        mean = rows.sum(1, keepdim=True) / counts
        # fp32: a lane's sum of block / 32 shares, its folding in 5 steps, 1 / count, each share.
        slack = (self.block / 32 + 8) * 2.0**-24 * mean + self.block * 2.0**-149
        bound = (rows - mean).abs() + slack
        bound = with_rounding(bound, mean + slack, x.dtype)
        return torch.where(finite, bound, torch.inf).reshape(-1)[:n].reshape(x.shape)

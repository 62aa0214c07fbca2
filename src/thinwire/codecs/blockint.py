"""``int8`` to ``int2``: block integers. Payload: one fp32 scale per block, then the codes in one or two planes.

With Q = 2**(bits-1), P = max(x, 0) and N = max(-x, 0) over a block, M = max(P, N), m = min(P, N):

    c = max(M, min(fl(fl(m / (Q-1)) * Q), FLT_MAX)), negated if P > N
    code = min(round(fl(x * fl(1 / fl(c/Q)))), Q - 1), in -Q .. Q-1
    value = fl(c * (code / Q))

All 2**bits levels are used: the larger side of the block may reach code -Q, the smaller side never needs more
than Q - 1, so nothing is clipped and stochastic rounding stays unbiased. Where one side dominates (M >= m Q/(Q-1))
its extreme comes back exactly, so a constant block does. Normative layout and edge cases: docs/wire-format.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from .cpu import blockint as kernels
from .kernel import KernelCodec, bits_of, check_block, with_rounding
from .registry import register

_FLT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class BlockInt(KernelCodec):
    """Integers of ``bits`` bits with one fp32 scale per ``block`` values. fp32, fp16, bf16; any numel.

    block: a multiple of 32 from 32 to 65536. round: ``nearest`` (ties to even) or ``stochastic`` (unbiased; the
    random numbers depend on the seed, the block's index and the position in it). 16-bit inputs are widened
    exactly and rounded back to nearest even; finite values stay finite.

    Non-finite input: a block that holds NaN or Inf decodes to NaN throughout; other blocks are not touched.
    """

    block: int = 128
    round: str = "nearest"

    lossless: ClassVar[bool] = False
    kernels: ClassVar[ModuleType] = kernels
    cuda_kernels: ClassVar[str | None] = "blockint"
    planes: ClassVar[tuple[int, ...]]
    """Bits of a code in each part of the payload, low bits first: whole bytes are made of equal pieces."""

    def __post_init__(self) -> None:
        check_block(self.name, self.block)
        if self.round not in ("nearest", "stochastic"):
            raise SpecError(f"{self.name}: round is 'nearest' or 'stochastic', found {self.round!r}")

    @property
    def granule(self) -> int:
        return self.block

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return sum(self.planes)

    @property
    def _q(self) -> int:
        return 1 << (self.bits - 1)

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return sum(self.payload_parts(numel, dtype))

    def payload_parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        return (4 * -(-numel // self.block), *(-(-numel * width // 8) for width in self.planes))

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        return self._encode_with(x, out, None, seed)

    def _encode_residual(self, x: Tensor, out: Tensor, residual: Tensor, seed: int) -> int:
        return self._encode_with(x, out, residual, seed)

    def _encode_with(self, x: Tensor, out: Tensor, residual: Tensor | None, seed: int) -> int:
        size, stochastic = self.max_nbytes(x.numel(), x.dtype), self.round == "stochastic"
        if x.is_cuda:
            self._on_cuda().encode(x, out[:size], residual, self.block, self._q, stochastic, seed)
            return size
        lost = None if residual is None else residual.numpy()
        seed64 = np.uint64(seed & 0xFFFFFFFFFFFFFFFF) if stochastic else None
        half, payload, (block, q) = x.dtype == torch.float16, out[:size].numpy(), self._parameters
        kernels.encode(bits_of(x), half, payload, lost, block, q, seed64)
        return size

    @property
    def _parameters(self) -> tuple[Any, ...]:
        return np.uint64(self.block), self._q

    def error_bound(self, x: Tensor) -> Tensor:
        """step/2 (nearest) or one step (stochastic), plus what fp32 and the dtype round; inf in a non-finite block.

        step = |c| / Q, at most max|block| / (Q-1).
        """
        flat = x.detach().reshape(-1).double()
        q = self._q
        padding = -flat.numel() % self.block
        blocks = torch.nn.functional.pad(flat, (0, padding)).reshape(-1, self.block)
        finite = torch.isfinite(blocks).all(1, keepdim=True)
        rows = torch.where(finite, blocks, torch.zeros_like(blocks))
        if rows.numel():
            high, low = rows.amax(1, keepdim=True).clamp(min=0), (-rows).amax(1, keepdim=True).clamp(min=0)
        else:
            high = low = rows[:, :1]
        c = (torch.minimum(high, low).float() / (q - 1) * q).double().clamp(max=_FLT_MAX)
        c = torch.maximum(c, torch.maximum(high, low))
        step = c / q
        # Only where c was cut at FLT_MAX can the smaller side need code Q, one step more than there is.
        whole = (c >= _FLT_MAX) if self.round == "nearest" else torch.ones_like(finite)
        bound = torch.where(whole, step, step / 2)
        u32 = 2.0**-24
        magnitude = rows.abs() + step
        # fp32: of x / step, of step's smaller side, of the product; each relative to values below magnitude.
        bound = bound + 4 * u32 * magnitude + (q + 1) * 2.0**-149
        bound = with_rounding(bound, magnitude, x.dtype)
        bound = torch.where(finite, bound, torch.full_like(bound, torch.inf))
        return bound.reshape(-1)[: flat.numel()].reshape(x.shape)


@register
@dataclass(frozen=True)
class Int8Codec(BlockInt):
    """8 bits a value: 8.25 bits with block 128, NMSE 4.1e-5 on Gaussian values."""

    name: ClassVar[str] = "int8"
    planes: ClassVar[tuple[int, ...]] = (8,)


@register
@dataclass(frozen=True)
class Int6Codec(BlockInt):
    """6 bits a value: 6.25 bits with block 128, NMSE 6.6e-4 on Gaussian values."""

    name: ClassVar[str] = "int6"
    planes: ClassVar[tuple[int, ...]] = (4, 2)


@register
@dataclass(frozen=True)
class Int5Codec(BlockInt):
    """5 bits a value: 5.25 bits with block 128, NMSE 2.7e-3 on Gaussian values."""

    name: ClassVar[str] = "int5"
    planes: ClassVar[tuple[int, ...]] = (4, 1)


@register
@dataclass(frozen=True)
class Int4Codec(BlockInt):
    """4 bits a value: 4.25 bits with block 128, NMSE 1.1e-2 on Gaussian values."""

    name: ClassVar[str] = "int4"
    planes: ClassVar[tuple[int, ...]] = (4,)


@register
@dataclass(frozen=True)
class Int3Codec(BlockInt):
    """3 bits a value: 3.25 bits with block 128, NMSE 5.4e-2 on Gaussian values."""

    name: ClassVar[str] = "int3"
    planes: ClassVar[tuple[int, ...]] = (2, 1)


@register
@dataclass(frozen=True)
class Int2Codec(BlockInt):
    """2 bits a value: 2.25 bits with block 128, NMSE 0.45 on Gaussian values (block 32: 0.27); needs error feedback."""

    name: ClassVar[str] = "int2"
    planes: ClassVar[tuple[int, ...]] = (2,)

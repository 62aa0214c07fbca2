"""``fp8``, ``e3m0``, ``mxfp8``, ``mxfp4``, ``nvfp4``: floats of 8 and 4 bits with a scale per block.

Payload: the scales, then the codes, of 4 bits two to a byte. For a block with the largest magnitude m:

    fp8, e3m0      scale = fl(m / largest), fp32
    mxfp8, mxfp4   scale = the smallest power of two with m <= largest * scale, in 8 bits (E8M0)
    nvfp4          scale = fl(u * b): u = fl(m' / (6 * 448)) in fp32 for 1024 values, b nearest to m / 6 / u in E4M3

    code = the nearest value of the format to x / scale, ties to even;  value = fl(scale * code)

Normative layout and edge cases: docs/wire-format.md. Sources: OCP Microscaling Formats (MX) 1.0; for nvfp4 NVIDIA's
format, whose upper scale is one per tensor there; for e3m0 arXiv 2501.18512 (Streaming DiLoCo).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, nearest
from . import reference_blockfloat as reference
from .cpu import blockfloat as kernels
from .kernel import KernelCodec, check_block, with_rounding
from .minifloat import E2M1, E3M0, E4M3, E5M2, Minifloat
from .registry import register

_FP8 = {"e4m3": E4M3, "e5m2": E5M2}
_SCALINGS = {"fp32": kernels.FP32, "e8m0": kernels.E8M0, "two-level": kernels.TWO_LEVEL}


class BlockFloat(KernelCodec):
    """Codes of one float format, a scale per block. fp32, fp16, bf16; any numel.

    Non-finite input: a block that holds NaN or Inf decodes to NaN throughout; other blocks are not touched.
    Finite values stay finite. 16-bit inputs are widened exactly and rounded back to nearest even.
    """

    lossless: ClassVar[bool] = False
    kernels: ClassVar[ModuleType] = kernels
    scaling: ClassVar[reference.Scaling]
    """How the scales of blocks are written."""

    @property
    def element(self) -> Minifloat:
        """The format of the codes."""
        raise NotImplementedError

    @property
    def values_per_scale(self) -> int:
        raise NotImplementedError

    @property
    def granule(self) -> int:
        return reference.GROUP if self.scaling == "two-level" else self.values_per_scale

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return sum(self.payload_parts(numel, dtype))

    def payload_parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        blocks = -(-numel // self.values_per_scale)
        upper = (4 * -(-numel // reference.GROUP),) if self.scaling == "two-level" else ()
        scales = 4 * blocks if self.scaling == "fp32" else blocks
        return *upper, scales, -(-numel * self.element.width // 8)

    @property
    def _parameters(self) -> tuple[Any, ...]:
        """What the kernels need to know: block, mantissa bits, bias, top, width, largest, scaling."""
        e = self.element
        fields = (np.int32(v) for v in (e.mantissa_bits, e.bias, e.top, e.width))
        largest = np.float32(e.largest)
        return (np.uint64(self.values_per_scale), *fields, largest, _SCALINGS[self.scaling])

    def error_bound(self, x: Tensor) -> Tensor:
        """Half a step of the format at x / scale, what lies beyond its range, and what fp32 and the dtype round.

        inf in a non-finite block. Scales are what the definition says for x.
        """
        flat, block = x.detach().reshape(-1), self.values_per_scale
        _, found = reference.scales_of(flat.float().numpy(), self.element, block, self.scaling)
        scale = torch.from_numpy(found).double().repeat_interleave(block)[: flat.numel()]
        finite = torch.isfinite(scale)
        a = torch.where(torch.isfinite(flat), flat.abs().double(), 0.0)
        y = torch.where(finite & (scale > 0), a / scale, 0.0).clamp(max=self.element.largest)
        quantum = self.element.quantum
        _, exponent = torch.frexp(y / (quantum * 2**self.element.mantissa_bits))
        step = quantum * torch.exp2((exponent - 1).clamp(min=0).double())
        bound = torch.maximum(scale * step / 2, a - scale * self.element.largest)
        # fp32: of x / scale (two roundings), of 1 / scale, of the product; and of subnormal scales.
        bound = bound + 4 * 2.0**-24 * (a + scale * step) + (1 + self.element.largest) * 2.0**-149
        bound = with_rounding(bound, a + bound, x.dtype)
        return torch.where(finite, bound, torch.inf).reshape(x.shape)


@register
@dataclass(frozen=True)
class Fp8Codec(BlockFloat):
    """8-bit floats, an fp32 scale per block. ``format``: e4m3 (NMSE 7e-4 on Gaussian values) or e5m2 (2.8e-3).

    block: a multiple of 32 from 32 to 65536. int8 has 17 times less error on values of one size; fp8 keeps relative
    precision where sizes differ within a block.
    """

    format: str = "e4m3"
    block: int = 128

    name: ClassVar[str] = "fp8"
    scaling: ClassVar[reference.Scaling] = "fp32"

    def __post_init__(self) -> None:
        _check_format(self.name, self.format)
        check_block(self.name, self.block)

    @property
    def element(self) -> Minifloat:
        return _FP8[self.format]

    @property
    def values_per_scale(self) -> int:
        return self.block


@register
@dataclass(frozen=True)
class E3m0Codec(BlockFloat):
    """4 bits: a sign and 0 or one of seven powers of two, an fp32 scale per block (block as in ``fp8``).

    The wire type of Streaming DiLoCo's outer gradients. For values whose sizes differ widely.
    """

    block: int = 128

    name: ClassVar[str] = "e3m0"
    scaling: ClassVar[reference.Scaling] = "fp32"

    def __post_init__(self) -> None:
        check_block(self.name, self.block)

    @property
    def element(self) -> Minifloat:
        return E3M0

    @property
    def values_per_scale(self) -> int:
        return self.block


@register
@dataclass(frozen=True)
class Mxfp8Codec(BlockFloat):
    """MXFP8: 8-bit floats (``format``: e4m3 or e5m2), a power of two for each 32 values; 8.25 bits a value."""

    format: str = "e4m3"

    name: ClassVar[str] = "mxfp8"
    scaling: ClassVar[reference.Scaling] = "e8m0"

    def __post_init__(self) -> None:
        _check_format(self.name, self.format)

    @property
    def element(self) -> Minifloat:
        return _FP8[self.format]

    @property
    def values_per_scale(self) -> int:
        return 32


@register
@dataclass(frozen=True)
class Mxfp4Codec(BlockFloat):
    """MXFP4: 4-bit floats (e2m1), a power of two for each 32 values; 4.25 bits a value."""

    name: ClassVar[str] = "mxfp4"
    scaling: ClassVar[reference.Scaling] = "e8m0"

    @property
    def element(self) -> Minifloat:
        return E2M1

    @property
    def values_per_scale(self) -> int:
        return 32


@register
@dataclass(frozen=True)
class Nvfp4Codec(BlockFloat):
    """NVFP4-style: 4-bit floats (e2m1), an e4m3 scale for each 16 values, an fp32 scale for each 1024; 4.53 bits.

    NVIDIA's format has one fp32 scale per tensor; here each group has its own, so that a message may be cut.
    """

    name: ClassVar[str] = "nvfp4"
    scaling: ClassVar[reference.Scaling] = "two-level"

    @property
    def element(self) -> Minifloat:
        return E2M1

    @property
    def values_per_scale(self) -> int:
        return 16


def _check_format(name: str, found: str) -> None:
    if found not in _FP8:
        raise SpecError(f"{name}: format is 'e4m3' or 'e5m2', found {found!r}; {nearest(found, _FP8)}")

"""``zfp``: fixed-rate ZFP on a line of values. Payload: bit fields of one size per 4 values, see reference_zfp.

Byte for byte ``zfpy.compress_numpy(x, rate=rate, write_header=False)`` of the fp32 or fp64 values, both ways, where
every block is finite and is zero or has max|x| >= 2^-96, of fp64 2^-962. Beyond that the C library turns NaN and Inf into
numbers and loses tiny blocks; here they travel (normative: docs/wire-format.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from . import reference_zfp as reference
from .base import FLOAT_DTYPES, CompiledCodec
from .cast import convert
from .cpu import zfp as kernels
from .cpu import zfp_double as kernels_double
from .registry import register

_MOST = {torch.float64: 64, **dict.fromkeys(FLOAT_DTYPES, 32)}
"""By dtype: the highest rate, the bits of the integers that a block is coded in."""
_CHUNK = 1 << 14  # values of a 16-bit message that are widened at a time: they stay in the cache


@register
@dataclass(frozen=True)
class ZfpCodec(CompiledCodec):
    """``rate`` bits per value: 3 to 32 for fp32, fp16 and bf16 (widened to fp32 exactly), 3 to 64 for fp64.

    The values of a block of 4 share an exponent: the error is relative to the block's largest value, and
    truncation biases it. Made for smooth data: on Gaussian values relative L2 error is 5.5 % at rate 8, 0.34 %
    at 12, but 97 % at 4; 16-bit dtypes have the same. So 16-bit messages take rate 8 (half) or 12 (a quarter less).

    Inf and NaN come back at their places; the finite values of their block decode to 0. Other blocks are not
    touched. Finite values stay finite: what truncation would push beyond the dtype's maximum decodes to it.
    Errors are relative to the block at any magnitude down to 2^-126 (fp64: 2^-1022), below which the exponent stays
    there. fp64 has no CUDA kernel.

    Source: P. Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays", IEEE TVCG 20(12), 2014.
    """

    rate: int

    name: ClassVar[str] = "zfp"
    cuda_kernels: ClassVar[str | None] = "zfp"
    cuda_dtypes: ClassVar[frozenset[torch.dtype]] = FLOAT_DTYPES
    lossless: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 3 <= self.rate <= max(_MOST.values()):
            raise SpecError(
                f"zfp: rate is bits per value, 3 to 64 for float64, 3 to 32 for others, found {self.rate}"
            )

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Those whose integers have as many bits as ``rate``."""
        return frozenset(dtype for dtype, most in _MOST.items() if self.rate <= most)

    def dtype_message(self, dtype: torch.dtype) -> str:
        message = super().dtype_message(dtype)
        return (
            f"{message}, whose rate is at most {_MOST[dtype]} bits per value" if dtype in _MOST else message
        )

    @property
    def _budget(self) -> int:
        return reference.block_bits(self.rate)

    @property
    def granule(self) -> int:
        """Blocks that fill whole 64-bit words."""
        return 4 * 64 // math.gcd(self._budget, 64)

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return reference.payload_nbytes(numel, self.rate)

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        nbytes = self.max_nbytes(x.numel(), x.dtype)
        if not nbytes:
            return 0
        if x.is_cuda:
            self._on_cuda().encode(x, out[:nbytes], self._budget)
            return nbytes
        words = _words(out[:nbytes])
        for values, part in self._chunks(x, words):
            if x.dtype == torch.float64:
                kernels_double.encode(values.numpy(), self._budget, part)
            else:
                kernels.encode(values.float().numpy(), self._budget, part)
        if words.ctypes.data != out.data_ptr():
            out[:nbytes].copy_(torch.from_numpy(words.view(np.uint8)))
        return nbytes

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        limit = torch.finfo(out.dtype).max
        if not out.numel():
            return
        if out.is_cuda:
            self._on_cuda().decode(payload, out, self._budget)
            return
        if out.dtype == torch.float64:
            kernels_double.decode(_words(payload), self._budget, limit, out.numpy())
            return
        for values, part in self._chunks(out, _words(payload)):
            wide = values if out.dtype == torch.float32 else torch.empty(values.numel())
            kernels.decode(part, self._budget, limit, False, wide.numpy())
            if wide is not values:
                convert(
                    wide, values
                )  # torch's own cast differs in the bits of NaN between a vector's body and its tail

    def _decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        if out.is_cuda and out.numel():
            self._on_cuda().decode_add(payload, out, dtype, self._budget)
        elif dtype == torch.float32 and out.numel():
            kernels.decode(_words(payload), self._budget, torch.finfo(dtype).max, True, out.numpy())
        else:
            super()._decode_add(payload, out, dtype)

    def _chunks(self, x: Tensor, words: Any) -> Iterator[tuple[Tensor, Any]]:
        """Parts of x and their words: all of an fp32 or fp64 tensor, cache-sized parts of a 16-bit one."""
        size = _CHUNK if x.dtype.itemsize == 2 else x.numel()  # a multiple of every granule
        for start in range(0, x.numel(), size):
            yield x[start : start + size], words[start // 4 * self._budget // 64 :]

    def error_bound(self, x: Tensor) -> Tensor:
        """Bound of |decoded - x|, from the bit planes that the budget carries; inf where x is not finite.

        Integers have W = 32 bits, 64 for fp64. Let s = 2^(emax-W+2) be the unit of a block's, P the number of its bit
        planes, from the top, that fit into the budget as a whole. Coefficients differ only in the W-P planes below, so
        each by less than D = 2^(W-P). The inverse transform is linear but for its shifts, with rows

            1/4 * (4, 6, -4, -1), (4, 2, 4, 5), (4, -2, 4, -5), (4, -6, -4, 1)

        whose absolute sums are 15/4. Of the shifts, the forward ones lose at most 3 units, the inverse ones
        2 more, and truncation to integers 1: |error| <= s * (15/4 * D + 6), if 15/4 * D + 6 <= 2^(W-2), so that no
        integer wraps (|x| < 2^(W-2) s). An integer is at most 2^(W-1), so |error| <= |x| + 2^(W-1) s always.

        Decoded values are rounded: integers of 32 bits are float64 exactly, so those once to fp32, and once more to a
        16-bit dtype; those of 64 bits once as integers, to 53 bits, and once as values, which only subnormals feel.
        Every operation on bounds is in float64, too: fewer than 8, each up to one part in 2^53 or a step of subnormals
        off, so the sum is raised by 2^-50 and by 8 steps.
        """
        wide = x.detach().reshape(-1)
        flat = (wide if wide.dtype == torch.float64 else wide.float()).numpy()
        if not flat.size:
            return torch.zeros(x.shape, dtype=torch.float64)
        blocks: Any = reference.split(flat)
        bits = reference.precision(blocks.dtype).bits
        finite = np.isfinite(blocks)
        whole = finite.all(1)
        magnitude = np.abs(blocks.astype(np.float64))
        magnitude[~finite] = 0
        coded = whole & (magnitude.max(1) > 0)
        emax, u = reference.coefficients(np.where(coded[:, None], blocks, blocks.dtype.type(1)))
        units = 3.75 * np.ldexp(1.0, bits - _whole_planes(u, self._budget))[:, None] + 6
        unit = (emax - (bits - 2))[:, None]  # its exponent: the unit itself may be below fp64
        with np.errstate(over="ignore"):  # an infinite bound is one
            anyway = magnitude + np.ldexp(2.0 ** (bits - 1), unit)
            bound = np.minimum(np.where(units <= 2.0 ** (bits - 2), np.ldexp(units, unit), np.inf), anyway)
            for digits, smallest in {_precision(torch.from_numpy(flat).dtype), _precision(x.dtype)}:
                bound = bound + (magnitude + bound) * 2.0**-digits + smallest / 2
            bound = bound * (1 + 2.0**-50) + 8 * 2.0**-1074
        bound = np.where(coded[:, None], bound, magnitude)
        bound[~finite] = np.inf
        return torch.from_numpy(bound.reshape(-1)[: flat.size]).reshape(x.shape)


def _whole_planes(u: Any, budget: int) -> Any:
    """Bit planes of the coefficients, unsigned (b, 4), that fit into a block from the top: (b,) of 0 to 32, or 64."""
    steps = [reference.plane_code(n, plane) for n in range(5) for plane in range(16)]
    lengths = np.array([len(code) for code, _ in steps])
    after = np.array([n for _, n in steps])
    p = reference.SINGLE if u.dtype == np.uint32 else reference.DOUBLE
    used = np.full(len(u), p.header)
    significant = np.zeros(len(u), np.int64)
    planes = np.zeros(len(u), np.int64)
    for k in range(p.bits - 1, -1, -1):
        plane = (u >> u.dtype.type(k) & u.dtype.type(1)).astype(np.int64) @ np.array([1, 2, 4, 8])
        step = 16 * significant + plane
        used += lengths[step]
        significant = after[step]
        planes += used <= budget
    return planes


def _precision(dtype: torch.dtype) -> tuple[int, float]:
    """Bits of the significand, the hidden one included, and the smallest subnormal."""
    info = torch.finfo(dtype)
    return 1 - round(math.log2(info.eps)), info.smallest_normal * info.eps


def _words(payload: Tensor) -> Any:
    """The bytes as uint64; a copy if they do not start at a multiple of 8."""
    data = payload.numpy()
    return (data if payload.data_ptr() % 8 == 0 else data.copy()).view(np.uint64)

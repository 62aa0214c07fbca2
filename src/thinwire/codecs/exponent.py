"""``exponent``: lossless. Signs and mantissas as they are, exponents in a Huffman code; see reference_exponent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import WireError
from . import reference_exponent as reference
from .base import CompiledCodec
from .cpu import exponent as kernels
from .registry import register


@register
@dataclass(frozen=True)
class ExponentCodec(CompiledCodec):
    """Every bit of fp32, fp16 or bf16 values; the exponents of neural networks' tensors take 2 to 3 bits of their 8.

    On Gaussian values the payload is 1/1.51 of the raw size for bf16, 1/1.18 for fp16, 1/1.20 for fp32; fp32 values
    that are 16-bit ones in disguise (all low mantissa bits zero) take the size of those. Never more than the raw
    size and 4 bytes. Two passes over the values: the code is made for each message and travels with it.

    Source: canonical Huffman codes of at most 12 bits, in blocks that decode independently; docs/wire-format.md.
    """

    name: ClassVar[str] = "exponent"
    cuda_kernels: ClassVar[str | None] = "exponent"
    lossless: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = False

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return reference.HEADER_NBYTES + numel * dtype.itemsize

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        if x.is_cuda:
            return int(self._on_cuda().encode(x, out, _mantissa_bits(x.dtype)))
        return int(kernels.encode(_bits(x), _mantissa_bits(x.dtype), out.numpy()))

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        numel, mantissa_bits = out.numel(), _mantissa_bits(out.dtype)
        head = payload[: reference.head_nbytes(numel)].cpu().numpy() if out.is_cuda else payload.numpy()
        error = _ERRORS[kernels.check(head, payload.numel(), numel, mantissa_bits, out.dtype.itemsize)]
        if error is not None:
            raise WireError(f"{self}: payload of {numel} values in {payload.numel()} bytes: {error}")
        if out.is_cuda:
            self._on_cuda().decode(payload, head, out, mantissa_bits)
        else:
            kernels.decode(payload.numpy(), _bits(out), mantissa_bits)


_ERRORS = (
    None,
    "too short for what it announces",
    "longer or shorter than what it announces",
    "unknown mode or flags",
    "code lengths that are no prefix code of at most 12 bits",
    "a block that is larger than any code can make it",
)


def _mantissa_bits(dtype: torch.dtype) -> int:
    return {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[dtype]


def _bits(x: Tensor) -> Any:
    return x.numpy().view(np.uint32) if x.dtype == torch.float32 else x.view(torch.uint16).numpy()

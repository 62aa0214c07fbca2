"""What codecs of fixed size with numba kernels share: handing their tensors to the kernels, and the bounds' last step."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from .base import CompiledCodec


class KernelCodec(CompiledCodec):
    """A codec of fixed size whose ``kernels`` module has, with the codec's ``_parameters`` at the end of each,

    ``encode(bits, half, payload, ...)``, ``decode(payload, values, half, ...)`` and
    ``decode_add(payload, out, half, narrow, ...)``. half: fp16 and not bf16; narrow: a 16-bit dtype. A module of
    ``codecs.cuda`` has ``decode(payload, out, ...)`` and ``decode_add(payload, out, dtype, ...)``.
    """

    fixed_size: ClassVar[bool] = True
    kernels: ClassVar[ModuleType]

    @property
    def _parameters(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        size = self.max_nbytes(x.numel(), x.dtype)
        self.kernels.encode(bits_of(x), x.dtype == torch.float16, out[:size].numpy(), *self._parameters)
        return size

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        if out.is_cuda:
            self._on_cuda().decode(payload, out, *map(int, self._parameters))
            return
        values = out.numpy() if out.dtype == torch.float32 else bits_of(out)
        self.kernels.decode(payload.numpy(), values, out.dtype == torch.float16, *self._parameters)

    def _decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        if out.is_cuda:
            self._on_cuda().decode_add(payload, out, dtype, *map(int, self._parameters))
            return
        half, narrow = dtype == torch.float16, dtype != torch.float32
        self.kernels.decode_add(payload.numpy(), out.numpy(), half, narrow, *self._parameters)


def bits_of(x: Tensor) -> Any:
    """The values' bits as a flat numpy array: int32 for fp32, uint16 for 16-bit dtypes."""
    return x.numpy().view(np.int32) if x.dtype == torch.float32 else x.view(torch.uint16).numpy()


def check_block(name: str, block: int) -> None:
    """Raise SpecError unless ``block`` is one that codecs with a scale per block take."""
    if not 32 <= block <= 65536 or block % 32:
        raise SpecError(f"{name}: block must be a multiple of 32 from 32 to 65536, found {block}")


def with_rounding(bound: Tensor, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """A bound of fp32 values, and what rounding them to ``dtype`` adds at magnitudes up to ``magnitude``."""
    if dtype == torch.float32:
        return bound
    info = torch.finfo(dtype)
    return bound + info.eps / 2 * magnitude + info.smallest_normal * info.eps / 2

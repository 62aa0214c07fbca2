"""``none``: the values as they are, little-endian. Payload: numel * itemsize bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import FLOAT_DTYPES, Codec, add
from .registry import register


@register
@dataclass(frozen=True)
class NoneCodec(Codec):
    """No compression: every bit, every float dtype."""

    name: ClassVar[str] = "none"
    lossless: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[torch.dtype]] = FLOAT_DTYPES | {torch.float64}

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        nbytes = x.numel() * x.element_size()
        out[:nbytes].copy_(x.view(torch.uint8))
        return nbytes

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        out.view(torch.uint8).copy_(payload)

    def _decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        add(payload, dtype, out)

"""What tests of codecs do all the time: encode, decode, compare bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codecs import Codec
from ..codecs.state import CodecState

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a value -> the integer dtype that shows its bits."""


def magnitudes(dtype: torch.dtype) -> int:
    """The powers of ten up and down to which values of this dtype are tried: 30, for fp64 300."""
    return 300 if dtype == torch.float64 else 30


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit, NaN payloads and signed zeros included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = INTEGERS.get(a.element_size(), torch.uint8)
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def encode(codec: Codec, x: Tensor, seed: int = 0, state: CodecState | None = None) -> Tensor:
    """The payload of x, from a buffer of exactly the size that the codec asks for."""
    out = torch.empty(codec.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    return out[: codec.encode(x, out, seed=seed, state=state)]


def decode(codec: Codec, payload: Tensor, like: Tensor, state: CodecState | None = None) -> Tensor:
    """The values of a payload, of the shape and dtype of ``like``."""
    out = torch.empty(like.shape, dtype=like.dtype)
    codec.decode(payload, out, state=state)
    return out

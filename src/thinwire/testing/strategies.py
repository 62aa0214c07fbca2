"""Hypothesis strategies for the inputs of codecs. They need the package ``hypothesis``; nothing else here does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..codecs import Codec
from .coding import magnitudes

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def float_tensors(dtype: torch.dtype, max_numel: int = 600, *, finite: bool = True) -> SearchStrategy[Tensor]:
    """Flat tensors of one dtype: any bit patterns (``finite`` or not), or normal values of one magnitude."""
    from hypothesis import strategies as st

    size, reach = dtype.itemsize, magnitudes(dtype)

    def from_bits(data: bytes) -> Tensor:
        if len(data) < size:
            return torch.empty(0, dtype=dtype)
        x = torch.frombuffer(bytearray(data[: len(data) // size * size]), dtype=torch.uint8).view(dtype)
        return torch.where(torch.isfinite(x), x, torch.zeros_like(x)) if finite else x

    def normal(seed: int, numel: int, exponent: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        largest = torch.finfo(dtype).max
        x = torch.randn(numel, generator=rng, dtype=torch.float64) * 10.0**exponent
        return x.clamp(-largest, largest).to(dtype)

    return st.one_of(
        st.binary(max_size=size * min(max_numel, 64)).map(from_bits),
        st.builds(normal, st.integers(0, 2**32), st.integers(0, max_numel), st.integers(-reach, reach)),
    )


def codec_inputs(codec: Codec, max_numel: int = 600, *, finite: bool = True) -> SearchStrategy[Tensor]:
    """Tensors that ``codec`` takes: each of its dtypes, from :func:`float_tensors`."""
    from hypothesis import strategies as st

    dtypes = st.sampled_from(sorted(codec.dtypes, key=str))
    return dtypes.flatmap(lambda dtype: float_tensors(dtype, max_numel, finite=finite))

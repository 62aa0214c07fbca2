"""The Triton kernels of zfp in Triton's interpreter: the bytes and values of the CPU kernels. Not proof for a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from thinwire.codecs import ZfpCodec
from thinwire.testing import decode, encode, same_bits

kernels: Any = pytest.importorskip("thinwire.codecs.cuda.zfp")


def message(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Blocks of every kind: usual, mixed magnitudes, subnormal, zeros, the largest values, not finite."""
    rng = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=rng, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-44, 38, (-(-n // 8),), generator=rng).double().repeat_interleave(8)[:n]
    largest = torch.finfo(dtype).max
    x = x.clamp(-largest, largest).to(dtype)
    x[8:16] = torch.linspace(-1, 1, 8).to(dtype)[: max(0, min(8, n - 8))]
    x[16:20] = 0
    x[20:24] = largest
    x[25::40] = torch.nan
    x[42::40] = -torch.inf
    return x


@pytest.mark.parametrize(
    ("rate", "dtype"),
    [(rate, torch.float32) for rate in (3, 8, 31)] + [(8, torch.float16), (12, torch.bfloat16)],
    ids=str,
)
def test_bytes_values_and_sums(rate: int, dtype: torch.dtype) -> None:
    codec = ZfpCodec(rate)
    for n in (3, 501):
        x = message(dtype, n)
        payload = torch.full((codec.max_nbytes(n, dtype),), 0xAA, dtype=torch.uint8)
        kernels.encode(x, payload, codec._budget)
        assert torch.equal(payload, encode(codec, x))
        y = torch.empty_like(x)
        kernels.decode(payload, y, codec._budget)
        assert same_bits(y, decode(codec, payload, x))
        total, expected = torch.linspace(-1, 1, n), torch.linspace(-1, 1, n)
        kernels.decode_add(payload, total, dtype, codec._budget)
        codec.decode_add(payload, expected, dtype)
        assert same_bits(total.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("rate", [3, 8, 27])
def test_any_payload_decodes_alike(rate: int) -> None:
    codec, n = ZfpCodec(rate), 1000
    data = np.random.default_rng(rate).integers(0, 256, codec.max_nbytes(n, torch.float32), np.uint8)
    payload, y = torch.from_numpy(data), torch.empty(n)
    kernels.decode(payload, y, codec._budget)
    assert same_bits(y, decode(codec, payload, y))


def test_any_alignment() -> None:
    codec, x = ZfpCodec(8), message(torch.float32, 99)
    room = torch.zeros(codec.max_nbytes(99, x.dtype) + 3, dtype=torch.uint8)
    kernels.encode(x, room[3:], codec._budget)
    assert torch.equal(room[3:], encode(codec, x))

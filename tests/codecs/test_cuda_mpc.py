"""The Triton kernels of mpc in Triton's interpreter: the bytes and values of the CPU kernels. Not proof for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.codecs import MpcCodec
from thinwire.testing import encode, same_bits

kernels: Any = pytest.importorskip("thinwire.codecs.cuda.mpc")


def message(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Runs of one value, of zeros and of any bits."""
    size = torch.int32 if dtype == torch.float32 else torch.int16
    high = 1 << (8 * dtype.itemsize - 1)
    bits = torch.randint(-high, high, (n,), generator=torch.Generator().manual_seed(n)).to(size)
    x = bits.view(dtype).clone()
    x[n // 5 : n // 3] = 0
    x[n // 2 : n * 3 // 4] = 0.3
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "n"), [(1, 2500), (1, 1), (3, 1100), (5, 31), (32, 2048), (1, 0), (7, 1025)])
def test_bytes_and_values(dim: int, n: int, dtype: torch.dtype) -> None:
    codec, x = MpcCodec(dim), message(dtype, n)
    payload = torch.full((codec.max_nbytes(n, dtype),), 0xAA, dtype=torch.uint8)
    size = kernels.encode(x, payload, dim)
    assert torch.equal(payload[:size], encode(codec, x))
    words, nonzero, counted = kernels.header(payload[:size], -(-x.nbytes // 4))
    assert words == -(-x.nbytes // 4)
    assert nonzero == counted
    y = torch.empty_like(x)
    kernels.decode(payload[:size], y, dim)
    assert same_bits(x, y)


def test_bits_beyond_the_last_word_are_seen() -> None:
    payload = encode(MpcCodec(1), torch.ones(40))
    payload[8 + 4 + 1] |= 1  # word 40 of 40
    assert kernels.header(payload, 40)[2] == -1


def test_any_alignment() -> None:
    x = message(torch.bfloat16, 101)[1:]
    room = torch.zeros(MpcCodec(1).max_nbytes(100, x.dtype) + 1, dtype=torch.uint8)
    size = kernels.encode(x, room[1:], 1)
    assert torch.equal(room[1 : 1 + size], encode(MpcCodec(1), x))
    target = torch.zeros(101, dtype=torch.bfloat16)
    kernels.decode(room[1 : 1 + size], target[1:], 1)
    assert same_bits(target[1:], x)

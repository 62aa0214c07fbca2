"""The Triton kernels of exponent in Triton's interpreter: the bytes and values of the CPU kernels. Not proof for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.codecs import ExponentCodec
from thinwire.codecs.reference_exponent import head_nbytes
from thinwire.testing import encode, same_bits

kernels: Any = pytest.importorskip("thinwire.codecs.cuda.exponent")

CODEC = ExponentCodec()
MANTISSAS = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


def message(dtype: torch.dtype, n: int) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    x[n // 3 :: 97] = torch.nan
    x[n // 2 :: 89] = -0.0
    return x


def check(x: torch.Tensor) -> None:
    room = torch.full((CODEC.max_nbytes(x.numel(), x.dtype) + 1,), 0xAA, dtype=torch.uint8)[1:]
    size = kernels.encode(x, room, MANTISSAS[x.dtype])
    assert torch.equal(room[:size], encode(CODEC, x))
    y = torch.empty_like(x)
    kernels.decode(room[:size], room[: head_nbytes(x.numel())].numpy(), y, MANTISSAS[x.dtype])
    assert same_bits(x, y)


@pytest.mark.parametrize(
    ("dtype", "n"), [(torch.float32, 400), (torch.float16, 800), (torch.bfloat16, 1100)], ids=str
)
def test_bytes_and_values(dtype: torch.dtype, n: int) -> None:
    check(message(dtype, n))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_upcast_values(dtype: torch.dtype) -> None:
    check(message(dtype, 400).float())


@pytest.mark.parametrize("n", [0, 1, 100])
def test_messages_that_go_as_they_are(n: int) -> None:
    check(message(torch.bfloat16, n))

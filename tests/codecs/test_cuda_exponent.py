"""The Triton kernels of exponent in Triton's interpreter: the bytes and values of the CPU kernels. Not proof for a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
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
    size = kernels.encode(x, room, MANTISSAS[x.dtype], False, no_codebook())
    assert torch.equal(room[:size], encode(CODEC, x))
    y = torch.empty_like(x)
    head = room[: head_nbytes(x.numel())].numpy()
    kernels.decode(room[:size], head, y, MANTISSAS[x.dtype], no_codebook())
    assert same_bits(x, y)


def no_codebook() -> Any:
    return np.zeros(256, np.int64)


def test_a_codebook_serves_again() -> None:
    first, later = message(torch.bfloat16, 300), message(torch.bfloat16, 400)
    room = torch.zeros(CODEC.max_nbytes(400, torch.bfloat16), dtype=torch.uint8)
    state = CODEC.new_state()
    assert state is not None
    book = no_codebook()
    size = kernels.encode(first, room, 7, True, book)
    assert torch.equal(room[:size], encode(CODEC, first, state=state))
    size = kernels.encode_again(later, room, 7, 0, book, state.id)
    assert torch.equal(room[:size], encode(CODEC, later, state=state))
    y = torch.empty_like(later)
    kernels.decode(room[:size], room[: head_nbytes(400)].numpy(), y, 7, book)
    assert same_bits(later, y)
    assert kernels.encode_again(later * 2.0**40, room, 7, 0, book, state.id) == -1
    assert kernels.encode_again(later.float() + 2.0**-20, room, 23, 16, book, state.id) == -1


@pytest.mark.parametrize(
    ("dtype", "n"), [(torch.float32, 200), (torch.float16, 300), (torch.bfloat16, 1100)], ids=str
)
def test_bytes_and_values(dtype: torch.dtype, n: int) -> None:
    check(message(dtype, n))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_upcast_values(dtype: torch.dtype) -> None:
    check(message(dtype, 200).float())


@pytest.mark.parametrize("n", [0, 1, 100])
def test_messages_that_go_as_they_are(n: int) -> None:
    check(message(torch.bfloat16, n))

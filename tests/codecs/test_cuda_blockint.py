"""The Triton kernels of the block integers in Triton's interpreter: the bytes and values of the CPU kernels.

That is not proof for a GPU; ``bench/gpu`` is. The interpreter takes milliseconds per operation, so messages are short.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.codecs import parse
from thinwire.codecs.blockint import BlockInt
from thinwire.testing import decode, encode, same_bits

kernels: Any = pytest.importorskip("thinwire.codecs.cuda.blockint")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CODECS = ("int8", "int6", "int5", "int4", "int3", "int2")


def message(dtype: torch.dtype, n: int, block: int) -> torch.Tensor:
    """Blocks of every kind: usual, tiny, huge, one-sided, zeros, ties, not finite."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    kinds = [x.new_tensor(v) for v in (1.0, 1e-38, 1e30, 1e-6, 0.0)]
    largest = torch.finfo(dtype).max
    for b, start in enumerate(range(0, n, block)):
        x[start : start + block] *= kinds[b % len(kinds)]
    x[block // 2 : block // 2 + 4] = x.new_tensor([0.5, -0.5, 1.5, 2.5])
    x = x.clamp(-largest, largest).to(dtype)
    x[2 * block :: 3 * block] = largest
    x[-1] = torch.nan
    x[block + 1] = -0.0
    return x


def codec_of(spec: str) -> BlockInt:
    codec = parse(spec)
    assert isinstance(codec, BlockInt)
    return codec


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec", [*CODECS, "int8:block=32", "int4:block=96,round=stochastic", "int5:round=stochastic"]
)
def test_bytes_values_and_sums(spec: str, dtype: torch.dtype) -> None:
    # horovod 2108
    codec, seed = codec_of(spec), 0xFEDC_BA98_7654_3210
    x = message(dtype, 1300, codec.block)
    payload = torch.full((codec.max_nbytes(x.numel(), dtype),), 0xAA, dtype=torch.uint8)
    kernels.encode(x, payload, None, codec.block, codec._q, codec.round == "stochastic", seed)
    assert torch.equal(payload, encode(codec, x, seed))
    y = torch.empty_like(x)
    kernels.decode(payload, y, codec.block, codec._q)
    assert same_bits(y, decode(codec, payload, x))
    total, expected = torch.linspace(-1, 1, x.numel()), torch.linspace(-1, 1, x.numel())
    kernels.decode_add(payload, total, dtype, codec.block, codec._q)
    codec.decode_add(payload, expected, dtype)
    assert same_bits(total.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("spec", ["int4", "int8:round=stochastic"])
def test_residual_in_place(spec: str) -> None:
    codec = codec_of(spec)
    x = message(torch.float32, 700, codec.block)
    expected = x.clone()
    codec.encode_residual(
        expected, torch.empty(codec.max_nbytes(700, x.dtype), dtype=torch.uint8), expected, seed=5
    )
    payload = torch.empty(codec.max_nbytes(700, x.dtype), dtype=torch.uint8)
    kernels.encode(x, payload, x, codec.block, codec._q, codec.round == "stochastic", 5)
    assert same_bits(x.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("n", [0, 1, 127, 128, 129])
def test_any_length(n: int) -> None:
    codec, x = codec_of("int3"), torch.linspace(-1, 1, n)
    payload = torch.empty(codec.max_nbytes(n, x.dtype), dtype=torch.uint8)
    kernels.encode(x, payload, None, codec.block, codec._q, False, 0)
    assert torch.equal(payload, encode(codec, x))
    y = torch.empty_like(x)
    kernels.decode(payload, y, codec.block, codec._q)
    assert same_bits(y, decode(codec, payload, x))

"""Chains: the transform against a matrix, what it buys, specs and their errors. Byte coders: test_coded.py."""

from __future__ import annotations

import pytest
import torch

from thinwire.codecs import ChainCodec, Hadamard, Int4Codec, parse
from thinwire.errors import SpecError
from thinwire.testing import decode, encode, same_bits


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def matrix(n: int) -> torch.Tensor:
    """Sylvester's: entry (i, j) is -1 to the number of ones that i and j have in common."""
    common = torch.arange(n)[:, None] & torch.arange(n)
    ones = sum((common >> bit & 1 for bit in range(n.bit_length())), torch.zeros_like(common))
    return 1.0 - 2.0 * (ones % 2)


@pytest.mark.parametrize("block", [32, 128, 4096])
def test_transform_is_the_matrix(block: int) -> None:
    x = normal(2 * block + 7)
    y = x.clone()
    Hadamard(block).forward(y)
    expected = (x[: 2 * block].double().reshape(2, block) @ matrix(block).double() / block).reshape(-1)
    torch.testing.assert_close(y[: 2 * block].double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(y[2 * block :], x[2 * block :])
    Hadamard(block).inverse(y)
    torch.testing.assert_close(y, x, rtol=0, atol=1e-5)


def test_payload_is_the_codecs_on_transformed_values() -> None:
    x = normal(1000)
    y = x.clone()
    Hadamard(64).forward(y)
    chain = parse("hadamard:block=64|int4")
    assert torch.equal(encode(chain, x), encode(Int4Codec(), y))
    decoded = decode(Int4Codec(), encode(Int4Codec(), y), y)
    Hadamard(64).inverse(decoded)
    assert same_bits(decode(chain, encode(chain, x), x), decoded)


def test_outliers_cost_less() -> None:
    """One large value in each block takes the integers' levels from all others; spread out, it does not."""
    x = normal(1 << 16)
    x[::128] *= 30
    errors = []
    for spec in ("int4", "hadamard|int4"):
        y = decode(parse(spec), encode(parse(spec), x), x)
        errors.append(((y - x).square().sum() / x.square().sum()).item())
    assert errors[1] < errors[0] / 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_values_stay_finite(dtype: torch.dtype) -> None:
    x = torch.full((256,), torch.finfo(dtype).max, dtype=dtype)
    x[::3] *= -1
    assert torch.isfinite(decode(parse("hadamard|int4"), encode(parse("hadamard|int4"), x), x)).all()


def test_specs() -> None:
    codec = parse("hadamard|int4:32")
    assert str(codec) == "hadamard:block=128|int4:block=32,round=nearest"
    assert codec == ChainCodec("hadamard:128|int4:block=32") == parse(str(codec))
    assert codec.fixed_size
    assert codec.granule == 128
    assert parse("hadamard:32|int8:block=96").granule == 96
    assert parse("hadamard|topk").needs_feedback
    assert not codec.needs_feedback
    assert not parse("hadamard|bounded:abs=1").fixed_size
    with pytest.raises(SpecError, match="CodedCodec"):
        ChainCodec("int4|huffman")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hadamrd|int4", r"position 0: unknown transform .* 'hadamrd'.*hadamard"),
        ("hadamard|int5x", r"position 9: unknown codec 'int5x'"),
        ("int4|int8", r"position 5: unknown byte coder .* 'int8'; known: huffman"),
        ("int4|hufman", r"position 5: unknown byte coder .* 'hufman'; did you mean 'huffman'"),
        ("int4|", r"position 5: unknown byte coder"),
        ("huffman", r"position 0: huffman codes the bytes of a codec; put one before it"),
        ("huffman|int4", r"position 0: huffman codes the bytes of a codec; put one before it"),
        ("hadamard|huffman", r"position 9: huffman codes the bytes of a codec; put one before it"),
        ("int4|huffman|huffman", r"position 13: 'huffman' comes after huffman, which is the last"),
        ("int4|huffman|int8", r"position 13: 'int8' comes after huffman, which is the last"),
        ("hadamard|int4:blok=3|huffman", r"position 14: int4 has no parameter 'blok'"),
        ("int4|huffman:bits=3", r"position 13: huffman has no parameter 'bits'; huffman takes no parameters"),
        ("exponent|huffman", r"huffman codes the bytes of a lossy codec .*; exponent\S* is lossless"),
        ("hadamard|none|huffman", r"a lossy codec of fixed size; none is lossless"),
        ("bounded:abs=1|huffman", r"a lossy codec of fixed size; bounded\S* has no fixed size"),
        ("hadamard|int4:blok=3", r"position 14: int4 has no parameter 'blok'"),
        ("hadamard:block=48|int4", r"power of two from 32 to 4096, found 48"),
        ("hadamard|mpc:dim=1", r"ends in a lossy codec"),
        ("hadamard|", r"position 9: unknown codec ''"),
    ],
)
def test_wrong_specs(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse(spec)

"""``sign``: the kernel against the reference, layout, bound, error."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import SignCodec
from thinwire.codecs.reference_sign import sign_decode, sign_encode
from thinwire.errors import SpecError
from thinwire.testing import codec_inputs, decode, encode, same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bytes_and_values_are_the_references(data: st.DataObject) -> None:
    codec = SignCodec(data.draw(st.sampled_from([32, 96, 128, 2048])))
    x = data.draw(codec_inputs(codec, 3000, finite=False))
    payload = encode(codec, x)
    expected = sign_encode(x, codec.block)
    assert payload.numpy().tobytes() == expected
    assert same_bits(decode(codec, payload, x), sign_decode(expected, x.numel(), x.dtype, codec.block))


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(DTYPES), n=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_any_payload_decodes_as_the_reference_says(dtype: torch.dtype, n: int, seed: int) -> None:
    codec = SignCodec(32)
    data = np.random.default_rng(seed).integers(0, 256, codec.max_nbytes(n, dtype), np.uint8)
    found = decode(codec, torch.from_numpy(data), torch.empty(n, dtype=dtype))
    assert same_bits(found, sign_decode(data.tobytes(), n, dtype, codec.block))


def test_the_sign_of_a_nan_is_its_own() -> None:
    x = torch.tensor([0, 0, -768], dtype=torch.int16).view(torch.float16)  # 0xFD00
    assert encode(SignCodec(32), x).numpy().tobytes() == sign_encode(x, 32) == b"\0\0\xc0\x7f\4"


def test_layout() -> None:
    x = torch.ones(35)
    x[1], x[8], x[32], x[33] = -1.0, -1.0, -4.0, -0.0
    payload = encode(SignCodec(32), x).numpy().tobytes()
    mean = np.float32(np.float32(4 * (np.float32(1) / np.float32(3))) + np.float32(0)) + np.float32(
        1
    ) / np.float32(3)
    assert payload == struct.pack("<2f", 1.0, mean) + bytes([0b10, 0b1, 0, 0, 0b11])


@pytest.mark.parametrize("n", [0, 1, 32, 33, 1000])
def test_sizes(n: int) -> None:
    assert SignCodec(32).max_nbytes(n, torch.bfloat16) == 4 * math.ceil(n / 32) + math.ceil(n / 8)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_error_on_gaussian_values(scale: float) -> None:
    """1 - 2/pi of the energy is lost, and a little for the block's own mean."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * scale
    y = decode(SignCodec(), encode(SignCodec(), x), x)
    nmse = ((y.double() - x.double()).square().sum() / x.double().square().sum()).item()
    assert 1 - 2 / math.pi - 0.01 < nmse < 1 - 2 / math.pi + 0.01


def test_a_constant_magnitude_comes_back() -> None:
    x = torch.where(torch.arange(4096) % 3 == 0, -0.75, 0.75)
    assert torch.equal(decode(SignCodec(), encode(SignCodec(), x), x), x)


@pytest.mark.parametrize("block", [0, 31, 48, 1 << 17])
def test_wrong_block(block: int) -> None:
    with pytest.raises(SpecError, match="block must be a multiple of 32"):
        SignCodec(block)

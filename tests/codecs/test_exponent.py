"""exponent: kernels against the reference, ratios, values in disguise, the longest codes, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs import ExponentCodec
from thinwire.codecs import reference_exponent as reference
from thinwire.codecs import reference_huffman as huffman
from thinwire.errors import WireError
from thinwire.testing import codec_inputs, decode, encode, same_bits

CODEC = ExponentCodec()
MANTISSA = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


def words(x: Tensor) -> Any:
    if x.dtype == torch.float32:
        return x.view(torch.int32).numpy().view(np.uint32)
    return x.view(torch.uint16).numpy()


def check(x: Tensor) -> Tensor:
    """The payload, once it is the reference's and both decode it to x."""
    payload = encode(CODEC, x)
    found = words(x)
    assert payload.numpy().tobytes() == reference.encode(found, MANTISSA[x.dtype])
    assert same_bits(decode(CODEC, payload, x), x)
    back = reference.decode(payload.numpy().tobytes(), x.numel(), found.dtype, MANTISSA[x.dtype])
    assert back.tobytes() == found.tobytes()
    return payload


def normal(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_are_the_references(data: st.DataObject) -> None:
    x = data.draw(codec_inputs(CODEC, 1500, finite=False))
    check(x)
    check(x.repeat(1 + 4000 // max(x.numel(), 1))[:4000])


@pytest.mark.parametrize("dtype", MANTISSA)
@pytest.mark.parametrize("numel", [1023, 1024, 1025, 2047, 2050, 3073, 4095, 4096, 4097, 4103, 9001])
def test_blocks_end_anywhere(dtype: torch.dtype, numel: int) -> None:
    assert check(normal(numel, dtype))[0] == 1


@pytest.mark.parametrize(
    ("dtype", "ratio"), [(torch.bfloat16, 1.505), (torch.float16, 1.174), (torch.float32, 1.2)]
)
def test_ratio_on_gaussian_values(dtype: torch.dtype, ratio: float) -> None:
    x = normal(1 << 20, dtype)
    assert x.nbytes / encode(CODEC, x).numel() > ratio


@pytest.mark.parametrize(("dtype", "drop"), [(torch.bfloat16, 16), (torch.float16, 13)])
def test_fp32_values_that_were_16_bit_ones_take_their_size(dtype: torch.dtype, drop: int) -> None:
    x = normal(5000, dtype)
    payload = check(x.float())
    assert payload[1] == drop
    assert payload.numel() == encode(CODEC, x).numel()
    one = x.float()
    one[-1] = torch.nextafter(one[-1], torch.tensor(0.0))
    assert check(one)[1] == 0


@pytest.mark.parametrize("dtype", MANTISSA)
def test_noise_is_sent_as_it_is(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.integers(0, 256, 5000 * dtype.itemsize, np.uint8)).view(dtype)
    payload = check(x)
    assert payload[0] == 0
    assert payload.numel() == x.nbytes + 4


@pytest.mark.parametrize("dtype", MANTISSA)
def test_one_exponent(dtype: torch.dtype) -> None:
    assert check(torch.full((5000,), 0.75, dtype=dtype))[0] == 1
    assert check(torch.zeros(5000, dtype=dtype))[0] == 1


def test_codes_stay_within_their_limit() -> None:
    """Counts like Fibonacci's numbers give Huffman's algorithm a tree as deep as there are symbols."""
    counts = [1, 1]
    while len(counts) < 20:
        counts.append(counts[-1] + counts[-2])
    exponents = np.repeat(np.arange(100, 120), counts)
    lengths = huffman.code_lengths(np.bincount(exponents, minlength=256))
    assert lengths.max() == huffman.LIMIT
    assert sum(2.0 ** -int(d) for d in lengths if d) <= 1
    x = torch.from_numpy((exponents << 7 | np.arange(len(exponents)) % 128).astype(np.uint16)).view(
        torch.bfloat16
    )
    check(x[torch.randperm(len(x), generator=torch.Generator().manual_seed(2))])


def _damage(payload: Tensor, at: int, value: int) -> Tensor:
    damaged = payload.clone()
    damaged[at] = value
    return damaged


def test_refusals() -> None:
    x = normal(3000, torch.bfloat16)
    payload = encode(CODEC, x)
    sizes = reference.HEADER_NBYTES + huffman.LENGTHS_NBYTES
    for damaged, message in (
        (payload[:3], "too short"),
        (payload[: sizes + 6], "too short"),
        (payload[:-1], "longer or shorter"),
        (_damage(payload, 0, 2), "unknown mode"),
        (_damage(payload, 1, 16), "unknown mode or flags"),
        (_damage(payload, 2, 1), "unknown mode or flags"),
        (_damage(payload, 4, 0xDD), "no prefix code"),
        (_damage(payload, 4, 0x11), "no prefix code"),
        (_damage(payload, sizes + 1, 7), "larger than any code"),
        (_damage(payload, sizes, int(payload[sizes]) ^ 1), "longer or shorter"),
    ):
        out = torch.zeros_like(x)
        with pytest.raises(WireError, match=message):
            CODEC.decode(damaged.clone(), out)
        assert not out.any()
    raw = encode(CODEC, normal(10, torch.bfloat16))
    assert raw[0] == 0
    with pytest.raises(WireError, match="longer or shorter"):
        CODEC.decode(raw[:-1].clone(), torch.zeros(10, dtype=torch.bfloat16))

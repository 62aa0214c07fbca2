"""``topk``: the kernel against the reference, layout, which values are kept, damaged places."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import TopkCodec
from thinwire.codecs.reference_topk import topk_decode, topk_encode
from thinwire.errors import SpecError, WireError
from thinwire.testing import codec_inputs, decode, encode, same_bits

BLOCK = 4096


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def coded(codec: TopkCodec, x: torch.Tensor) -> torch.Tensor:
    return decode(codec, encode(codec, x), x)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bytes_and_values_are_the_references(data: st.DataObject) -> None:
    codec = TopkCodec(data.draw(st.sampled_from([1, 7, 64, 2048])), data.draw(st.integers(2, 8)))
    x = data.draw(codec_inputs(codec, 10_000, finite=False))
    payload = encode(codec, x)
    expected = topk_encode(x, codec.k, codec.bits)
    assert payload.numpy().tobytes() == expected
    assert same_bits(
        decode(codec, payload, x), topk_decode(expected, x.numel(), x.dtype, codec.k, codec.bits)
    )


@pytest.mark.parametrize("n", [BLOCK, 3 * BLOCK, 3 * BLOCK + 5, 50_000])
def test_the_largest_are_kept(n: int) -> None:
    codec, x = TopkCodec(64, 8), normal(n)
    y = coded(codec, x)
    for part, values in zip(x.split(BLOCK), y.split(BLOCK), strict=True):
        expected = part.abs().topk(min(64, part.numel())).indices
        assert set(values.nonzero()[:, 0].tolist()) == set(expected.tolist())
        assert torch.equal(values[expected].sign(), part[expected].sign())


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    x = torch.ones(BLOCK)
    x[5], x[7] = -2.0, 0.5
    y = coded(TopkCodec(4, 2), x)
    assert y.nonzero()[:, 0].tolist() == [0, 1, 2, 5]
    assert y[[0, 1, 2, 5]].tolist() == [1, 1, 1, -2]


def test_layout() -> None:
    x = torch.zeros(BLOCK + 3)
    x[0x123], x[0xFED], x[0xFFF] = 8.0, -1.0, 2.0
    x[BLOCK + 1] = -3.0
    payload = encode(TopkCodec(3, 4), x).numpy().tobytes()
    limits = struct.pack("<4f", 1.0, 8.0, 0.0, 3.0)
    # 0x123, 0xFED, 0xFFF, 0, 1, 2; then 7 of 7, 0 of 7 with a sign, 1 of 7; 0, 7 of 7 with a sign, 0.
    places = bytes([0x23, 0xD1, 0xFE, 0xFF, 0x0F, 0x00, 0x01, 0x20, 0x00])
    assert payload == limits + places + bytes([0x87, 0x01, 0x0F])


def test_sizes() -> None:
    codec = TopkCodec(64, 4)
    assert codec.max_nbytes(0, torch.float32) == 0
    assert codec.max_nbytes(BLOCK, torch.float32) == 8 + 96 + 32
    assert codec.max_nbytes(BLOCK + 1, torch.bfloat16) == 16 + 98 + 33
    assert 8 * codec.max_nbytes(1 << 20, torch.float32) / (1 << 20) < 0.27


def test_the_limits_come_back_exactly() -> None:
    x = normal(BLOCK)
    y = coded(TopkCodec(16, 2), x)
    kept = x.abs().topk(16).values
    assert set(y.abs()[y != 0].tolist()) == {kept[0].item(), kept[-1].item()}


def test_only_the_block_of_a_nan_is_nan() -> None:
    x = normal(3 * BLOCK)
    plain = coded(TopkCodec(), x)
    x[BLOCK + 9] = torch.inf
    y = coded(TopkCodec(), x)
    assert torch.isnan(y[BLOCK : 2 * BLOCK]).all()
    assert same_bits(y[:BLOCK], plain[:BLOCK])
    assert same_bits(y[2 * BLOCK :], plain[2 * BLOCK :])


@pytest.mark.parametrize("places", [(5, 5), (6, 5), (5, 4000)])
def test_places_that_cannot_be(places: tuple[int, int]) -> None:
    """Twice the same, falling, and outside of a short block: refused before anything is written."""
    x, codec = normal(100), TopkCodec(2, 4)
    payload = encode(codec, x)
    low, high = places
    payload[8:11] = torch.tensor([low & 0xFF, low >> 8 | (high & 0xF) << 4, high >> 4], dtype=torch.uint8)
    out = torch.full((100,), 7.0)
    with pytest.raises(WireError, match="places"):
        codec.decode(payload, out)
    with pytest.raises(WireError, match="places"):
        codec.decode_add(payload, out, torch.float32)
    assert (out == 7).all()


@pytest.mark.parametrize("kwargs", [{"k": 0}, {"k": 2049}, {"bits": 1}, {"bits": 9}])
def test_wrong_parameters(kwargs: dict[str, int]) -> None:
    with pytest.raises(SpecError, match="topk"):
        TopkCodec(**kwargs)

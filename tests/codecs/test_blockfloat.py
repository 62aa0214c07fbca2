"""The block floats: kernels against the reference, the formats' tables, layout, scales, bounds and errors."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import parse
from thinwire.codecs.blockfloat import BlockFloat
from thinwire.codecs.minifloat import E2M1, E3M0, E4M3, E5M2, Minifloat
from thinwire.codecs.reference_blockfloat import blockfloat_decode, blockfloat_encode
from thinwire.errors import SpecError
from thinwire.testing import codec_inputs, decode, encode, same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SPECS = (
    "fp8",
    "fp8:e5m2,block=32",
    "fp8:e4m3,block=2048",
    "e3m0",
    "e3m0:96",
    "mxfp8",
    "mxfp8:e5m2",
    "mxfp4",
    "nvfp4",
)


def codec_of(spec: str) -> BlockFloat:
    codec = parse(spec)
    assert isinstance(codec, BlockFloat)
    return codec


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coded(codec: BlockFloat, x: torch.Tensor) -> torch.Tensor:
    return decode(codec, encode(codec, x), x)


# --- formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("element", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)], ids=["e4m3", "e5m2"]
)
def test_tables_are_torchs(element: Minifloat, dtype: torch.dtype) -> None:
    codes = torch.arange(element.top + 1, dtype=torch.uint8)
    assert [element.value(c) for c in range(element.top + 1)] == codes.view(dtype).float().tolist()
    assert element.largest == torch.finfo(dtype).max


def test_small_tables() -> None:
    assert [E2M1.value(c) for c in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [E3M0.value(c) for c in range(8)] == [0, 0.25, 0.5, 1, 2, 4, 8, 16]
    assert (E2M1.width, E3M0.width, E4M3.width, E5M2.width) == (4, 4, 8, 8)


def test_mxfp8_rounds_as_torch_does() -> None:
    """Within a block of scale 1, codes are those of torch's own cast (which leaves nothing to clip here)."""
    x = torch.cat([torch.tensor([448.0]), normal(31)])
    for k in range(200):
        x[1:] = normal(31, seed=k) * 10.0 ** ((k % 9) - 5)
        x.clamp_(-448, 448)
        payload = encode(codec_of("mxfp8"), x)
        assert payload[0] == 127
        assert torch.equal(payload[1:], x.to(torch.float8_e4m3fn).view(torch.uint8))


# --- against the reference -------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_bytes_and_values_are_the_references(data: st.DataObject) -> None:
    codec = codec_of(data.draw(st.sampled_from(SPECS)))
    x = data.draw(codec_inputs(codec, 3000, finite=False))
    payload = encode(codec, x)
    what = (codec.element, codec.values_per_scale, codec.scaling)
    expected = blockfloat_encode(x, *what)
    assert payload.numpy().tobytes() == expected
    assert same_bits(decode(codec, payload, x), blockfloat_decode(expected, x.numel(), x.dtype, *what))


@settings(max_examples=150, deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    dtype=st.sampled_from(DTYPES),
    n=st.integers(1, 300),
    seed=st.integers(0, 2**32),
)
def test_any_payload_decodes_as_the_reference_says(spec: str, dtype: torch.dtype, n: int, seed: int) -> None:
    codec = codec_of(spec)
    data = np.random.default_rng(seed).integers(0, 256, codec.max_nbytes(n, dtype), np.uint8)
    found = decode(codec, torch.from_numpy(data), torch.empty(n, dtype=dtype))
    what = (codec.element, codec.values_per_scale, codec.scaling)
    assert same_bits(found, blockfloat_decode(data.tobytes(), n, dtype, *what))


# --- layout ----------------------------------------------------------------------------------------------------


def test_fp8_layout() -> None:
    x = torch.zeros(33)
    x[0], x[1], x[2], x[32] = 448.0, -1.0, 0.001, -896.0
    payload = encode(codec_of("fp8:block=32"), x).numpy().tobytes()
    assert payload == struct.pack("<2f", 1.0, 2.0) + bytes([0x7E, 0xB8, 0x01] + [0] * 29 + [0xFE])


def test_mxfp4_layout() -> None:
    x = torch.zeros(35)
    x[0], x[1], x[2], x[32], x[34] = 6.0, -0.5, 3.0, -12.5, 1.0
    payload = encode(codec_of("mxfp4"), x).numpy().tobytes()
    # 12.5 does not fit 6 * 2, so the second block has the scale 4: 12.5 / 4 rounds to 3, 1 / 4 to even, 0.
    assert payload == bytes([127, 129]) + bytes([0x97, 0x05] + [0] * 14 + [0x0D, 0x00])


def test_nvfp4_layout() -> None:
    x = torch.zeros(1040)
    x[0], x[16], x[1024] = 2688.0, 3.0, -1.0
    payload = encode(codec_of("nvfp4"), x).numpy().tobytes()
    assert payload[:8] == struct.pack("<2f", 1.0, np.float32(1) / np.float32(2688))
    assert payload[8:10] == bytes([0x7E, 0x30])  # 448 and 0.5
    assert payload[8 + 64] == 0x7E
    assert len(payload) == 8 + 65 + 520
    codes = payload[73:]
    assert (codes[0], codes[8], codes[512]) == (0x07, 0x07, 0x0F)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000, 1025])
def test_sizes(dtype: torch.dtype, n: int) -> None:
    assert codec_of("fp8:block=32").max_nbytes(n, dtype) == 4 * math.ceil(n / 32) + n
    assert codec_of("e3m0:block=32").max_nbytes(n, dtype) == 4 * math.ceil(n / 32) + math.ceil(n / 2)
    assert codec_of("mxfp8").max_nbytes(n, dtype) == math.ceil(n / 32) + n
    assert codec_of("mxfp4").max_nbytes(n, dtype) == math.ceil(n / 32) + math.ceil(n / 2)
    nvfp4 = 4 * math.ceil(n / 1024) + math.ceil(n / 16) + math.ceil(n / 2)
    assert codec_of("nvfp4").max_nbytes(n, dtype) == nvfp4


@pytest.mark.parametrize("spec", SPECS)
def test_splitting_at_granules_does_not_change_values(spec: str) -> None:
    codec = codec_of(spec)
    x = normal(codec.granule * 5 + 5) * torch.logspace(-3, 3, codec.granule * 5 + 5)
    parts = [coded(codec, part) for part in x.split(codec.granule * 2)]
    assert same_bits(torch.cat(parts), coded(codec, x))


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ("fp8", 7.2e-4),
        ("fp8:e5m2", 2.9e-3),
        ("mxfp8", 7.2e-4),
        ("mxfp8:e5m2", 2.9e-3),
        ("mxfp4", 1.45e-2),
        ("nvfp4", 9.5e-3),
        ("e3m0", 3.75e-2),
    ],
)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_error_on_gaussian_values(spec: str, limit: float, scale: float) -> None:
    """Normalised mean squared error; a million values put the sample's within 1 % of the expectation."""
    x = normal(1 << 20) * scale
    y = coded(codec_of(spec), x)
    nmse = ((y.double() - x.double()).square().sum() / x.double().square().sum()).item()
    assert nmse < limit


@pytest.mark.parametrize("spec", SPECS)
def test_bound_is_reached(spec: str) -> None:
    """The bound is not far above what happens: some error comes within 1 % of it."""
    codec, x = codec_of(spec), normal(1 << 16)
    ratio = (coded(codec, x).double() - x.double()).abs() / codec.error_bound(x)
    assert 0.99 < ratio.max() <= 1


@pytest.mark.parametrize("spec", ["mxfp8", "mxfp8:e5m2", "mxfp4"])
def test_powers_of_two_clip_nothing(spec: str) -> None:
    """The scale is the smallest that holds the block's largest value, and no smaller one would."""
    codec = codec_of(spec)
    for seed in range(20):
        x = normal(32, seed=seed) * 3.0**seed
        scale = 2.0 ** (int(encode(codec, x)[0]) - 127)
        assert codec.element.largest * scale / 2 < x.abs().max() <= codec.element.largest * scale


@pytest.mark.parametrize("spec", SPECS)
def test_finite_values_stay_finite_at_the_end_of_the_range(spec: str) -> None:
    codec = codec_of(spec)
    for dtype in DTYPES:
        largest = torch.finfo(dtype).max
        x = (torch.linspace(0.7, 1.0, 3200, dtype=torch.float64) * largest).to(dtype)
        x[::2] *= -1
        y = coded(codec, x)
        assert torch.isfinite(y).all()
        assert ((y.double() - x.double()).abs() <= codec.error_bound(x)).all()


@pytest.mark.parametrize("spec", ["fp8:block=32", "e3m0:32", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_blocks_are_nan_and_alone(spec: str, dtype: torch.dtype) -> None:
    codec, block = codec_of(spec), codec_of(spec).values_per_scale
    x = normal(70).to(dtype)
    plain, at = coded(codec, x), 33
    x[at] = -torch.inf
    y = coded(codec, x)
    inside = torch.arange(70) // block == at // block
    assert torch.isnan(y[inside]).all()
    if (
        codec.scaling == "two-level"
    ):  # the upper scale is that of the finite blocks, so only errors are promised
        assert ((y - x).abs()[~inside].double() <= codec.error_bound(x)[~inside]).all()
    else:
        assert same_bits(y[~inside], plain[~inside])


@pytest.mark.parametrize("spec", ["fp8:e4m2", "fp8:block=48", "fp8:block=16", "e3m0:block=0", "mxfp8:e3m4"])
def test_wrong_parameters(spec: str) -> None:
    with pytest.raises(SpecError, match=r"block must be|format is"):
        parse(spec)

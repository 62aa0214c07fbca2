"""The block integers: kernels against the reference, the layout, bounds, rounding and what it costs in error."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import Int2Codec, Int3Codec, Int4Codec, Int5Codec, Int6Codec, Int8Codec, parse
from thinwire.codecs.blockint import BlockInt
from thinwire.codecs.reference import blockint_decode, blockint_encode
from thinwire.errors import UnsupportedError
from thinwire.testing import codec_inputs, decode, encode, same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLASSES = (Int8Codec, Int6Codec, Int5Codec, Int4Codec, Int3Codec, Int2Codec)
FLT_MAX = torch.finfo(torch.float32).max


def coded(codec: BlockInt, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return decode(codec, encode(codec, x, seed), x)


def errors(codec: BlockInt, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return (coded(codec, x, seed).double() - x.double()).abs()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- against the reference ---------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_bytes_and_values_are_the_references(data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from(CLASSES))
    codec = cls(
        data.draw(st.sampled_from([32, 96, 128, 2048])), data.draw(st.sampled_from(["nearest", "stochastic"]))
    )
    x = data.draw(codec_inputs(codec, 3000, finite=False))
    seed = data.draw(st.integers(-(2**70), 2**70))
    payload = encode(codec, x, seed)
    stochastic = codec.round == "stochastic"
    expected = blockint_encode(x, codec.bits, codec.block, stochastic=stochastic, seed=seed)
    assert payload.numpy().tobytes() == expected
    values = blockint_decode(expected, x.numel(), x.dtype, codec.bits, codec.block)
    assert same_bits(decode(codec, payload, x), values)


@settings(max_examples=80, deadline=None)
@given(
    cls=st.sampled_from(CLASSES),
    dtype=st.sampled_from(DTYPES),
    n=st.integers(1, 300),
    seed=st.integers(0, 2**32),
)
def test_any_payload_decodes_as_the_reference_says(
    cls: type[BlockInt], dtype: torch.dtype, n: int, seed: int
) -> None:
    codec = cls(32)
    data = np.random.default_rng(seed).integers(0, 256, codec.max_nbytes(n, dtype), np.uint8)
    found = decode(codec, torch.from_numpy(data), torch.empty(n, dtype=dtype))
    assert same_bits(found, blockint_decode(data.tobytes(), n, dtype, codec.bits, codec.block))


# --- layout ------------------------------------------------------------------------------------------------


def test_int8_layout() -> None:
    x = torch.zeros(33)
    x[0], x[1], x[2], x[32] = -128.0, 127.0, 0.5, 2.0
    payload = encode(Int8Codec(32), x).numpy().tobytes()
    codes = [-128, 127, 0] + [0] * 29 + [-128]  # 0.5 steps round to even
    assert payload == struct.pack("<2f", 128.0, -2.0) + struct.pack("<33b", *codes)


def test_int4_layout() -> None:
    x = torch.zeros(35)
    x[0], x[1], x[2], x[3], x[32], x[33], x[34] = -8.0, 7.0, 1.0, -1.0, 1.0, -0.5, 0.25
    payload = encode(Int4Codec(32), x).numpy().tobytes()
    # Low nibble first; the last block is short, and its odd value stands alone in a byte.
    assert payload == struct.pack("<2f", 8.0, -1.0) + bytes([0x78, 0xF1] + [0] * 14 + [0x48, 0x0E])


def test_two_planes() -> None:
    """The low bits of all codes, then the high bits, the earliest value lowest in its byte."""
    x = torch.zeros(32)
    x[0], x[1], x[2], x[3] = -32.0, 31.0, 5.0, -1.0  # codes 100000, 011111, 000101, 111111
    payload = encode(Int6Codec(32), x).numpy().tobytes()
    assert payload == struct.pack("<f", 32.0) + bytes([0xF0, 0xF5] + [0] * 14) + bytes([0b11000110] + [0] * 7)
    x[0], x[1], x[2], x[3] = -4.0, 3.0, 1.0, -1.0  # codes 100, 011, 001, 111
    payload = encode(Int3Codec(32), x).numpy().tobytes()
    assert payload == struct.pack("<f", 4.0) + bytes([0b11011100] + [0] * 7) + bytes([0b1001] + [0] * 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1000])
def test_sizes(dtype: torch.dtype, n: int) -> None:
    assert Int8Codec(32).max_nbytes(n, dtype) == 4 * math.ceil(n / 32) + n
    assert Int4Codec(32).max_nbytes(n, dtype) == 4 * math.ceil(n / 32) + math.ceil(n / 2)
    assert Int5Codec(32).max_nbytes(n, dtype) == 4 * math.ceil(n / 32) + math.ceil(n / 2) + math.ceil(n / 8)
    assert Int2Codec(32).max_nbytes(n, dtype) == 4 * math.ceil(n / 32) + math.ceil(n / 4)


@pytest.mark.parametrize("cls", CLASSES)
def test_splitting_at_blocks_does_not_change_values(cls: type[BlockInt]) -> None:
    codec, x = cls(64), normal(64 * 9 + 5)
    parts = [coded(codec, part) for part in x.split(codec.granule * 2)]
    assert same_bits(torch.cat(parts), coded(codec, x))


# --- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ("int8", 4.2e-5),
        ("int6", 6.7e-4),
        ("int5", 2.75e-3),
        ("int4", 1.14e-2),
        ("int3", 5.5e-2),
        ("int2", 0.45),
    ],
)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_error_on_gaussian_values(spec: str, limit: float, scale: float) -> None:
    """Normalised mean squared error; a million values put the sample's within 1 % of the expectation."""
    x = normal(1 << 20) * scale
    y = coded(parse(spec), x)
    nmse = ((y.double() - x.double()).square().sum() / x.double().square().sum()).item()
    assert nmse < limit


@pytest.mark.parametrize("cls", CLASSES)
def test_bound_is_reached(cls: type[BlockInt]) -> None:
    """Values half-way between two codes are off by half a step, up to the rounding terms of the bound."""
    codec = cls(32)
    q = 1 << (codec.bits - 1)
    x = torch.arange(-q, q - 1).float() + 0.5
    x = torch.nn.functional.pad(x.reshape(-1, 1), (0, 31))
    x[:, 31] = -float(q)
    error, bound = errors(codec, x), codec.error_bound(x)
    assert (error[:, 0] == 0.5).all()
    assert (bound >= error).all()
    assert (bound[:, 0] <= 0.5 * (1 + 2.0**-12)).all()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_bound_where_the_scale_is_cut_at_the_largest_float(cls: type[BlockInt], rounding: str) -> None:
    codec = cls(32, rounding)
    x = torch.tensor([FLT_MAX, -FLT_MAX, FLT_MAX * 0.97, -FLT_MAX * 0.99, 1.0, 0.0] * 6)
    y = coded(codec, x)
    assert torch.isfinite(y).all()
    assert (errors(codec, x) <= codec.error_bound(x)).all()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_constants_and_the_largest_value_of_one_sign_come_back_exactly(
    cls: type[BlockInt], rounding: str, dtype: torch.dtype
) -> None:
    codec = cls(32, rounding)
    constants = (normal(300) * 10.0 ** torch.linspace(-44, 38, 300)).to(dtype)
    x = constants[torch.isfinite(constants)].reshape(-1, 1).repeat(1, 32)
    y = coded(codec, x, seed=11)
    # The sign of a zero is not kept.
    assert torch.equal(x, y)
    blocks = (normal(200, 32, seed=4).abs() * normal(200, 1, seed=5).sign()).to(dtype)
    largest = blocks.abs().argmax(1, keepdim=True)
    assert torch.equal(coded(codec, blocks).gather(1, largest), blocks.gather(1, largest))


@pytest.mark.parametrize("cls", CLASSES)
def test_two_opposite_values_come_back_within_an_ulp(cls: type[BlockInt]) -> None:
    a = normal(500).abs().reshape(-1, 1) + 1e-3
    x = torch.cat([a, -a], 1).repeat(1, 16)
    ulp = torch.from_numpy(np.spacing(x.abs().numpy()))
    assert ((coded(cls(32), x) - x).abs() <= ulp).all()


# --- non-finite values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 40, 69])
def test_a_block_with_a_non_finite_value_is_nan(
    cls: type[BlockInt], dtype: torch.dtype, value: float, at: int
) -> None:
    codec, x = cls(32), normal(70).to(dtype)
    plain = coded(codec, x)
    x[at] = value
    y = coded(codec, x)
    inside = torch.arange(70) // 32 == at // 32
    assert torch.isnan(y[inside]).all()
    assert same_bits(y[~inside], plain[~inside])
    assert torch.equal(torch.isinf(codec.error_bound(x)), inside)
    residual = torch.empty(70)
    codec.encode_residual(x.float(), torch.empty(codec.max_nbytes(70, dtype), dtype=torch.uint8), residual)
    assert torch.equal(torch.isnan(residual), inside)


# --- stochastic rounding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
def test_stochastic_rounding_is_unbiased(cls: type[BlockInt]) -> None:
    """The mean over T independent seeds has a standard error of at most step / (2 sqrt(T)) for every value."""
    codec, trials = cls(64, "stochastic"), 2000
    x = normal(512)
    mean = torch.stack([coded(codec, x, seed).double() for seed in range(trials)]).mean(0)
    step = errors_step(codec, x)
    z = (mean - x.double()) / (step / (2 * math.sqrt(trials)))
    # 512 values: one beyond 5 standard errors has probability 3e-4, a mean square over 1.35 less than 1e-6.
    assert z.abs().max() < 5
    assert z.square().mean() < 1.35
    assert abs(z.mean()) * math.sqrt(512) < 5


def errors_step(codec: BlockInt, x: torch.Tensor) -> torch.Tensor:
    """The step of each value's block."""
    scales = np.frombuffer(encode(codec, x).numpy().tobytes(), "<f4", x.numel() // codec.block)
    return torch.from_numpy(np.abs(scales)).double().repeat_interleave(codec.block) / (1 << (codec.bits - 1))


def test_random_numbers_differ_by_seed_block_and_lane() -> None:
    """Half a step rounds up with probability 1/2, whatever the seed, block or lane, and independently."""
    codec = Int8Codec(32, "stochastic")
    x = torch.full((256, 32), 0.5)
    x[:, 0] = -128.0
    ups = torch.stack([coded(codec, x, seed)[:, 1:] for seed in range(64)]).double()  # (seed, block, lane)
    centred = 2 * ups - 1
    assert set(ups.unique().tolist()) == {0.0, 1.0}
    for kept in range(3):
        others = [d for d in range(3) if d != kept]
        mean, n = centred.mean(others), ups.numel() // ups.shape[kept]
        assert (mean.abs() * math.sqrt(n) < 5.5).all()
    for axis in range(3):
        agreement = (
            centred.narrow(axis, 1, ups.shape[axis] - 1) * centred.narrow(axis, 0, ups.shape[axis] - 1)
        ).mean()
        assert abs(agreement) * math.sqrt(ups.numel()) < 5.5


def test_seed_matters_only_where_it_is_used() -> None:
    x = normal(1000)
    assert torch.equal(encode(Int8Codec(), x, 1), encode(Int8Codec(), x, 2))
    stochastic = Int8Codec(round="stochastic")
    assert not torch.equal(encode(stochastic, x, 1), encode(stochastic, x, 2))
    assert torch.equal(encode(stochastic, x, 1), encode(stochastic, x, 1 + 2**64))


# --- residual, dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("n", [1, 100, 1024, 1025, 5000])
def test_residual_in_place(cls: type[BlockInt], n: int) -> None:
    codec = cls(96, "stochastic")
    x = normal(n)
    expected = x - coded(codec, x, 3)
    out = torch.empty(codec.max_nbytes(n, x.dtype), dtype=torch.uint8)
    codec.encode_residual(x, out, x, seed=3)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("cls", CLASSES)
def test_finite_16_bit_values_stay_finite(cls: type[BlockInt]) -> None:
    """The larger side may round up to a code beyond the dtype's range; it is cut there."""
    codec = cls(32)
    for dtype in (torch.float16, torch.bfloat16):
        largest = torch.finfo(dtype).max
        x = (torch.linspace(0.85, 1.0, 3200, dtype=torch.float64) * largest).to(dtype)
        x[::2] *= -1
        assert torch.isfinite(coded(codec, x)).all()
        assert (errors(codec, x) <= codec.error_bound(x)).all()


def test_fp64_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="not float64"):
        encode(Int8Codec(), torch.zeros(3, dtype=torch.float64))

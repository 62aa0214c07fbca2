"""zfp against the C library, against the reference, and its promises."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
import zfpy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from thinwire.codecs import parse, reference_zfp
from thinwire.codecs.zfp import ZfpCodec
from thinwire.errors import SpecError, UnsupportedError, WireError

RATES = (3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32)
DOUBLE_RATES = (*RATES, 33, 40, 47, 48, 49, 63, 64)
BY_WIDTH = [(rate, np.float32) for rate in RATES] + [(rate, np.float64) for rate in DOUBLE_RATES]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def encode(codec: ZfpCodec, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((codec.max_nbytes(x.numel(), x.dtype),), 0xAA, dtype=torch.uint8)
    assert codec.encode(x, out) == out.numel()
    return out


def decode(codec: ZfpCodec, payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, 7)
    codec.decode(payload, out)
    return out


def as_payload(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def least(dtype: type) -> float:
    """The largest magnitude of a block from which on the C library codes it right."""
    return 2.0**-96 if dtype == np.float32 else 2.0**-962


def messages(n: int, seed: int = 0, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Arrays of n values; every block is zero or holds a value that the C library codes right."""
    low, high = (-24, 38) if dtype == np.float32 else (-285, 307)
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(n)
    mixed = normal * 10.0 ** rng.integers(low, high, n)
    mixed[rng.random(n) < 0.3] = 0
    floor = np.where(normal < 0, -least(dtype), least(dtype))
    sparse = np.where(rng.random(n) < 0.1, normal, 0.0)
    huge = np.sign(normal) * np.finfo(dtype).max * rng.random(n)
    arrays = {"normal": normal, "mixed": mixed, "smooth": np.cumsum(normal), "tiny": floor, "sparse": sparse}
    arrays |= {"gradient": normal * 1e-6, "constant": np.full(n, -3.25), "zero": np.zeros(n), "huge": huge}
    return {name: a.astype(dtype) for name, a in arrays.items()}


def dense(x: np.ndarray) -> np.ndarray:
    """x with blocks of 4 that the C library loses set to zero."""
    largest = np.abs(reference_zfp.split(x)).max(1)
    keep = np.repeat(largest >= least(x.dtype.type), 4)[: x.size]
    return np.where(keep, x, x.dtype.type(0))


# --- the C library -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "dtype"), BY_WIDTH)
def test_bytes_and_values_equal_the_c_library(rate: int, dtype: type) -> None:
    codec, most = ZfpCodec(rate), np.finfo(dtype).max
    kind = zfpy.type_float if dtype == np.float32 else zfpy.type_double
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 63, 1000):
        for name, x in messages(n, rate, dtype).items():
            x = dense(x)
            theirs = zfpy.compress_numpy(x, rate=rate, write_header=False)
            ours = encode(codec, torch.from_numpy(x))
            assert ours.numpy().tobytes() == theirs, (name, n)
            by_them = zfpy._decompress(ours.numpy().tobytes(), kind, x.shape, rate=rate)
            by_us = decode(codec, as_payload(theirs), torch.from_numpy(x)).numpy()
            # The C library goes to infinity where truncation passes the largest float; we stop there.
            by_them = np.clip(by_them, -most, most)
            assert by_us.tobytes() == by_them.tobytes(), (name, n)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([np.float32, np.float64]))
def test_any_finite_values_equal_the_c_library(data: st.DataObject, dtype: type) -> None:
    width = 8 * np.dtype(dtype).itemsize
    rate = data.draw(st.integers(3, width))
    elements = st.floats(width=width, allow_nan=False, allow_infinity=False)
    x = dense(data.draw(hnp.arrays(dtype, st.integers(1, 40), elements=elements)))
    theirs = zfpy.compress_numpy(x, rate=rate, write_header=False)
    assert encode(ZfpCodec(rate), torch.from_numpy(x)).numpy().tobytes() == theirs


def test_known_answers() -> None:
    def coded(values: list[float], rate: int, dtype: torch.dtype = torch.float32) -> str:
        return encode(ZfpCodec(rate), torch.tensor(values, dtype=dtype)).numpy().tobytes().hex()

    # 1.0 four times: e = 1 + 127, so the header is 2 * 128 + 1 = 0x101; the only coefficient is 2^29, in
    # negabinary 2^30 + 2^29 in planes 30 and 29. Bits: 0 | 1 1 0 | 1 0 | zeros, one per plane and one for slot 0.
    assert coded([1.0] * 4, 8) == "01" + f"{1 | 0b010110 << 1:02x}" + "000000000000"
    assert coded([0.0] * 4, 8) == "00" * 8
    # Of fp64 the header is 2 * (1 + 1023) + 1 in 12 bits; the planes are 62 and 61.
    one = 2 * 1024 + 1 | 0b010110 << 12
    assert coded([1.0] * 4, 8, torch.float64) == one.to_bytes(8, "little").hex()
    assert coded([1.0] * 4, 64, torch.float64) == one.to_bytes(32, "little").hex()
    # classes +Inf, finite, -Inf, NaN: 01 00 10 11 from the lowest pair up, after a zero bit
    for dtype in (torch.float32, torch.float64):
        special = coded([torch.inf, 5.0, -torch.inf, torch.nan], 8, dtype)
        assert special == f"{(1 | 2 << 4 | 3 << 6) << 1:04x}"[2:] + "01" + "00" * 6


# --- the reference -----------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([np.float32, np.float64]))
def test_any_bits_equal_the_reference(data: st.DataObject, dtype: type) -> None:
    words = np.uint32 if dtype == np.float32 else np.uint64
    x = torch.from_numpy(data.draw(hnp.arrays(words, st.integers(0, 40))).view(dtype))
    rate = data.draw(st.integers(3, 8 * x.itemsize))
    codec = ZfpCodec(rate)
    with np.errstate(all="ignore"):
        expected = reference_zfp.encode(x.numpy(), rate)
        values = reference_zfp.decode(expected, x.numel(), rate, dtype)
    payload = encode(codec, x)
    assert payload.numpy().tobytes() == expected
    assert decode(codec, payload, x).numpy().tobytes() == values.tobytes()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 30), st.data(), st.integers(0, 2**32), st.booleans(), st.sampled_from(DTYPES))
def test_any_payload_decodes_as_the_reference_does(
    n: int, data: st.DataObject, seed: int, sparse: bool, dtype: torch.dtype
) -> None:
    codec = ZfpCodec(data.draw(st.integers(3, max(32, 8 * dtype.itemsize))))
    bits = np.random.default_rng(seed).integers(0, 256, (3, codec.max_nbytes(n, dtype)), np.uint8)
    payload = (bits[0] & bits[1] & bits[2] if sparse else bits[0]).tobytes()  # sparse: long runs of zeros
    width = np.float64 if dtype == torch.float64 else np.float32
    with np.errstate(all="ignore"):
        values = reference_zfp.decode(payload, n, codec.rate, width, torch.finfo(dtype).max)
    wide = torch.from_numpy(values)
    values = wide.to(dtype)
    values[torch.isnan(wide)] = torch.nan  # one bit pattern
    out = decode(codec, as_payload(payload), torch.zeros(n, dtype=dtype))
    assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))


# --- promises ----------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    hnp.arrays(np.uint32, st.integers(1, 24)),
    st.integers(3, 32),
    st.integers(-130, 128),
    st.sampled_from(DTYPES),
)
@example(np.full(4, 0x7F7FFFFF, np.uint32), 3, 128, torch.float32)
def test_error_stays_within_the_bound(bits: np.ndarray, rate: int, exponent: int, dtype: torch.dtype) -> None:
    codec = ZfpCodec(rate)
    spread = (bits.astype(np.int64) - 2**31) / 2.0**31  # one magnitude: hypothesis' floats rarely share one
    for values in (bits.view(np.float32).astype(np.float64), np.ldexp(spread, exponent)):
        x = torch.from_numpy(values).to(dtype)
        error = (decode(codec, encode(codec, x), x).double() - x.double()).abs()
        bound = codec.error_bound(x)
        finite = torch.isfinite(x)
        assert (error[finite] <= bound[finite]).all()
        assert (bound[~finite] == torch.inf).all()


@settings(max_examples=300, deadline=None)
@given(hnp.arrays(np.uint64, st.integers(1, 24)), st.integers(3, 64), st.integers(-1080, 1023))
@example(np.full(4, 0x7FEFFFFFFFFFFFFF, np.uint64), 3, 1023)
@example(np.full(4, 1, np.uint64), 64, -1074)
def test_error_of_fp64_stays_within_the_bound(bits: np.ndarray, rate: int, exponent: int) -> None:
    codec = ZfpCodec(rate)
    spread = (bits >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1
    for values in (bits.view(np.float64), np.ldexp(spread, exponent)):
        x = torch.from_numpy(values)
        got, bound = decode(codec, encode(codec, x), x), codec.error_bound(x)
        finite = torch.isfinite(x)
        assert (bound[~finite] == torch.inf).all()
        for value, back, most in zip(
            x[finite].tolist(), got[finite].tolist(), bound[finite].tolist(), strict=True
        ):
            assert most == torch.inf or abs(Fraction(back) - Fraction(value)) <= Fraction(most)


@pytest.mark.parametrize("magnitude", [1e-300, 1e-280, 1e-6, 1e280, 1e307])
def test_error_of_fp64_is_relative_at_every_magnitude(magnitude: float) -> None:
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(4096)).clamp(-3, 3) * magnitude
    for rate, expected in ((8, 0.1), (16, 5e-4), (32, 1e-8), (64, 2e-16)):
        got = decode(ZfpCodec(rate), encode(ZfpCodec(rate), x), x)
        assert ((got - x) / magnitude).norm() <= expected * (x / magnitude).norm()


@pytest.mark.parametrize("magnitude", [1e-36, 1e-30, 1e-6, 1.0, 1e30, 1e38])
def test_error_is_relative_at_every_magnitude(magnitude: float) -> None:
    normal = torch.from_numpy(np.random.default_rng(1).standard_normal(4096)).clamp(-3, 3)
    x = (normal * magnitude).float()
    for rate, expected in ((8, 0.06), (16, 3e-4), (24, 2e-6)):
        got = decode(ZfpCodec(rate), encode(ZfpCodec(rate), x), x)
        assert (got.double() - x.double()).norm() <= expected * x.double().norm()


@pytest.mark.parametrize(("dtype", "rates"), [(np.float32, (8, 16, 24)), (np.float64, (8, 16, 32, 48, 56))])
def test_error_bound_is_not_idle(dtype: type, rates: tuple[int, ...]) -> None:
    x = torch.from_numpy(messages(4096, dtype=dtype)["normal"])
    for rate in rates:
        codec = ZfpCodec(rate)
        error = (decode(codec, encode(codec, x), x).double() - x.double()).abs()
        assert codec.error_bound(x).mean() <= 40 * error.mean()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [3, 8, 24])
def test_non_finite_values_come_back_and_touch_only_their_block(dtype: torch.dtype, rate: int) -> None:
    codec = ZfpCodec(rate)
    x = torch.linspace(-3, 3, 22).to(dtype)
    x[5], x[13], x[14], x[21] = torch.nan, torch.inf, -torch.inf, torch.inf
    got = decode(codec, encode(codec, x), x)
    hit = [5, 13, 14, 21]
    assert got[hit].isnan().tolist() == [True, False, False, False]
    assert got[hit[1:]].tolist() == [torch.inf, -torch.inf, torch.inf]
    block = torch.arange(22) // 4
    touched = torch.isin(block, block[hit])
    assert (got[touched & torch.isfinite(x)] == 0).all()
    clean = torch.where(touched, torch.zeros_like(x), x)
    assert torch.equal(got[~touched], decode(codec, encode(codec, clean), x)[~touched])
    residual = torch.empty(22)
    codec.encode_residual(x.float(), encode(codec, x.float()), residual)
    assert torch.equal(torch.isfinite(residual), torch.isfinite(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_values_stay_finite(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    x = torch.tensor([top, -top, top, top, -top, top, top, -top, top], dtype=dtype)
    for rate in DOUBLE_RATES if dtype == torch.float64 else RATES:
        got = decode(ZfpCodec(rate), encode(ZfpCodec(rate), x), x)
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_values_are_coded_as_fp32(dtype: torch.dtype) -> None:
    codec = ZfpCodec(9)  # 36-bit blocks: chunks end within the stream
    x = torch.from_numpy(messages(40_003)["normal"]).to(dtype)
    payload = encode(codec, x)
    assert torch.equal(payload, encode(codec, x.float()))
    assert torch.equal(decode(codec, payload, x), decode(codec, payload, x.float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 3, 4, 1001])
def test_decode_add(dtype: torch.dtype, n: int) -> None:
    codec = ZfpCodec(12)
    x = torch.from_numpy(messages(n)["normal"]).to(dtype)
    payload = encode(codec, x)
    out = torch.from_numpy(messages(n, seed=1)["normal"])
    expected = out + decode(codec, payload, x).float()
    codec.decode_add(payload, out, dtype)
    assert torch.equal(out, expected)


def test_decode_add_of_fp64_adds_what_fp32_can_hold() -> None:
    x = torch.tensor([1e300, -1e300, 1.0, 0.0], dtype=torch.float64)
    payload, out = encode(ZfpCodec(64), x), torch.full((4,), 0.5)
    ZfpCodec(64).decode_add(payload, out, torch.float64)
    assert out[:2].tolist() == [torch.inf, -torch.inf]
    assert torch.isfinite(out[2:]).all()


@pytest.mark.parametrize(("dtype", "rates"), [(np.float32, RATES), (np.float64, DOUBLE_RATES)])
def test_splitting_at_the_granule_keeps_the_payload(dtype: type, rates: tuple[int, ...]) -> None:
    x = torch.from_numpy(messages(1500, dtype=dtype)["smooth"])
    for rate in rates:
        codec = ZfpCodec(rate)
        at = codec.granule * (700 // codec.granule)
        assert torch.equal(torch.cat([encode(codec, x[:at]), encode(codec, x[at:])]), encode(codec, x))


def test_bytes_at_any_address() -> None:
    codec = ZfpCodec(8)
    x = torch.from_numpy(messages(100)["normal"])
    expected = encode(codec, x)
    for offset in (1, 4):
        room = torch.full((expected.numel() + 16,), 0x55, dtype=torch.uint8)
        payload = room[offset : offset + expected.numel()]
        codec.encode(x, room[offset:])
        assert torch.equal(payload, expected)
        assert (room[:offset] == 0x55).all()
        assert (room[offset + expected.numel() :] == 0x55).all()
        assert torch.equal(decode(codec, payload, x), decode(codec, expected, x))


def test_specs_and_sizes() -> None:
    assert parse("zfp:8") == parse("zfp:rate=8") == ZfpCodec(8)
    assert str(ZfpCodec(8)) == "zfp:rate=8"
    for spec in ("zfp", "zfp:2", "zfp:65", "zfp:8.5", "zfp:bits=8"):
        with pytest.raises(SpecError):
            parse(spec)
    assert [ZfpCodec(8).max_nbytes(n, torch.float16) for n in (0, 1, 8, 9, 1000)] == [0, 8, 8, 16, 1000]
    assert [ZfpCodec(3).max_nbytes(n, torch.float32) for n in (20, 24, 1000)] == [8, 16, 376]


def test_what_is_refused() -> None:
    codec = ZfpCodec(8)
    x = torch.ones(16)
    payload = encode(codec, x)
    for bad in (payload[:-1], payload[:8], torch.cat([payload, payload])):
        with pytest.raises(WireError, match="exactly 16 bytes"):
            codec.decode(bad, torch.empty(16))
    for rate, dtype in ((33, torch.float32), (64, torch.bfloat16)):
        message = (
            rf"zfp:rate={rate} takes float64, not {str(dtype)[6:]}, whose rate is at most 32 bits per value"
        )
        with pytest.raises(UnsupportedError, match=message):
            ZfpCodec(rate).encode(x.to(dtype), torch.empty(1000, dtype=torch.uint8))
        with pytest.raises(UnsupportedError, match=message):
            ZfpCodec(rate).decode_add(payload, x, dtype)
    with pytest.raises(UnsupportedError, match=r"zfp:rate=8 takes .*, not int32$"):
        codec.encode(x.int(), payload)
    with pytest.raises(UnsupportedError, match="zfp:rate=8 has no cuda kernel for float64 yet"):
        codec._check_dtype(torch.float64, torch.device("cuda"))
    codec._check_dtype(torch.float32, torch.device("cuda"))
    with pytest.raises(ValueError, match="16 are needed"):
        codec.encode(x, payload[:8])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nan_has_one_bit_pattern_wherever_it_is(dtype: torch.dtype) -> None:
    """Casts of whole vectors and of what is left at their end may give NaN different bits."""
    codec = ZfpCodec(8)
    x = torch.full((67,), torch.nan, dtype=dtype)
    quiet = torch.full_like(x.view(torch.int16), 0x7E00 if dtype == torch.float16 else 0x7FC0)
    assert torch.equal(decode(codec, encode(codec, x), x).view(torch.int16), quiet)

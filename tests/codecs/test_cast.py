"""bf16 and fp16: rounding, range, NaN bits, and independence of how a tensor is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import Bf16Codec, Fp16Codec
from thinwire.codecs.cast import Cast
from thinwire.testing import decode, encode, same_bits

CODECS = (Bf16Codec(), Fp16Codec())


def coded(codec: Cast, x: torch.Tensor) -> torch.Tensor:
    return decode(codec, encode(codec, x), x)


def fp32(*bits: int) -> torch.Tensor:
    return torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def halves(payload: torch.Tensor) -> list[int]:
    low, high = payload.reshape(-1, 2).int().unbind(1)
    return (low | high << 8).tolist()


def test_bf16_rounds_to_nearest_even() -> None:
    x = fp32(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000, 0x00008001, 0x00008000)
    assert halves(encode(Bf16Codec(), x)) == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80, 0x0001, 0x0000]


def test_fp16_rounds_to_nearest_even() -> None:
    x = torch.tensor(
        [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, -(1 + 2**-11), 2**-24, 2**-25, 1.5 * 2**-24]
    )
    assert halves(encode(Fp16Codec(), x)) == [0x3C00, 0x3C02, 0x3C01, 0xBC00, 0x0001, 0x0000, 0x0002]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("n", [5, 70_001])
def test_special_values_wherever_they_stand(codec: Cast, n: int) -> None:
    """Infinities stay, NaN is the quiet one of its sign, what is finite stays finite; the rest is not touched."""
    inf, nan, top = (0x7F80, 0x7FC0, 0x7F7F) if codec.wire == torch.bfloat16 else (0x7C00, 0x7E00, 0x7BFF)
    special = torch.cat(
        [torch.tensor([torch.inf, -torch.inf]), fp32(0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0xFF7FFFFF)]
    )
    expected = [inf, inf | 0x8000, nan, nan | 0x8000, top, top | 0x8000]
    x = torch.linspace(-1, 1, n)
    plain = halves(encode(codec, x))
    for k, value in enumerate(special):
        for at in (0, n // 2, n - 1):
            y = x.clone()
            y[at : at + 1] = value
            found = halves(encode(codec, y))
            assert found[at] == expected[k]
            assert found[:at] + found[at + 1 :] == plain[:at] + plain[at + 1 :]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_own_dtype_passes_bit_for_bit(codec: Cast) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(codec.wire)
    payload = encode(codec, x)
    assert torch.equal(payload, x.view(torch.uint8))
    assert same_bits(decode(codec, payload, x), x)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_is_within_its_bound(codec: Cast, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    y, finite = coded(codec, x), torch.isfinite(x)
    assert torch.equal(torch.isfinite(y), finite)
    assert torch.equal(torch.isnan(y), torch.isnan(x))
    error = (y.double() - x.double()).abs()
    assert (error[finite] <= codec.error_bound(x)[finite]).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_bound_is_reached(codec: Cast) -> None:
    """Half-way cases have exactly the error that the bound allows; so have clipped values."""
    eps = torch.finfo(codec.wire).eps
    x = torch.tensor([1 + eps / 2, 1 + 1.5 * eps, 2 - eps / 2, -(4 + 2 * eps)])
    tiny = torch.finfo(codec.wire).smallest_normal
    x = torch.cat([x, torch.tensor([tiny * eps / 2, tiny * (1 + eps / 2)])])
    if codec.wire == torch.float16:
        x = torch.cat([x, torch.tensor([65520.0, 1e6, -3e38])])
    assert torch.equal((coded(codec, x).double() - x.double()).abs(), codec.error_bound(x))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_size_is_two_bytes_a_value(codec: Cast, dtype: torch.dtype) -> None:
    assert codec.max_nbytes(7, dtype) == 14
    assert codec.fixed_size
    assert not codec.lossless


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rounding_against_numpy(data: st.DataObject) -> None:
    """fp16 against numpy's cast, bf16 against integer rounding, on any finite bits."""
    raw = data.draw(st.lists(st.integers(0, 0x7F7FFFFF), min_size=1, max_size=64))
    x = fp32(*raw)
    as_numpy = torch.from_numpy(x.clamp(max=65504).numpy().astype("float16"))
    assert same_bits(coded(Fp16Codec(), x).half(), as_numpy)
    rounded = [min((r + 0x7FFF + (r >> 16 & 1)) >> 16, 0x7F7F) for r in raw]
    assert halves(encode(Bf16Codec(), x)) == rounded

"""``bounded``: the kernel against the reference, the bound on every value and at the bound, sizes, damage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import BoundedCodec, parse
from thinwire.codecs.reference_bounded import bounded_decode, bounded_encode
from thinwire.errors import SpecError, WireError
from thinwire.testing import codec_inputs, decode, encode, same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOUNDS = st.sampled_from([1e-30, 1e-6, 1e-3, 0.1, 1.0, 1e4, 1e30])


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def coded(codec: BoundedCodec, x: torch.Tensor) -> torch.Tensor:
    return decode(codec, encode(codec, x), x)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_bytes_and_values_are_the_references(data: st.DataObject) -> None:
    bound = data.draw(BOUNDS)
    codec = data.draw(st.sampled_from([BoundedCodec(abs=bound), BoundedCodec(rel=bound)]))
    x = data.draw(codec_inputs(codec, 6000, finite=False))
    payload = encode(codec, x)
    expected = bounded_encode(x, codec.abs, codec.rel)
    assert payload.numpy().tobytes() == expected
    y = decode(codec, payload, x)
    assert same_bits(y, bounded_decode(expected, x.numel(), x.dtype, codec.abs, codec.rel))
    finite = torch.isfinite(x)
    assert same_bits(y[~finite], x[~finite])
    assert ((y.double() - x.double()).abs()[finite] <= codec.error_bound(x)[finite]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", ["bounded:abs=0.01", "bounded:rel=0.001"])
def test_errors_reach_the_bound(dtype: torch.dtype, spec: str) -> None:
    """And do not pass it. 16-bit dtypes quantise twice as finely, so that rounding to them stays inside."""
    codec, x = BoundedCodec(**_fields(spec)), (normal(1 << 16) * 0.3).to(dtype)
    worst = ((coded(codec, x).double() - x.double()).abs() / codec.error_bound(x)).max()
    assert 0.99 < worst <= 1 if dtype == torch.float32 else 0.4 < worst <= 1


def _fields(spec: str) -> dict[str, float]:
    codec = parse(spec)
    assert isinstance(codec, BoundedCodec)
    return {"abs": codec.abs, "rel": codec.rel}


def test_exactly_at_the_bound() -> None:
    """An odd multiple of the bound lies between two steps, as far from both as is allowed."""
    codec = BoundedCodec(abs=0.125)
    x = torch.arange(-33, 34, 2) * 0.125
    errors = (coded(codec, x) - x).abs()
    assert (errors == 0.125).all()


def test_layout() -> None:
    x = torch.zeros(34)
    x[0], x[1], x[2], x[33] = 1.0, -1.0, 2.0, torch.inf
    payload = encode(BoundedCodec(abs=0.5), x).numpy().tobytes()
    # 1, -1, 2 are 2, 1, 4 with the sign lowest: three bits each. The second block goes as it is.
    assert payload[:6] == bytes([1, 0, 0, 0, 3, 255])
    assert payload[6:18] == bytes([0b00001010, 0b1] + [0] * 10)
    assert payload[18:] == x[32:].numpy().tobytes()


def test_size_follows_the_data() -> None:
    x = normal(1 << 16)
    sizes = [encode(BoundedCodec(abs=b), x).numel() for b in (1e-5, 1e-3, 1e-1, 10.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 4 + (1 << 16) // 32
    # Values that need more bits than they have travel as they are, in 4 bytes more.
    assert encode(BoundedCodec(abs=1e-30), x).numel() == x.nbytes + 4


def test_relative_to_the_range_around() -> None:
    x = torch.cat([normal(4096) * 1e-6, normal(4096) * 1e6])
    codec = BoundedCodec(rel=1e-3)
    errors = (coded(codec, x) - x).abs()
    assert errors[:4096].max() <= 1e-3 * (x[:4096].max() - x[:4096].min())
    assert errors[4096:].max() > 1


@pytest.mark.parametrize(("at", "value"), [(0, 2), (1, 1), (4, 25), (4, 4), (5, 255)])
def test_damaged_headers_are_refused(at: int, value: int) -> None:
    x, codec = normal(64), BoundedCodec(abs=0.5)
    payload = encode(codec, x)
    assert payload[at] != value
    payload[at] = value
    out = torch.full((64,), 7.0)
    with pytest.raises(WireError, match="payload of 64 values"):
        codec.decode(payload, out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "kwargs", [{}, {"abs": -1.0}, {"abs": float("inf")}, {"rel": float("nan")}, {"abs": 1.0, "rel": 1.0}]
)
def test_wrong_bounds(kwargs: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="one positive bound"):
        BoundedCodec(**kwargs)

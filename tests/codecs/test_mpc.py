"""mpc against its reference, and its promises."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from thinwire.codecs import parse, reference_mpc
from thinwire.codecs.mpc import MpcCodec
from thinwire.errors import SpecError, UnsupportedError, WireError

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 2, 31, 32, 33, 64, 1000, 1023, 1024, 1025, 2048, 2100)


def encode(codec: MpcCodec, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((codec.max_nbytes(x.numel(), x.dtype),), 0xAA, dtype=torch.uint8)
    return out[: codec.encode(x, out)]


def decode(codec: MpcCodec, payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, 7)
    codec.decode(payload, out)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and (not a.numel() or torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def words_of(payload: torch.Tensor) -> np.ndarray:
    return payload.numpy().copy().view(np.uint32)


def as_payload(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.uint8).copy())


def random_bits(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


def normal(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(2).standard_normal(n)).to(dtype)


def test_known_answers() -> None:
    # Fewer than 32 words are not transposed: differences 5, 0, 2; bitmap 0b101; two words are kept.
    x = torch.tensor([5, 5, 7], dtype=torch.int32).view(torch.float32)
    assert words_of(encode(MpcCodec(), x)).tolist() == [3, 2, 0b101, 5, 2]
    # 32 words that differ by 1 from 1 on: transposed, word 0 is all ones and the rest zero; then differences.
    x = torch.arange(1, 33, dtype=torch.int32).view(torch.float32)
    assert words_of(encode(MpcCodec(), x)).tolist() == [32, 2, 0b11, 0xFFFFFFFF, 1]
    # dim=2: the first two words stay, the others are 0; one word has bit 0 in place 0 and bit 1 in place 1.
    x = torch.tensor([1, 2] * 16, dtype=torch.int32).view(torch.float32)
    assert words_of(encode(MpcCodec(2), x)).tolist() == [32, 3, 0b111, 1, 1, 2**32 - 2]


def test_transposition_is_its_own_inverse() -> None:
    group = np.random.default_rng(0).integers(0, 2**32, 32, dtype=np.uint32)
    turned = reference_mpc.transpose(group)
    assert all((int(turned[l]) >> i & 1) == (int(group[i]) >> l & 1) for i in range(32) for l in range(32))
    assert (reference_mpc.transpose(turned) == group).all()


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        hnp.arrays(np.uint32, st.integers(0, 100)),
        hnp.arrays(
            np.uint32, st.sampled_from([1024, 1025, 1100, 2080]), elements=st.integers(0, 3), fill=st.just(9)
        ),
    ),
    st.integers(1, 32),
)
def test_any_bits_equal_the_reference_and_come_back(words: np.ndarray, dim: int) -> None:
    x = torch.from_numpy(words.view(np.float32))
    payload = encode(MpcCodec(dim), x)
    expected = reference_mpc.encode(words, dim)
    assert words_of(payload).tolist() == expected.tolist()
    assert (reference_mpc.decode(expected, dim) == words).all()
    assert same_bits(decode(MpcCodec(dim), payload, x), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_every_bit_comes_back(dtype: torch.dtype, n: int) -> None:
    random = random_bits((n + 1) * dtype.itemsize).view(dtype)[:n]
    for x in (random, normal(n, dtype), torch.zeros(n, dtype=dtype)):
        for dim in (1, 2, 3, 32):
            codec = MpcCodec(dim)
            payload = encode(codec, x)
            assert payload.numel() <= codec.max_nbytes(n, dtype)
            assert same_bits(decode(codec, payload, x), x)


def test_special_values_come_back() -> None:
    bits = [0x7FC00001, 0xFF800001, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x807FFFFF] * 10
    x = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    assert same_bits(decode(MpcCodec(), encode(MpcCodec(), x), x), x)


def test_16_bit_values_are_coded_in_pairs() -> None:
    x = normal(2001, torch.bfloat16)
    pairs = torch.cat([x, torch.zeros(1, dtype=x.dtype)]).view(torch.float32)
    assert torch.equal(encode(MpcCodec(), x), encode(MpcCodec(), pairs))


def test_fp64_values_are_two_words() -> None:
    """The low half first; so the word before an fp64's half is two back."""
    x = normal(2001, torch.float64)
    assert torch.equal(encode(MpcCodec(2), x), encode(MpcCodec(2), x.view(torch.float32)))
    smooth = torch.linspace(1, 1.5, 4096, dtype=torch.float64)
    assert encode(MpcCodec(2), smooth).numel() < encode(MpcCodec(1), smooth).numel()


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.float32, 1.09, 1.12), (torch.float16, 1.02, 1.05), (torch.bfloat16, 1.26, 1.30)],
)
def test_ratio_on_gaussian_values(dtype: torch.dtype, low: float, high: float) -> None:
    x = normal(1 << 17, dtype)
    assert low <= x.numel() * x.element_size() / encode(MpcCodec(), x).numel() <= high


def test_worst_case_is_reached() -> None:
    x = random_bits(4 * 1000).view(torch.float32)
    assert encode(MpcCodec(), x).numel() == MpcCodec().max_nbytes(1000, torch.float32) == 4 * (1000 + 2 + 32)


def test_decode_add_and_residual() -> None:
    codec = MpcCodec()
    for dtype in DTYPES:
        x = normal(1500, dtype)
        out = torch.ones(1500)
        codec.decode_add(encode(codec, x), out, dtype)
        assert torch.equal(out, 1 + x.float())
    x, residual = normal(50), torch.ones(50)
    codec.encode_residual(x, torch.empty(codec.max_nbytes(50, x.dtype), dtype=torch.uint8), residual)
    assert (residual == 0).all()
    assert (codec.error_bound(x) == 0).all()


def test_bytes_at_any_address() -> None:
    codec = MpcCodec()
    x = normal(100)
    expected = encode(codec, x)
    room = torch.full((codec.max_nbytes(100, x.dtype) + 1,), 0x55, dtype=torch.uint8)
    size = codec.encode(x, room[1:])
    assert room[0] == 0x55
    assert torch.equal(room[1 : 1 + size], expected)
    assert torch.equal(decode(codec, room[1 : 1 + size], x), x)
    odd = torch.zeros(101, dtype=torch.float16)[1:]  # two bytes off a word
    odd.copy_(x)
    assert same_bits(decode(codec, encode(codec, odd), odd), odd)


def put(at: int, change: Callable[[int], int]) -> Callable[[np.ndarray], np.ndarray]:
    def corrupt(words: np.ndarray) -> np.ndarray:
        words[at] = change(int(words[at]))
        return words

    return corrupt


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda words: words[:1], "or more"),
        (lambda words: words[:5], "or more"),
        (lambda words: words[:-1], "nonzero words"),
        (put(0, lambda n: n + 1), "header says 101"),
        (put(1, lambda count: count - 1), "nonzero words"),
        (put(2, lambda bitmap: bitmap ^ 1), "bitmaps"),
        (put(5, lambda bitmap: bitmap | 1 << 20), "beyond word 100"),
    ],
    ids=["header", "bitmaps", "cut", "word count", "nonzero count", "bitmap", "beyond the end"],
)
def test_inconsistent_payloads_are_refused(corrupt: Callable[[np.ndarray], np.ndarray], message: str) -> None:
    words = words_of(encode(MpcCodec(), torch.cumsum(torch.ones(100), 0)))
    with pytest.raises(WireError, match=message):
        MpcCodec().decode(as_payload(corrupt(words)), torch.empty(100))


def test_wrong_sizes_are_refused() -> None:
    x = normal(100)
    payload = encode(MpcCodec(), x)
    with pytest.raises(WireError, match="in fours"):
        MpcCodec().decode(payload[:-1], torch.empty(100))
    with pytest.raises(WireError, match="at most"):
        MpcCodec().decode(torch.cat([payload, payload]), torch.empty(100))
    with pytest.raises(WireError, match="header says 100"):
        MpcCodec().decode(payload, torch.empty(101))


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.uint32, st.integers(0, 50)), st.integers(0, 40), st.integers(1, 32))
def test_any_payload_is_refused_or_decoded(words: np.ndarray, n: int, dim: int) -> None:
    out = torch.full((n + 1,), 7.0)
    groups = -(-n // 32)
    if words.size >= 2 + groups:  # let the header agree, so that decoding is reached
        words = words.copy()
        words[0], words[1] = n, words.size - 2 - groups
        if n and words.size > 2 + groups:
            count = min(n, words.size - 2 - groups)
            words[2 : 2 + groups] = [(1 << min(32, max(0, count - 32 * g))) - 1 for g in range(groups)]
    try:
        MpcCodec(dim).decode(as_payload(words), out[:n])
    except WireError:
        assert (out == 7).all()
    assert out[n] == 7


def test_specs() -> None:
    assert parse("mpc") == parse("mpc:1") == parse("mpc:dim=1") == MpcCodec(1)
    assert str(MpcCodec(3)) == "mpc:dim=3"
    for spec in ("mpc:0", "mpc:33", "mpc:dim=x"):
        with pytest.raises(SpecError):
            parse(spec)


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="int64"):
        MpcCodec().encode(torch.ones(4, dtype=torch.int64), torch.empty(100, dtype=torch.uint8))
    with pytest.raises(ValueError, match="are needed"):
        MpcCodec().encode(torch.ones(4), torch.empty(10, dtype=torch.uint8))

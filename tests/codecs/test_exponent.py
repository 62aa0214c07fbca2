"""exponent: kernels against the reference, ratios, values in disguise, the longest codes, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs import ExponentCodec, parse
from thinwire.codecs import reference_exponent as reference
from thinwire.codecs import reference_huffman as huffman
from thinwire.codecs.exponent import Codebook
from thinwire.errors import CheckpointError, SpecError, UnsupportedError, WireError
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lowest", [1, 64, 100])
@pytest.mark.parametrize("reach", [63, 64, 65])
def test_exponents_far_apart(dtype: torch.dtype, lowest: int, reach: int) -> None:
    """Up to where two are the same modulo 64, with zeros and without."""
    rng = np.random.default_rng(reach)
    exponents = lowest + np.minimum(rng.geometric(0.2, 9000) - 1, reach)
    exponents[[77, 4800]] = lowest + reach
    for zeros in (0, 3000):
        exponents[rng.permutation(9000)[:zeros]] = 0
        bits = (exponents.astype(np.uint32) << 23) | rng.integers(0, 2**23, 9000, np.uint32)
        bits = bits if dtype == torch.float32 else (bits >> 16).astype(np.uint16)
        assert (
            check(torch.from_numpy(bits.view(np.int32 if dtype == torch.float32 else np.int16)).view(dtype))[
                0
            ]
            == 1
        )


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
        (_damage(payload, 0, 3), "unknown mode"),
        (_damage(payload, 0, 2), "codebook of an earlier message that is not at hand"),
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
    with pytest.raises(WireError, match="unknown mode or flags"):
        CODEC.decode(_damage(payload, 3, 1), torch.zeros_like(x))
    raw = encode(CODEC, normal(10, torch.bfloat16))
    assert raw[0] == 0
    with pytest.raises(WireError, match="longer or shorter"):
        CODEC.decode(raw[:-1].clone(), torch.zeros(10, dtype=torch.bfloat16))


# Codebooks that serve more than one message.


class Stream:
    """Both ends of a stream of messages; the reference codes beside the sender."""

    def __init__(self, codec: ExponentCodec = CODEC) -> None:
        self.codec = codec
        self.sender, self.receiver = Codebook(), Codebook()

    def send(self, x: Tensor) -> int:
        """Mode of the message, once bytes are the reference's and x came through."""
        book = (self.sender.lengths.copy(), self.sender.drop, self.sender.id)
        payload = encode(self.codec, x, state=self.sender)
        again = int(payload[0]) == 2
        mantissa = MANTISSA[x.dtype]
        expected = (
            reference.encode(words(x), mantissa, book=book)
            if again
            else reference.encode(words(x), mantissa, spare=True)
        )
        assert payload.numpy().tobytes() == expected
        assert self.sender.needs == (book[2] if again else 0)
        assert same_bits(decode(self.codec, payload, x, self.receiver), x)
        found = words(x)
        back = reference.decode(payload.numpy().tobytes(), x.numel(), found.dtype, mantissa, book[0])
        assert back.tobytes() == found.tobytes()
        assert self.receiver.id == self.sender.id
        return int(payload[0])


@pytest.mark.parametrize("dtype", MANTISSA)
def test_a_codebook_serves_so_many_messages(dtype: torch.dtype) -> None:
    stream = Stream(ExponentCodec(reuse=3))
    modes = [stream.send(normal(5000 + i, dtype, i)) for i in range(9)]
    assert modes == [1, 2, 2, 2, 1, 2, 2, 2, 1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_messages_come_through_a_stream(data: st.DataObject) -> None:
    stream = Stream()
    stream.send(normal(3000, torch.bfloat16))
    for _ in range(2):
        x = data.draw(codec_inputs(CODEC, 1500, finite=False))
        stream.send(x)
        stream.send(x.repeat(1 + 4000 // max(x.numel(), 1))[:4000])


def test_a_codebook_is_within_half_a_percent_on_later_messages() -> None:
    stream = Stream()
    stream.send(normal(1 << 18, torch.bfloat16))
    x = normal(1 << 18, torch.bfloat16, 1) * 1.02
    kept = encode(CODEC, x, state=stream.sender)
    assert kept[0] == 2
    assert kept.numel() < 1.005 * encode(CODEC, x).numel()


def test_it_is_renewed_when_it_does_not_fit() -> None:
    x = normal(8192, torch.bfloat16)
    stream = Stream()
    assert [stream.send(x), stream.send(x * 4)] == [1, 2]
    assert stream.send(x) == 1, "codes were longer than at the codebook's making"
    assert stream.send(x * 2.0**60) == 1, "exponents that it does not have"
    assert stream.send(torch.where(torch.arange(8192) % 3 == 0, 0.0, x * 2.0**60)) == 2, "0 has a code always"
    stream = Stream()
    assert [stream.send(x.float()), stream.send(x.float())] == [1, 2]
    odd = x.float()
    odd[5000] = torch.nextafter(odd[5000], torch.tensor(9.0))
    assert stream.send(odd) == 1, "a mantissa bit among those dropped"
    noise = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 10000, np.uint8)).view(torch.bfloat16)
    stream = Stream()
    assert [stream.send(x), stream.send(noise), stream.send(noise), stream.send(x)] == [1, 0, 0, 2]


def test_a_receiver_without_the_codebook_refuses() -> None:
    sender = Codebook()
    x = normal(3000, torch.bfloat16)
    first, later = (encode(CODEC, x, state=sender) for _ in range(2))
    for state in (None, Codebook()):
        out = torch.zeros_like(x)
        with pytest.raises(WireError, match="codebook of an earlier message that is not at hand"):
            CODEC.decode(later, out, state=state)
        assert not out.any()
    receiver = Codebook()
    decode(CODEC, first, x, receiver)
    assert same_bits(decode(CODEC, later, x, receiver), x)
    total = torch.ones(3000)
    CODEC.decode_add(later, total, torch.bfloat16, state=receiver)
    assert torch.equal(total, 1 + x.float())
    with pytest.raises(WireError, match="not at hand"):
        CODEC.decode(_damage(later, 2, int(later[2]) ^ 1), torch.zeros_like(x), state=receiver)


def test_residuals_with_a_state() -> None:
    x, state = normal(3000, torch.float32), Codebook()
    out = torch.empty(CODEC.max_nbytes(3000, torch.float32), dtype=torch.uint8)
    residual = torch.ones(3000)
    for mode in (1, 2):
        size = CODEC.encode_residual(x, out, residual, state=state)
        assert out[0] == mode
        assert not residual.any()
    receiver = Codebook()
    decode(CODEC, encode(CODEC, x, state=Codebook()), x, receiver)
    assert same_bits(decode(CODEC, out[:size].clone(), x, receiver), x)


def test_dump_and_load() -> None:
    stream, x = Stream(), normal(4000, torch.bfloat16)
    stream.send(x)
    stream.send(x)
    resumed = Stream()
    resumed.sender.load(stream.sender.dump())
    resumed.receiver.load(stream.receiver.dump())
    assert resumed.sender.dump() == stream.sender.dump()
    assert [resumed.send(x) for _ in range(3)] == [2, 2, 2]
    empty = Codebook()
    empty.load(Codebook().dump())
    assert empty.id == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": "zz"}, "are needed"),
        ({"lengths": "1111"}, "no prefix code"),
        ({"lengths": "dd" * 128}, "no prefix code"),
        ({"lengths": "10" + "00" * 127}, "no code"),
        ({"lengths": "22" + "00" * 126 + "02"}, "no code"),
        ({"lengths": "01" + "00" * 127}, "no code"),
        ({"drop": 5}, "found 5"),
        ({"uses": None}, "are needed"),
    ],
)
def test_damaged_dumps_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Codebook().load({**Codebook().dump(), **changed})


@pytest.mark.parametrize("reuse", [-1, 65536])
def test_reuse_out_of_range(reuse: int) -> None:
    with pytest.raises(SpecError, match=f"0 to 65535, found {reuse}"):
        ExponentCodec(reuse=reuse)


def test_other_codecs_take_no_state() -> None:
    x = torch.ones(10)
    with pytest.raises(UnsupportedError, match="takes no state"):
        parse("bf16").encode(x, torch.empty(20, dtype=torch.uint8), state=Codebook())
    with pytest.raises(UnsupportedError, match="takes no state"):
        parse("bf16").decode(torch.empty(20, dtype=torch.uint8), x, state=Codebook())

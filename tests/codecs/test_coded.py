"""CODEC|huffman: kernels against the reference, the codec's values and residuals, sizes, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs import CodedCodec, Huffman, parse, reference_coded
from thinwire.codecs import reference_huffman as huffman
from thinwire.errors import UnsupportedError, WireError
from thinwire.testing import codec_inputs, decode, encode, same_bits

SPECS = ("int8", "int6", "int4:block=32,round=stochastic", "int2", "hadamard|int4", "nvfp4", "mxfp8", "sign", "topk",
         "zfp:rate=8", "fp16")  # fmt: skip


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def check_bytes(data: bytes, parts: list[int]) -> bytes:
    """What the coder makes of data, once it is the reference's, within its bound, and both give data back."""
    coder = Huffman()
    room = torch.full((coder.max_nbytes(parts) + 1,), 0xA5, dtype=torch.uint8)
    size = coder.encode(
        torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)], parts, room
    )
    assert size <= coder.max_nbytes(parts)
    assert (room[size:] == 0xA5).all()
    coded = room[:size].numpy().tobytes()
    assert coded == reference_coded.encode(data, parts)
    assert reference_coded.decode(coded, parts) == data
    back = torch.empty(len(data), dtype=torch.uint8)
    assert coder.check(room[:size], parts) is None
    coder.decode(room[:size], parts, back)
    assert back.numpy().tobytes() == data
    return coded


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_payload_is_the_codecs_in_the_references_bytes(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(SPECS))
    codec, coded = parse(spec), parse(f"{spec}|huffman")
    x = data.draw(codec_inputs(codec, 1500, finite=False))
    for message in (x, x.repeat(1 + 6000 // max(x.numel(), 1))[:6000]):
        payload, inner = encode(coded, message, seed=7), encode(codec, message, seed=7)
        parts = codec.payload_parts(message.numel(), message.dtype)
        assert payload.numpy().tobytes() == reference_coded.encode(inner.numpy().tobytes(), parts)
        assert same_bits(decode(coded, payload, message), decode(codec, inner, message))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 300, 1023, 1024, 1025, 3073, 4095, 4096, 4097, 9001]), max_size=4),
       st.floats(0.1, 40), st.integers(0, 5))  # fmt: skip
def test_parts_of_any_size(parts: list[int], spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = np.rint(rng.standard_normal(sum(parts)) * spread).astype(np.int64).astype(np.uint8)
    check_bytes(data.tobytes(), parts)


def test_bytes_that_are_all_the_same() -> None:
    """A code of one bit: 128 bytes for each block of 1024, two for its size, 129 for mode and code."""
    for value in (0, 77, 255):
        assert len(check_bytes(bytes([value]) * 10240, [10240])) == 129 + 10 * (128 + 2)


def test_noise_grows_by_a_byte_for_each_part() -> None:
    data = noise(9000)
    coded = check_bytes(data, [5000, 4000])
    assert coded == b"\0" + data[:5000] + b"\0" + data[5000:]
    assert len(coded) == Huffman().max_nbytes([5000, 4000])


def test_each_part_is_judged_by_itself() -> None:
    coded = check_bytes(noise(2000) + bytes(5000) + noise(1000), [2000, 5000, 1000])
    assert (coded[0], coded[2001], coded[-1001]) == (0, 1, 0)


def test_counts_that_need_longer_codes_than_there_are() -> None:
    counts = [1, 1]
    while len(counts) < 20:
        counts.append(counts[-1] + counts[-2])
    data = np.repeat(np.arange(100, 120, dtype=np.uint8), counts)
    assert huffman.code_lengths(np.bincount(data, minlength=256)).max() == huffman.LIMIT
    np.random.default_rng(3).shuffle(data)
    check_bytes(data.tobytes(), [len(data)])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("numel", [0, 1])
def test_smallest_messages(spec: str, numel: int) -> None:
    codec, coded = parse(spec), parse(f"{spec}|huffman")
    x = normal(numel)
    parts = codec.payload_parts(numel, x.dtype)
    assert encode(coded, x).numel() == coded.max_nbytes(numel, x.dtype) == sum(parts) + len(parts)
    assert same_bits(decode(coded, encode(coded, x), x), decode(codec, encode(codec, x), x))


@pytest.mark.parametrize(
    ("spec", "ratio"), [("int8", 1.05), ("int6", 1.06), ("int4", 1.12), ("int2", 1.73), ("fp8", 1.21)]
)
def test_ratio_on_gaussian_values(spec: str, ratio: float) -> None:
    """Over the codec alone."""
    x = normal(1 << 20)
    gained = encode(parse(spec), x).numel() / encode(parse(f"{spec}|huffman"), x).numel()
    assert ratio <= gained < ratio + 0.01


def test_it_is_what_the_codec_is() -> None:
    coded = parse("hadamard|int4:32|huffman")
    assert str(coded) == "hadamard:block=128|int4:block=32,round=nearest|huffman"
    assert coded == CodedCodec("hadamard:128|int4:block=32|huffman") == parse(str(coded))
    assert not coded.fixed_size
    assert coded.granule == 128
    assert not coded.needs_feedback
    assert parse("topk|huffman").needs_feedback
    assert parse("zfp:rate=8|huffman").dtypes == parse("zfp:rate=8").dtypes
    x = normal(1000)
    bound, expected = coded.error_bound(x), parse("hadamard|int4:32").error_bound(x)
    assert bound is not None
    assert expected is not None
    assert torch.equal(bound, expected)


@pytest.mark.parametrize("spec", ["int4", "int8:round=stochastic", "hadamard|int4", "topk"])
def test_residuals_and_sums_are_the_codecs(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, coded = parse(spec), parse(f"{spec}|huffman")
    x = normal(9000)
    payloads, residuals = [], [torch.empty_like(x), torch.empty_like(x)]
    # Coding is undone only where a payload arrives: a residual is made of the payload before it is coded.
    monkeypatch.setattr(Huffman, "decode", None)
    for c, residual in zip((codec, coded), residuals, strict=True):
        room = torch.empty(c.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8)
        payloads.append(room[: c.encode_residual(x, room, residual, seed=4)])
    monkeypatch.undo()
    assert same_bits(*residuals)
    assert torch.equal(payloads[1], encode(coded, x, seed=4))
    sums = [torch.ones_like(x), torch.ones_like(x)]
    for c, payload, total in zip((codec, coded), payloads, sums, strict=True):
        c.decode_add(payload, total, x.dtype)
    assert same_bits(*sums)


def _damage(payload: Tensor, at: int, value: int) -> Tensor:
    damaged = payload.clone()
    damaged[at] = value
    return damaged


def test_refusals() -> None:
    codec = parse("int8|huffman")
    x = normal(16384)
    payload = encode(codec, x)
    scales = 4 * 128
    ints = 1 + scales
    sizes = ints + 1 + huffman.LENGTHS_NBYTES
    assert (payload[0], payload[ints]) == (0, 1)
    for damaged, message in (
        (payload[:0], "shorter or longer"),
        (payload[:ints], "shorter or longer"),
        (payload[: ints + 1], "shorter or longer"),
        (payload[: sizes + 31], "shorter or longer"),
        (payload[:-1], "shorter or longer"),
        (torch.cat([payload, payload[:1]]), "shorter or longer"),
        (_damage(payload, 0, 2), "unknown mode"),
        (_damage(payload, 0, 1), "."),
        (_damage(payload, ints, 255), "unknown mode"),
        (_damage(payload, ints + 1, 0xDD), "no prefix code"),
        (_damage(payload, ints + 1, 0x11), "no prefix code"),
        (_damage(payload, sizes + 1, 7), "larger than any code"),
        (_damage(payload, sizes, int(payload[sizes]) ^ 1), "shorter or longer"),
    ):
        out = torch.zeros_like(x)
        with pytest.raises(WireError, match=message):
            codec.decode(damaged.clone(), out)
        with pytest.raises(WireError, match=message):
            codec.decode_add(damaged.clone(), out, x.dtype)
        assert not out.any()


def test_streams_of_anything_give_some_values() -> None:
    """The sizes are right, the streams are not: whatever they hold, some bytes come out, and no others are touched."""
    codec = parse("int8|huffman")
    x = normal(20000)
    payload = encode(codec, x)
    start = payload.numel() - 15000
    for seed in range(20):
        damaged = payload.clone()
        damaged[start:] = torch.frombuffer(bytearray(noise(15000, seed)), dtype=torch.uint8)
        guarded = torch.full((20016,), 3.0)
        codec.decode(damaged, guarded[8:-8])
        assert (torch.cat([guarded[:8], guarded[-8:]]) == 3).all()


def test_a_damaged_payload_is_refused_by_the_codec() -> None:
    codec = parse("topk|huffman")
    x = normal(4096)
    payload = encode(codec, x)
    assert payload[9] == 0  # the places go as they are
    with pytest.raises(WireError, match="places of kept values"):
        codec.decode(_damage(payload, 10, 255), torch.empty_like(x))


def test_other_devices_are_refused() -> None:
    """A codec that has GPU kernels has none for the coder."""
    x = torch.empty(128, device="meta")
    with pytest.raises(UnsupportedError, match="cpu and cuda are supported"):
        parse("int4|huffman").encode(x, torch.empty(1000, dtype=torch.uint8, device="meta"))
    with pytest.raises(UnsupportedError, match=r"int4\S*\|huffman has no cuda kernel"):
        parse("int4|huffman")._check_dtype(torch.float32, torch.device("cuda"))

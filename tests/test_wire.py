"""Frames: the header byte for byte, and every way in which bytes can fail to be one."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import parse, wire
from thinwire.errors import WireError

GOLDEN = Path(__file__).parent / "golden" / "wire"
SPECS = ("none", "bf16", "int8:block=32", "mpc:dim=1")


def values(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Multiples of 1/8 that every codec here and every float dtype treats alike on all machines."""
    return ((torch.arange(numel) * 37 % 101 - 50) / 8).to(dtype)


def frame_of(spec: str, x: torch.Tensor, **options: bool) -> torch.Tensor:
    codec = parse(spec)
    out = torch.zeros(wire.max_frame_nbytes(codec, x.numel(), x.dtype, **options), dtype=torch.uint8)
    return out[: wire.pack(codec, x, out, **options)]


def reseal(header: bytearray) -> None:
    """Make the header's checksum right again, so that a later check has to find the fault."""
    header[28:32] = struct.pack("<I", zlib.crc32(bytes(header[:28])))


def changed(frame: torch.Tensor, offset: int, raw: bytes, *, seal: bool = True) -> torch.Tensor:
    data = bytearray(frame.numpy().tobytes())
    data[offset : offset + len(raw)] = raw
    if seal:
        head = data[:32]
        reseal(head)
        data[:32] = head
    return torch.frombuffer(data, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("checksum", [False, True])
def test_golden_bytes(spec: str, dtype: torch.dtype, checksum: bool) -> None:
    name = f"{spec.replace(':', '_').replace('=', '')}-{str(dtype)[6:]}-{'crc' if checksum else 'plain'}.bin"
    frame = frame_of(spec, values(37, dtype), checksum=checksum)
    # A missing file is a failure: a format that changes needs a new version, not a new file.
    assert frame.numpy().tobytes() == (GOLDEN / name).read_bytes()


def test_header_fields_are_where_the_format_says() -> None:
    codec = parse("bf16")
    frame = frame_of("bf16", values(5), checksum=True).numpy().tobytes()
    fields = struct.unpack("<2sBBIQQHHI", frame[:32])
    assert fields == (b"tw", 1, 1, zlib.crc32(str(codec).encode()), 5, 10, 1, 0, zlib.crc32(frame[:28]))
    assert struct.unpack("<I", frame[-4:])[0] == zlib.crc32(frame[32:-4])


@pytest.mark.parametrize("numel", [0, 1, 31, 1000])
@pytest.mark.parametrize("spec", SPECS)
def test_round_trip_and_add(spec: str, numel: int) -> None:
    codec, x = parse(spec), values(numel)
    frame = frame_of(spec, x)
    assert frame.numel() <= wire.max_frame_nbytes(codec, numel, x.dtype)
    if codec.fixed_size:
        assert frame.numel() == wire.max_frame_nbytes(codec, numel, x.dtype)
    out, total = torch.empty_like(x), torch.ones_like(x)
    wire.unpack(codec, frame, out)
    wire.unpack_add(codec, frame, total, x.dtype)
    assert torch.equal(total, 1 + out)


def test_residual_is_what_encoding_lost() -> None:
    codec, x = parse("int8:block=32"), values(100)
    out = torch.empty(wire.max_frame_nbytes(codec, 100, x.dtype), dtype=torch.uint8)
    residual, decoded = torch.empty(100), torch.empty(100)
    n = wire.pack(codec, x, out, residual=residual)
    wire.unpack(codec, out[:n], decoded)
    assert torch.equal(residual, x - decoded)


@pytest.mark.parametrize("bit", range(32 * 8))
def test_every_flipped_header_bit_is_found(bit: int) -> None:
    codec, x = parse("bf16"), values(5)
    raw = bytearray(frame_of("bf16", x).numpy().tobytes())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        wire.unpack(codec, torch.frombuffer(raw, dtype=torch.uint8), torch.empty(5))


@pytest.mark.parametrize("spec", SPECS)
def test_every_truncation_is_found(spec: str) -> None:
    frame = frame_of(spec, values(40))
    for n in range(frame.numel()):
        with pytest.raises(WireError, match=r"expected|has"):
            wire.unpack(parse(spec), frame[:n], torch.empty(40))


def test_a_future_version_says_what_to_do() -> None:
    # hivemind 545, hivemind 572
    frame = changed(frame_of("bf16", values(5)), 2, b"\x02")
    with pytest.raises(WireError, match=r"version 2, this thinwire reads 1; install the same version"):
        wire.unpack(parse("bf16"), frame, torch.empty(5))


@pytest.mark.parametrize(
    ("offset", "raw", "message"),
    [
        (0, b"xx", "magic"),
        (3, b"\x09", "dtype code 9"),
        (3, b"\x02", "dtype torch.float16, expected torch.float32"),
        (4, b"\0\0\0\0", "codec digest 0, expected"),
        (8, struct.pack("<Q", 6), "numel 6, expected 5"),
        (8, struct.pack("<Q", 2**63), "numel"),
        (16, struct.pack("<Q", 11), "truncated: payload of 11 bytes expected, 10 found"),
        (16, struct.pack("<Q", 2**63), "truncated"),
        (16, struct.pack("<Q", 8), "exactly 10 bytes, found 8"),
        (24, b"\x02\0", "unknown flags"),
        (26, b"\x01\0", "needs codec state 1, this end of the stream has none"),
    ],
)
def test_a_well_sealed_header_that_lies(offset: int, raw: bytes, message: str) -> None:
    frame = changed(frame_of("bf16", values(5)), offset, raw)
    with pytest.raises(WireError, match=message):
        wire.unpack(parse("bf16"), frame, torch.empty(5))


def test_another_codec_dtype_or_numel_is_refused_by_name() -> None:
    frame = frame_of("bf16", values(5))
    with pytest.raises(WireError, match=r"codec digest .* of fp16"):
        wire.unpack(parse("fp16"), frame, torch.empty(5))
    with pytest.raises(WireError, match=r"float32, expected torch\.float16"):
        wire.unpack(parse("bf16"), frame, torch.empty(5, dtype=torch.float16))
    with pytest.raises(WireError, match="numel 5, expected 4"):
        wire.unpack_add(parse("bf16"), frame, torch.empty(4), torch.float32)


def test_the_parameters_of_a_codec_are_in_its_digest() -> None:
    assert wire.digest(parse("int8:block=32")) != wire.digest(parse("int8:block=64"))


def test_payload_checksum_finds_every_flipped_bit() -> None:
    x = values(6)
    frame = frame_of("bf16", x, checksum=True)
    for bit in range(32 * 8, frame.numel() * 8):
        raw = bytearray(frame.numpy().tobytes())
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="checksum"):
            wire.unpack(parse("bf16"), torch.frombuffer(raw, dtype=torch.uint8), torch.empty(6))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("checksum", [False, True])
def test_padding_after_a_frame_is_ignored(spec: str, checksum: bool) -> None:
    x, out = values(40), torch.empty(40)
    frame = frame_of(spec, x, checksum=checksum)
    wire.unpack(parse(spec), frame, out)
    padded = torch.cat([frame, torch.full((57,), 255, dtype=torch.uint8)])
    again = torch.empty(40)
    wire.unpack(parse(spec), padded, again)
    assert torch.equal(out, again)


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=200), seal=st.booleans(), spec=st.sampled_from(SPECS))
def test_arbitrary_bytes_never_decode_as_a_frame(raw: bytes, seal: bool, spec: str) -> None:
    data = bytearray(raw)
    if seal and len(data) >= 32:
        # Right up to the payload: decoding itself has to be safe.
        head = bytearray(
            struct.pack("<2sBBIQQHH", b"tw", 1, 1, wire.digest(parse(spec)), 40, len(data) - 32, 0, 0)
        )
        data[:32] = head + bytes(4)
        head = data[:32]
        reseal(head)
        data[:32] = head
    frame = torch.frombuffer(data or bytearray(1), dtype=torch.uint8)
    out = torch.zeros(44)
    try:
        wire.unpack(parse(spec), frame, out[2:42])
    except WireError:
        assert not out.any() or spec.startswith("mpc")
    assert not out[:2].any()
    assert not out[42:].any()


def test_max_frame_nbytes_counts_header_and_checksum() -> None:
    codec = parse("bf16")
    assert wire.max_frame_nbytes(codec, 7, torch.float32) == 32 + 14
    assert wire.max_frame_nbytes(codec, 7, torch.float32, checksum=True) == 32 + 14 + 4

"""Bytes to frame and back: a 32-byte header in front of every payload. Normative: docs/wire-format.md.

::

    offset  size  field
         0     2  magic, 0x74 0x77 ("tw")
         2     1  version of this format
         3     1  dtype of the values, see DTYPES
         4     4  digest of the codec's spec (CRC-32 of its text)
         8     8  numel: values in the payload
        16     8  nbytes: payload bytes that follow the header, the checksum excluded
        24     2  flags: bit 0, a CRC-32 of the payload follows it
        26     2  id of the state that the decoder needs (codecs/state.py), 0 for none
        28     4  CRC-32 of bytes 0..27

All fields are little-endian. A receiver knows what it expects (codec, dtype, numel): everything in the
header is compared with that before one byte of the payload is looked at.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .codecs.base import Codec
from .codecs.state import CodecState
from .errors import WireError

VERSION = 1
HEADER_NBYTES = 32
CHECKSUM_NBYTES = 4
_MAGIC = b"tw"
_FIELDS = struct.Struct("<2sBBIQQHH")
_CRC = struct.Struct("<I")
_FLAG_CHECKSUM = 1

DTYPES: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float64: 4,
}
_DTYPE_OF = {code: dtype for dtype, code in DTYPES.items()}


@dataclass(frozen=True)
class Header:
    """What a frame says of itself."""

    dtype: torch.dtype
    digest: int
    numel: int
    nbytes: int
    checksum: bool
    state: int

    @property
    def frame_nbytes(self) -> int:
        """Size of the whole frame in bytes."""
        return HEADER_NBYTES + self.nbytes + (CHECKSUM_NBYTES if self.checksum else 0)


@lru_cache(maxsize=1024)
def digest(codec: Codec) -> int:
    """What a frame's header holds of the codec: CRC-32 of its spec."""
    return zlib.crc32(str(codec).encode())


def max_frame_nbytes(codec: Codec, numel: int, dtype: torch.dtype, *, checksum: bool = False) -> int:
    """Upper bound of a frame's size in bytes; exact if the codec is of fixed size."""
    return HEADER_NBYTES + codec.max_nbytes(numel, dtype) + (CHECKSUM_NBYTES if checksum else 0)


def pack(
    codec: Codec,
    x: Tensor,
    out: Tensor,
    *,
    seed: int = 0,
    residual: Tensor | None = None,
    checksum: bool = False,
    state: CodecState | None = None,
) -> int:
    """Encode x into the frame ``out[:n]`` (uint8) and return n, its size in bytes.

    residual: an fp32 tensor of x's numel that receives ``x - decoded``; it may be x itself. state: the sender's of
    the stream of frames, if the codec has one.
    """
    numel, dtype = x.numel(), x.dtype
    body = out[HEADER_NBYTES:]
    if residual is None:
        nbytes = codec.encode(x, body, seed=seed, state=state)
    else:
        nbytes = codec.encode_residual(x, body, residual, seed=seed, state=state)
    flags = _FLAG_CHECKSUM if checksum else 0
    needs = 0 if state is None else state.needs
    out[:HEADER_NBYTES].copy_(_header(dtype, digest(codec), numel, nbytes, flags, needs))
    if not checksum:
        return HEADER_NBYTES + nbytes
    _write(body[nbytes : nbytes + CHECKSUM_NBYTES], _CRC.pack(_crc(body[:nbytes])))
    return HEADER_NBYTES + nbytes + CHECKSUM_NBYTES


def unpack(codec: Codec, frame: Tensor, out: Tensor, *, state: CodecState | None = None) -> None:
    """Decode a frame into ``out``. Raises WireError if it is not a frame of this codec, dtype and numel.

    state: the receiver's of the stream of frames, if the codec has one.
    """
    codec.decode(payload(codec, frame, out.numel(), out.dtype, state), out, state=state)


def unpack_add(
    codec: Codec, frame: Tensor, out: Tensor, dtype: torch.dtype, *, state: CodecState | None = None
) -> None:
    """Add the decoded values of a frame to ``out`` (fp32). dtype: the one that was encoded."""
    codec.decode_add(payload(codec, frame, out.numel(), dtype, state), out, dtype, state=state)


def payload(
    codec: Codec, frame: Tensor, numel: int, dtype: torch.dtype, state: CodecState | None = None
) -> Tensor:
    """The payload of a frame, after every check that the header allows."""
    header = read_header(frame)
    have_state = 0 if state is None else state.id
    if header.state not in (0, have_state):
        raise WireError(
            f"frame needs codec state {header.state}, this end of the stream has {have_state or 'none'}: both ends begin "
            "without one, or with those of one checkpoint"
        )
    if header.digest != digest(codec):
        raise WireError(f"frame has codec digest {header.digest}, expected {digest(codec)} of {codec}")
    _expect("dtype", header.dtype, dtype)
    _expect("numel", header.numel, numel)
    tail = CHECKSUM_NBYTES if header.checksum else 0
    # A padded frame is longer than its payload; a truncated one is shorter.
    have = frame.numel() - HEADER_NBYTES - tail
    if header.nbytes > have:
        raise WireError(
            f"frame is truncated: payload of {header.nbytes} bytes expected, {max(have, 0)} found"
        )
    body = frame[HEADER_NBYTES : HEADER_NBYTES + header.nbytes]
    if header.checksum:
        end = HEADER_NBYTES + header.nbytes
        (stored,) = _CRC.unpack(_read(frame[end : end + CHECKSUM_NBYTES]))
        _expect("payload checksum", _crc(body), stored)
    return body


def read_header(frame: Tensor) -> Header:
    """The header of a frame (1-D uint8). Raises WireError if the bytes are not a header of this version."""
    if frame.numel() < HEADER_NBYTES:
        raise WireError(f"frame is truncated: a header has {HEADER_NBYTES} bytes, found {frame.numel()}")
    return _parse_header(_read(frame[:HEADER_NBYTES]))


# A program sends messages of a few kinds over and over, so headers are made and read once.


@lru_cache(maxsize=1024)
def _header(dtype: torch.dtype, codec: int, numel: int, nbytes: int, flags: int, state: int) -> Tensor:
    fields = _FIELDS.pack(_MAGIC, VERSION, DTYPES[dtype], codec, numel, nbytes, flags, state)
    return torch.frombuffer(bytearray(fields + _CRC.pack(zlib.crc32(fields))), dtype=torch.uint8)


@lru_cache(maxsize=1024)
def _parse_header(raw: bytes) -> Header:
    magic, version, dtype, codec, numel, nbytes, flags, state = _FIELDS.unpack(raw[:28])
    _expect("magic", magic, _MAGIC)
    if version != VERSION:
        raise WireError(
            f"frame is of format version {version}, this thinwire reads {VERSION}; install the same version on all ranks"
        )
    _expect("header checksum", zlib.crc32(raw[:28]), _CRC.unpack(raw[28:])[0])
    if dtype not in _DTYPE_OF:
        raise WireError(f"frame has dtype code {dtype}; known: {sorted(_DTYPE_OF)}")
    if flags & ~_FLAG_CHECKSUM:
        raise WireError(f"frame has unknown flags {flags:#06x}")
    return Header(_DTYPE_OF[dtype], codec, numel, nbytes, bool(flags & _FLAG_CHECKSUM), state)


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise WireError(f"frame has {what} {found}, expected {expected}")


def _write(target: Tensor, raw: bytes) -> None:
    target.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def _read(source: Tensor) -> bytes:
    return source.cpu().numpy().tobytes()


def _crc(body: Tensor) -> int:
    return zlib.crc32(body.cpu().contiguous().numpy().data)

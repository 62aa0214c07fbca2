"""Frames that nobody sent: a decoder must refuse them or give some values, and do nothing else."""

from __future__ import annotations

import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from .. import wire
from ..codecs import Codec
from ..codecs.state import CodecState
from ..errors import WireError

_GUARD = 64  # bytes on each side of what a decoder may write
_FILL = 0xA5
_NUMELS = (0, 1, 2, 3, 5, 31, 33, 127, 129, 1000, 4097)


def fuzz_codec(codec: Codec, cases: int, seed: int = 0) -> Counter[str]:
    """Decode ``cases`` damaged frames of a codec; how many were ``accepted`` and ``refused`` (WireError).

    Raises AssertionError for any other exception, for a write outside of the output, and for a changed frame; the
    message gives the frame. Damage: flipped bits, random payloads, wrong lengths, headers that lie under a right
    checksum. Frames of a stateful codec are those of a stream, or are decoded without its state.
    """
    rng = random.Random(f"{codec} {seed}")
    dtypes = sorted(codec.dtypes & set(wire.DTYPES), key=str)
    found: Counter[str] = Counter()
    for _ in range(cases):
        dtype, numel = rng.choice(dtypes), rng.choice(_NUMELS)
        frame, state = _frame(codec, dtype, numel, rng)
        damaged = rng.choice(_DAMAGES)(frame, rng)
        add = rng.random() < 0.3
        found[_decode(codec, damaged, dtype, numel, add, state)] += 1
    return found


def _frame(
    codec: Codec, dtype: torch.dtype, numel: int, rng: random.Random
) -> tuple[bytearray, CodecState | None]:
    """A frame, and what its receiver remembers."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    x = (x * 10.0 ** rng.randint(-20, 20)).clamp(-6e4, 6e4).to(dtype)
    checksum = rng.random() < 0.1
    room = torch.empty(wire.max_frame_nbytes(codec, numel, dtype, checksum=checksum), dtype=torch.uint8)
    sender, receiver = codec.new_state(), codec.new_state()
    if sender is not None and rng.random() < 0.7:
        first = room[: wire.pack(codec, x, room, state=sender)]
        wire.unpack(codec, first, torch.empty_like(x), state=receiver)
    nbytes = wire.pack(codec, x, room, checksum=checksum, state=sender)
    return bytearray(room[:nbytes].numpy().tobytes()), receiver if rng.random() < 0.9 else None


def _flip(frame: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.randint(1, 8)):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return frame


def _payload(frame: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.randint(1, 32)):
        if len(frame) > wire.HEADER_NBYTES:
            frame[rng.randrange(wire.HEADER_NBYTES, len(frame))] = rng.choice((0, 0xFF, rng.randrange(256)))
    return frame


def _noise(frame: bytearray, rng: random.Random) -> bytearray:
    return frame[: wire.HEADER_NBYTES] + rng.randbytes(len(frame) - wire.HEADER_NBYTES)


def _length(frame: bytearray, rng: random.Random) -> bytearray:
    if rng.random() < 0.7:
        return frame[: rng.randrange(len(frame) + 1)]
    return frame + rng.randbytes(rng.randint(1, 100))


def _lie(frame: bytearray, rng: random.Random) -> bytearray:
    """A header with other fields and a checksum that is right for them."""
    offset, form, most = rng.choice(((2, "<B", 255), (3, "<B", 8), (8, "<Q", 2**64 - 1), (16, "<Q", 2**64 - 1),
                                     (16, "<Q", len(frame)), (24, "<H", 3), (26, "<H", 65535)))  # fmt: skip
    struct.pack_into(form, frame, offset, rng.choice((0, 1, most, rng.randint(0, most))))
    struct.pack_into("<I", frame, 28, zlib.crc32(frame[:28]))
    return frame


_DAMAGES: tuple[Callable[[bytearray, random.Random], bytearray], ...] = (
    _flip,
    _payload,
    _noise,
    _length,
    _lie,
)


def _decode(
    codec: Codec, damaged: bytearray, dtype: torch.dtype, numel: int, add: bool, state: CodecState | None
) -> str:
    frame = torch.frombuffer(damaged, dtype=torch.uint8) if damaged else torch.empty(0, dtype=torch.uint8)
    before = bytes(damaged)
    kind = torch.float32 if add else dtype
    nbytes = numel * kind.itemsize
    room = torch.full((nbytes + 2 * _GUARD,), _FILL, dtype=torch.uint8)
    out = room[_GUARD : _GUARD + nbytes].view(kind)
    what = f"{codec}, {dtype}, {numel} values, {'decode_add' if add else 'decode'} of {before.hex()}"
    try:
        if add:
            wire.unpack_add(codec, frame, out, dtype, state=state)
        else:
            wire.unpack(codec, frame, out, state=state)
        result = "accepted"
    except WireError:
        result = "refused"
    except Exception as e:
        raise AssertionError(f"{type(e).__name__}: {e}; {what}") from e
    guards: Tensor = torch.cat([room[:_GUARD], room[_GUARD + nbytes :]])
    if not bool((guards == _FILL).all()):
        raise AssertionError(f"wrote outside of the output; {what}")
    if bytes(damaged) != before:
        raise AssertionError(f"changed the frame; {what}")
    return result

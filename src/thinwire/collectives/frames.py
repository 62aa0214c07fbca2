"""Frames for several peers in one buffer, and their exchange.

Fixed-size codecs: both ends know every frame's size, so one exchange is enough. Variable-size codecs go
in two phases (sizes, then bytes) or padded to their upper bound, which spares a device the wait for a size.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import wire
from ..codecs.base import Codec
from ..errors import WireError
from .pairwise import Pairwise
from .transport import Exchange, Metered, Pending


@dataclass(frozen=True)
class Chunks:
    """How ``numel`` values are dealt to ``size`` owners: contiguous, equal but for the end.

    Every start is a multiple of the codec's granule, so no coded block is cut.
    """

    numel: int
    size: int
    length: int

    @staticmethod
    def of(numel: int, size: int, granule: int) -> Chunks:
        share = -(-numel // size)
        return Chunks(numel, size, -(-share // granule) * granule)

    def bounds(self, owner: int) -> tuple[int, int]:
        """First value and end of an owner's chunk; empty for the last owners of a short tensor."""
        return min(owner * self.length, self.numel), min((owner + 1) * self.length, self.numel)


def segment_step(segment_numel: int, size: int, granule: int) -> int:
    """Values of each rank that travel at once, a multiple of the granule: ``segment_numel`` over all ranks."""
    return max(segment_numel // size // granule, 1) * granule


@dataclass
class Outgoing:
    """Encoded frames, one after the other. ``sizes[p]`` is that of the frame for peer p, 0 for none."""

    buffer: Tensor
    sizes: list[int]


@dataclass
class Incoming:
    """Frames on their way from each peer; ``wait`` gives them, an empty tensor where there is none."""

    pending: Pending
    buffer: Tensor
    sizes: list[int]
    keep: Tensor | list[Tensor]  # what is being sent must outlive the transfer

    def __post_init__(self) -> None:
        self._frames = torch.split(self.buffer, self.sizes)

    def wait(self) -> list[Tensor]:
        self.pending.wait()
        return list(self._frames)


@dataclass
class Exchanged(Incoming):
    """Of an all-to-all: each frame can be had as soon as it is there. ``wait`` at the end: what was sent has left, too."""

    pending: Exchange

    def wait_for(self, peer: int) -> Tensor:
        """The frame of rank ``peer``; empty if there is none."""
        self.pending.wait_for(peer)
        return self._frames[peer]


def encode_each(
    codec: Codec,
    values: Sequence[Tensor | None],
    transport: Metered,
    *,
    to: Sequence[int],
    seeds: Sequence[int],
    residuals: Sequence[Tensor | None],
    device: torch.device,
    padded: bool = False,
    measured: bool = False,
) -> Outgoing:
    """Encode one tensor (None: nothing) for each receiver in ``to`` into one buffer.

    measured: these frames stand for the whole encoding, of which a sampled call's error is taken.
    """
    bounds = [0 if v is None else max_nbytes(codec, v.numel(), v.dtype, transport) for v in values]
    buffer = torch.empty(sum(bounds), dtype=torch.uint8, device=device)
    chosen = transport.watch.choose(codec, values) if measured else None
    sizes: list[int] = []
    end = 0
    with transport.tally.encoding():
        for value, bound, peer, seed, residual in zip(values, bounds, to, seeds, residuals, strict=True):
            if value is None:
                sizes.append(0)
                continue
            state = transport.ends.sender(codec, value.numel(), value.dtype, peer)
            room = buffer[end : end + bound]
            nbytes = wire.pack(
                codec, value, room, seed=seed, residual=residual, checksum=transport.checksum, state=state
            )
            sizes.append(bound if padded else nbytes)
            end += sizes[-1]
    if chosen is not None:
        start, value = sum(sizes[:chosen]), values[chosen]
        assert value is not None
        frame = buffer[start : start + sizes[chosen]]
        transport.watch.after_frame(codec, frame, value, residuals[chosen])
    return Outgoing(buffer[:end], sizes)


def exchange(
    codec: Codec,
    outgoing: Outgoing,
    bounds: Sequence[int],
    transport: Metered,
    *,
    padded: bool = False,
    in_rounds: bool = False,
) -> Exchanged:
    """Start the all-to-all of frames. ``bounds[p]``: upper bound of the frame that rank p sends here."""
    sizes = list(bounds)
    if announces(codec, transport, padded=padded):
        sizes = _exchange_sizes(outgoing, transport)
        _check_sizes(sizes, bounds)
    buffer = outgoing.buffer.new_empty(sum(sizes))
    exchange = transport.all_to_all(buffer, outgoing.buffer, sizes, outgoing.sizes, in_rounds=in_rounds)
    return Exchanged(exchange, buffer, sizes, outgoing.buffer)


def announces(codec: Codec, transport: Metered, *, padded: bool) -> bool:
    """Whether the sizes of this codec's frames must be told before the frames; counts which mode it is."""
    if codec.fixed_size:
        return False
    if padded:
        transport.tally.padded += 1
    else:
        transport.tally.two_phase += 1
    return not padded


@dataclass(frozen=True)
class Leaving:
    """Frames for a peer, one after the other: a message."""

    peer: int
    frames: Tensor
    sizes: Sequence[int]


@dataclass(frozen=True)
class Coming:
    """A message from a peer: upper bounds of its frames; None: anything."""

    peer: int
    bounds: Sequence[int | None]


def exchange_some(
    leaving: Sequence[Leaving],
    coming: Sequence[Coming],
    pairwise: Pairwise,
    *,
    announced: bool,
    in_rounds: bool = False,
) -> Incoming:
    """Start sending messages to some peers; those of a pair travel in this order on both sides.

    announced: the sizes go first; else all frames are as long as their bounds. ``wait`` gives the frames of ``coming``.
    """
    bounds = [(message.peer, bound) for message in coming for bound in message.bounds]
    sizes = _sizes_of_some(leaving, coming, pairwise) if announced else [bound or 0 for _, bound in bounds]
    for (peer, bound), size in zip(bounds, sizes, strict=True):
        _check_size(size, size if bound is None else bound, peer)
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=pairwise.device)
    left, lengths = iter(sizes), []
    for message in coming:
        lengths.append(sum(next(left) for _ in message.bounds))
    places = list(zip([message.peer for message in coming], torch.split(buffer, lengths), strict=True))
    exchange = pairwise.start([(m.peer, m.frames) for m in leaving], places, in_rounds=in_rounds)
    return Incoming(exchange, buffer, sizes, [m.frames for m in leaving])


def gather(
    codec: Codec, frame: Tensor, bounds: Sequence[int], transport: Metered, *, padded: bool = False
) -> Incoming:
    """Start the all-gather of one frame per rank. ``bounds[p]``: upper bound of rank p's frame.

    A frame travels in a slot of the largest size: exact where all chunks are equal.
    """
    slot = max(bounds)
    if announces(codec, transport, padded=padded):
        sizes = _gather_sizes(frame, transport)
        _check_sizes(sizes, bounds)
        slot = max(sizes)
    mine = frame
    if frame.numel() != slot:
        mine = frame.new_zeros(slot)
        mine[: frame.numel()] = frame
    buffer = mine.new_empty(slot * transport.size)
    pending = transport.all_gather(buffer, mine)
    return Incoming(pending, buffer, [slot] * transport.size, mine)


def max_nbytes(codec: Codec, numel: int, dtype: torch.dtype, transport: Metered) -> int:
    """Upper bound of a frame's size over this transport, in bytes; exact if the codec is of fixed size."""
    return wire.max_frame_nbytes(codec, numel, dtype, checksum=transport.checksum)


def decode(codec: Codec, frame: Tensor, out: Tensor, transport: Metered, source: int, to: int) -> None:
    """Decode rank source's frame for rank ``to`` (or EVERYONE) into out. Raises WireError, which names the source."""
    state = transport.ends.receiver(codec, out.numel(), out.dtype, source, to)
    try:
        wire.unpack(codec, frame, out, state=state)
    except WireError as e:
        raise _from(source, e) from e


def decode_add(
    codec: Codec, frame: Tensor, out: Tensor, dtype: torch.dtype, transport: Metered, source: int, to: int
) -> None:
    """Add the values of rank source's frame for rank ``to`` to out (fp32). dtype: the one that was encoded."""
    state = transport.ends.receiver(codec, out.numel(), dtype, source, to)
    try:
        wire.unpack_add(codec, frame, out, dtype, state=state)
    except WireError as e:
        raise _from(source, e) from e


def read_header(frame: Tensor, source: int) -> wire.Header:
    """The header of rank source's frame. Raises WireError, which names the source."""
    try:
        return wire.read_header(frame)
    except WireError as e:
        raise _from(source, e) from e


def _from(source: int, error: WireError) -> WireError:
    return WireError(f"from rank {source}: {error}")


def equal_parts(flat: Tensor, size: int) -> list[Tensor]:
    """``size`` views of a flat tensor, of numel / size each."""
    numel = flat.numel() // size
    return [flat[p * numel : (p + 1) * numel] for p in range(size)]


def _check_sizes(sizes: Sequence[int], bounds: Sequence[int]) -> None:
    """Nothing is allocated for a size that a peer announces before it is known to be possible."""
    for peer, (size, bound) in enumerate(zip(sizes, bounds, strict=True)):
        _check_size(size, bound, peer)


def _check_size(size: int, bound: int, peer: int) -> None:
    if not 0 <= size <= bound:
        raise WireError(f"rank {peer} announces a frame of {size} bytes, at most {bound} are possible")


def _sizes_of_some(leaving: Sequence[Leaving], coming: Sequence[Coming], pairwise: Pairwise) -> list[int]:
    """The sizes of all frames of ``coming``; of each pair in one message."""
    told: dict[int, list[int]] = {}
    for message in leaving:
        told.setdefault(message.peer, []).extend(map(_sealed, message.sizes))
    counts: dict[int, int] = {}
    for expected in coming:
        counts[expected.peer] = counts.get(expected.peer, 0) + len(expected.bounds)
    mine = {
        peer: torch.tensor(sizes, dtype=torch.int64, device=pairwise.device) for peer, sizes in told.items()
    }
    theirs = {peer: torch.empty(n, dtype=torch.int64, device=pairwise.device) for peer, n in counts.items()}
    pairwise.start(
        [(peer, sizes.view(torch.uint8)) for peer, sizes in mine.items()],
        [(peer, sizes.view(torch.uint8)) for peer, sizes in theirs.items()],
    ).wait()
    left = {peer: iter(sizes.tolist()) for peer, sizes in theirs.items()}
    return [_unsealed(next(left[m.peer]), m.peer) for m in coming for _ in m.bounds]


def _exchange_sizes(outgoing: Outgoing, transport: Metered) -> list[int]:
    sealed = [_sealed(size) for size in outgoing.sizes]
    mine = torch.tensor(sealed, dtype=torch.int64, device=outgoing.buffer.device)
    theirs = torch.empty_like(mine)
    splits = [8] * transport.size
    transport.all_to_all(theirs.view(torch.uint8), mine.view(torch.uint8), splits, splits).wait()
    return [_unsealed(n, peer) for peer, n in enumerate(theirs.tolist())]


def _gather_sizes(frame: Tensor, transport: Metered) -> list[int]:
    mine = torch.tensor([_sealed(frame.numel())], dtype=torch.int64, device=frame.device)
    every = mine.new_empty(transport.size)
    transport.all_gather(every.view(torch.uint8), mine.view(torch.uint8)).wait()
    return [_unsealed(n, peer) for peer, n in enumerate(every.tolist())]


def _sealed(size: int) -> int:
    """A frame's size in 48 bits and 15 bits of their CRC-32 above.

    A size that changed on its way would be one that the transport, which knows the real one, ends the process for.
    """
    return size | (zlib.crc32(size.to_bytes(6, "little")) & 0x7FFF) << 48


def _unsealed(sealed: int, peer: int) -> int:
    size = sealed & (1 << 48) - 1
    if sealed != _sealed(size):
        raise WireError(f"from rank {peer}: the size of a frame has a wrong checksum: {sealed:#018x}")
    return size

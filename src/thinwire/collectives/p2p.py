"""Send and receive of one tensor.

Fixed size: one transfer of the whole frame. Variable size: the header first, which says how long the rest is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import wire
from ..codecs.base import Codec
from ..errors import WireError
from . import frames
from .transport import Metered, Pending


def send(x: Tensor, codec: Codec, transport: Metered, dst: int, seed: int = 0) -> None:
    """Send x (flat, contiguous) to rank dst; returns when the bytes have left the buffer."""
    watch = transport.watch
    frame, sending = send_frame(x, watch.codec(codec), transport, dst, seed, measured=True)
    for pending in sending:
        pending.wait()
    del frame
    if watch.sampled:
        row = watch.row(x.device)
        transport.send(row, dst).wait()
        watch.conclude(row.cpu(), speak=True)


def recv(out: Tensor, codec: Codec, transport: Metered, src: int) -> None:
    """Fill out (flat, contiguous) with the next tensor from rank src."""
    watch = transport.watch
    codec = watch.codec(codec)
    frame = recv_frame(codec, out.numel(), out.dtype, transport, src, out.device)
    with transport.tally.decoding():
        frames.decode(codec, frame, out, transport, src, transport.rank)
    if watch.sampled:
        row = watch.row(out.device)  # of the right size
        transport.recv(row, src).wait()
        watch.conclude(row.cpu(), speak=False)


def send_frame(
    x: Tensor, codec: Codec, transport: Metered, dst: int, seed: int, *, measured: bool = False
) -> tuple[Tensor, list[Pending]]:
    """Encode x and start sending it. The frame must be kept until the transfers are done.

    measured: as of :func:`~thinwire.collectives.frames.encode_each`.
    """
    bound = frames.max_nbytes(codec, x.numel(), x.dtype, transport)
    buffer = torch.empty(bound, dtype=torch.uint8, device=x.device)
    chosen = transport.watch.choose(codec, [x]) if measured else None
    with transport.tally.encoding():
        state = transport.ends.sender(codec, x.numel(), x.dtype, dst)
        nbytes = wire.pack(codec, x, buffer, seed=seed, checksum=transport.checksum, state=state)
    frame = buffer[:nbytes]
    if chosen is not None:
        transport.watch.after_frame(codec, frame, x, None)
    if codec.fixed_size:
        return frame, [transport.send(frame, dst)]
    transport.tally.two_phase += 1
    head, body = frame[: wire.HEADER_NBYTES], frame[wire.HEADER_NBYTES :]
    return frame, [transport.send(part, dst) for part in (head, body) if part.numel()]


def recv_frame(
    codec: Codec, numel: int, dtype: torch.dtype, transport: Metered, src: int, device: torch.device
) -> Tensor:
    """Receive the frame of numel values from rank src. Raises WireError if it cannot be one."""
    bound = frames.max_nbytes(codec, numel, dtype, transport)
    frame = torch.empty(bound, dtype=torch.uint8, device=device)
    if codec.fixed_size:
        transport.recv(frame, src).wait()
        return frame
    transport.recv(frame[: wire.HEADER_NBYTES], src).wait()
    end = frames.read_header(frame[: wire.HEADER_NBYTES], src).frame_nbytes
    if end > bound:
        raise WireError(
            f"rank {src} announces {end} bytes, a frame of {numel} {dtype} values has at most {bound}"
        )
    if end > wire.HEADER_NBYTES:
        transport.recv(frame[wire.HEADER_NBYTES : end], src).wait()
    return frame[:end]

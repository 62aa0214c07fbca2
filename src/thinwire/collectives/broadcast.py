"""Broadcast: the root encodes once, the bytes are forwarded, everyone decodes them, the root too."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import wire
from ..codecs.base import Codec
from .options import CallOptions, derive_seed
from .streams import EVERYONE
from .transport import Metered


def broadcast(x: Tensor, codec: Codec, transport: Metered, root: int, options: CallOptions) -> None:
    """Replace x (flat, contiguous) by that of rank ``root`` as it was decoded, on every rank."""
    codec, watch = transport.watch.codec(codec), transport.watch
    bound = wire.max_frame_nbytes(codec, x.numel(), x.dtype)
    frame = torch.zeros(bound, dtype=torch.uint8, device=x.device)
    nbytes = bound
    # encode
    if transport.rank == root:
        chosen = watch.choose(codec, [x])
        with transport.tally.encoding():
            state = transport.ends.sender(codec, x.numel(), x.dtype, EVERYONE)
            nbytes = wire.pack(codec, x, frame, seed=derive_seed(options.seed, root, -1, 0), state=state)
        if chosen is not None:
            watch.after_frame(codec, frame[:nbytes], x, None)
    # send
    if not codec.fixed_size and not options.padded:
        transport.tally.two_phase += 1
        head = frame[: wire.HEADER_NBYTES]
        transport.broadcast(head, root).wait()
        nbytes = min(wire.HEADER_NBYTES + wire.read_header(head).nbytes, bound)
        transport.broadcast(frame[wire.HEADER_NBYTES : nbytes], root).wait()
    else:
        transport.tally.padded += 0 if codec.fixed_size else 1
        transport.broadcast(frame, root).wait()
    # decode
    with transport.tally.decoding():
        state = transport.ends.receiver(codec, x.numel(), x.dtype, root, EVERYONE)
        wire.unpack(codec, frame[:nbytes], x, state=state)

"""Broadcast: the root encodes once, the bytes are forwarded, everyone decodes them, the root too."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import wire
from ..codecs.base import Codec
from . import frames
from .options import CallOptions, derive_seed
from .streams import EVERYONE
from .transport import Metered


def broadcast(x: Tensor, codec: Codec, transport: Metered, root: int, options: CallOptions) -> None:
    """Replace x (flat, contiguous) by that of rank ``root`` as it was decoded, on every rank."""
    codec, watch = transport.watch.codec(codec), transport.watch
    bound = frames.max_nbytes(codec, x.numel(), x.dtype, transport)
    frame = torch.zeros(bound, dtype=torch.uint8, device=x.device)
    nbytes = bound
    # encode
    if transport.rank == root:
        chosen = watch.choose(codec, [x])
        with transport.tally.encoding():
            state = transport.ends.sender(codec, x.numel(), x.dtype, EVERYONE)
            seed = derive_seed(options.seed, root, -1, 0)
            nbytes = wire.pack(codec, x, frame, seed=seed, checksum=transport.checksum, state=state)
        if chosen is not None:
            watch.after_frame(codec, frame[:nbytes], x, None)
    # send
    if not codec.fixed_size and not options.padded:
        transport.tally.two_phase += 1
        head = frame[: wire.HEADER_NBYTES]
        transport.broadcast(head, root).wait()
        nbytes = min(frames.read_header(head, root).frame_nbytes, bound)
        transport.broadcast(frame[wire.HEADER_NBYTES : nbytes], root).wait()
    else:
        transport.tally.padded += 0 if codec.fixed_size else 1
        transport.broadcast(frame, root).wait()
    # decode
    with transport.tally.decoding():
        frames.decode(codec, frame[:nbytes], x, transport, root, EVERYONE)

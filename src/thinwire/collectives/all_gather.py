"""All-gather: every rank's values on every rank. Encoded once, the bytes are forwarded, everyone decodes.

The sender decodes its own bytes too, so all ranks end with the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from ..codecs.base import Codec
from . import frames
from .frames import Incoming
from .options import CallOptions, derive_seed
from .streams import EVERYONE
from .transport import Metered


def all_gather(
    x: Tensor,
    outs: Sequence[Tensor],
    codec: Codec,
    transport: Metered,
    options: CallOptions,
    *,
    residual: Tensor | None = None,
) -> None:
    """Fill ``outs[p]`` with rank p's x as it was decoded. Sizes may differ between ranks; all know them.

    x and outs: flat, one dtype. residual: as in :func:`~thinwire.collectives.reduce_scatter.reduce_scatter`;
    the frames are then fp32, and so must outs be.
    """
    # compensate: from here on the residual holds x + residual, and encoding leaves in it what was lost.
    values = x if residual is None else residual.add_(x)
    in_flight: deque[tuple[list[Tensor], Incoming]] = deque()
    step = frames.segment_step(options.segment_numel, transport.size, codec.granule)
    longest = max(out.numel() for out in outs)
    for index, start in enumerate(range(0, max(longest, 1), step)):
        # encode
        part = values[start : start + step]
        outgoing = frames.encode_each(
            codec,
            [part],
            transport,
            device=values.device,
            to=[EVERYONE],
            seeds=[derive_seed(options.seed, transport.rank, -1, index)],
            residuals=[None if residual is None else part],
            padded=options.padded,
        )
        # send
        targets = [out[start : start + step] for out in outs]
        bounds = [frames.max_nbytes(codec, target.numel(), values.dtype, transport) for target in targets]
        incoming = frames.gather(codec, outgoing.buffer, bounds, transport, padded=options.padded)
        in_flight.append((targets, incoming))
        if len(in_flight) > options.depth:
            _decode(codec, *in_flight.popleft(), transport)
    while in_flight:
        _decode(codec, *in_flight.popleft(), transport)


def _decode(codec: Codec, targets: list[Tensor], incoming: Incoming, transport: Metered) -> None:
    received = incoming.wait()
    with transport.tally.decoding():
        for peer, (frame, target) in enumerate(zip(received, targets, strict=True)):
            frames.decode(codec, frame, target, transport, peer, EVERYONE)

"""All-gather: every rank's values on every rank. Encoded once, the bytes are forwarded, everyone decodes.

The sender decodes its own bytes too, so all ranks end with the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from ..codecs.base import Codec
from . import frames
from .choice import resolve
from .frames import Incoming
from .hierarchical import hierarchical_all_gather
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
    numel = sum(out.numel() for out in outs)
    codec, options = resolve("all_gather", codec, numel, x.dtype, transport, options)
    if options.algorithm == "hierarchical":
        hierarchical_all_gather(x, outs, codec, transport, options, residual=residual)
        return
    codec = transport.watch.codec(codec)
    lengths = [out.numel() for out in outs]
    for where, received in gather_frames(x, lengths, codec, transport, options, residual=residual):
        with transport.tally.decoding():
            for peer, frame in enumerate(received):
                frames.decode(codec, frame, outs[peer][where], transport, peer, EVERYONE)


def gather_frames(
    x: Tensor,
    lengths: Sequence[int],
    codec: Codec,
    transport: Metered,
    options: CallOptions,
    *,
    residual: Tensor | None = None,
) -> Iterator[tuple[slice, list[Tensor]]]:
    """For each segment of the values, which ones they are and every rank's frame of them; the next ones travel meanwhile.

    lengths: numel of every rank's x. residual: as in :func:`all_gather`.
    """
    # compensate: from here on the residual holds x + residual, and encoding leaves in it what was lost.
    values = x if residual is None else residual.add_(x)
    in_flight: deque[tuple[slice, Incoming]] = deque()
    step = frames.segment_step(options.segment_numel, transport.size, codec.granule)
    for index, start in enumerate(range(0, max(*lengths, 1), step)):
        # encode
        where = slice(start, start + step)
        part = values[where]
        outgoing = frames.encode_each(
            codec,
            [part],
            transport,
            device=values.device,
            to=[EVERYONE],
            seeds=[derive_seed(options.seed, transport.rank, -1, index)],
            residuals=[None if residual is None else part],
            padded=options.padded,
            measured=index == 0,
        )
        # send
        there = [max(min(start + step, length) - start, 0) for length in lengths]
        bounds = [frames.max_nbytes(codec, numel, values.dtype, transport) for numel in there]
        incoming = frames.gather(codec, outgoing.buffer, bounds, transport, padded=options.padded)
        in_flight.append((where, incoming))
        if len(in_flight) > options.depth:
            where, incoming = in_flight.popleft()
            yield where, incoming.wait()
    for where, incoming in in_flight:
        yield where, incoming.wait()

"""Reduce-scatter: every rank gets the sum (or mean) of one chunk over all ranks.

Two-shot: compensate -> encode -> send -> decode-add. A value is encoded once, by the rank that holds it, and
the owner of a chunk adds the decoded contributions in fp32 in rank order, its own uncompressed. So the
error does not grow with the number of ranks, and the sum does not depend on who arrives first.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ..codecs.base import Codec
from . import frames
from .choice import resolve
from .frames import Chunks, Exchanged
from .hierarchical import hierarchical_reduce_scatter
from .options import CallOptions, derive_seed
from .ring import ring_reduce_scatter
from .transport import Metered


def reduce_scatter(
    x: Tensor,
    codec: Codec,
    transport: Metered,
    chunks: Chunks,
    options: CallOptions,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """The fp32 sum over all ranks of this rank's chunk of x (flat; divided by the size if options.mean).

    residual: fp32, numel of x; added to x before encoding and replaced by what encoding lost. The rank's
    own chunk loses nothing. x is not changed. A ring has no residual.
    """
    codec, options = resolve("reduce_scatter", codec, x.numel(), x.dtype, transport, options)
    if options.algorithm == "ring":
        return ring_reduce_scatter(x, codec, transport, chunks, options)
    if options.algorithm == "hierarchical":
        return hierarchical_reduce_scatter(x, codec, transport, chunks, options, residual=residual)
    me, codec = transport.rank, transport.watch.codec(codec)
    # compensate: from here on the residual holds x + residual, and encoding leaves in it what was lost.
    values = x if residual is None else residual.add_(x)
    mine = slice(*chunks.bounds(me))
    total = torch.zeros(mine.stop - mine.start, dtype=torch.float32, device=x.device)

    in_flight: deque[tuple[slice, Exchanged]] = deque()
    for index, segment in enumerate(_segments(chunks, codec.granule, options.segment_numel)):
        # encode
        parts = [_part(values, chunks, peer, segment) if peer != me else None for peer in range(chunks.size)]
        outgoing = frames.encode_each(
            codec,
            parts,
            transport,
            to=range(chunks.size),
            seeds=[derive_seed(options.seed, me, peer, index) for peer in range(chunks.size)],
            residuals=parts if residual is not None else [None] * chunks.size,
            device=x.device,
            padded=options.padded,
            measured=index == 0,
        )
        # send
        own = _part(values, chunks, me, segment)
        numel = 0 if own is None else own.numel()
        bound = 0 if own is None else frames.max_nbytes(codec, numel, values.dtype, transport)
        bounds = [0 if peer == me else bound for peer in range(chunks.size)]
        largest = frames.max_nbytes(codec, segment.stop - segment.start, values.dtype, transport)
        incoming = frames.exchange(
            codec,
            outgoing,
            bounds,
            transport,
            padded=options.padded,
            in_rounds=largest >= options.rounds_nbytes,
        )
        in_flight.append((slice(segment.start, segment.start + numel), incoming))
        if len(in_flight) > options.depth:
            _decode_add(codec, values[mine], total, *in_flight.popleft(), transport)
    while in_flight:
        _decode_add(codec, values[mine], total, *in_flight.popleft(), transport)

    if residual is not None:
        residual[mine] = 0
    return total.div_(chunks.size) if options.mean else total


def _decode_add(
    codec: Codec, own: Tensor, total: Tensor, where: slice, incoming: Exchanged, transport: Metered
) -> None:
    into = total[where]
    if into.numel():
        # In rank order, each frame as soon as it and those before it are there.
        for peer in range(transport.size):
            frame = incoming.wait_for(peer)
            with transport.tally.decoding():
                if peer == transport.rank:
                    into += own[where]
                else:
                    frames.decode_add(codec, frame, into, own.dtype, transport, peer, transport.rank)
    incoming.wait()


def _segments(chunks: Chunks, granule: int, segment_numel: int) -> list[slice]:
    """Cuts of a chunk that travel one after the other, so that encoding, transfer and decoding overlap."""
    step = frames.segment_step(segment_numel, chunks.size, granule)
    return [slice(start, min(start + step, chunks.length)) for start in range(0, chunks.length, step)]


def _part(values: Tensor, chunks: Chunks, owner: int, segment: slice) -> Tensor | None:
    start, stop = chunks.bounds(owner)
    part = values[min(start + segment.start, stop) : min(start + segment.stop, stop)]
    return part if part.numel() else None

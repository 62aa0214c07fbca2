"""All-reduce: reduce-scatter, then one more encoding by the owner of each chunk, then all-gather.

Between two ranks, each sends the other all of its values instead: as many bytes, one round, one encoding. With
``recursive_doubling`` all ranks do so: more bytes, fewer rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..codecs.base import Codec
from . import frames
from .all_gather import all_gather, gather_frames
from .choice import resolve
from .doubling import Doubling
from .frames import Chunks
from .options import CallOptions
from .reduce_scatter import reduce_scatter
from .streams import EVERYONE
from .transport import Metered


@dataclass
class Residuals:
    """Error feedback of one all-reduced tensor. Both fp32 and flat.

    sender: what this rank's first encoding lost (numel of the tensor); owner: what the second encoding lost
    of this rank's chunk (nothing where all values go to all ranks, who encode once).
    """

    sender: Tensor
    owner: Tensor


def all_reduce(
    x: Tensor,
    codec: Codec,
    transport: Metered,
    options: CallOptions,
    *,
    residuals: Residuals | None = None,
) -> None:
    """Replace x (flat, contiguous) by its sum over all ranks, or the mean. Every rank ends with the same bits."""
    if x.numel() == 0:
        return
    codec, options = resolve("all_reduce", codec, x.numel(), x.dtype, transport, options)
    sender = None if residuals is None else residuals.sender
    if options.algorithm == "recursive_doubling":
        _one_shot(x, codec, Doubling(transport), options, sender)
        return
    if transport.size == 2 and options.algorithm == "two_shot":
        _one_shot(x, codec, transport, options, sender)
        return
    chunks = Chunks.of(x.numel(), transport.size, codec.granule)
    total = reduce_scatter(x, codec, transport, chunks, options, residual=sender)
    owner = None if residuals is None else residuals.owner
    # With feedback the second frames are fp32: the residual is, and x may not be.
    dtype = x.dtype if owner is None else torch.float32
    target = x if dtype == x.dtype else torch.empty_like(x, dtype=dtype)
    outs = [target[slice(*chunks.bounds(rank))] for rank in range(chunks.size)]
    all_gather(total.to(dtype), outs, codec, transport, options, residual=owner)
    if target is not x:
        x.copy_(target)


def _one_shot(
    x: Tensor, codec: Codec, transport: Metered, options: CallOptions, residual: Tensor | None
) -> None:
    """Every rank gets all values of all ranks, decodes them, and adds in fp32 in rank order."""
    codec, size = transport.watch.codec(codec), transport.size
    dtype = x.dtype if residual is None else torch.float32
    lengths = [x.numel()] * size
    for where, received in gather_frames(x, lengths, codec, transport, options, residual=residual):
        # decode, decode-add: this segment of x has been encoded, so it can take the first
        part = x[where]
        first = part if part.dtype == dtype else torch.empty_like(part, dtype=dtype)
        with transport.tally.decoding():
            frames.decode(codec, received[0], first, transport, 0, EVERYONE)
            total = first.float()
            for peer in range(1, size):
                frames.decode_add(codec, received[peer], total, dtype, transport, peer, EVERYONE)
            part.copy_(total.div_(size) if options.mean else total)

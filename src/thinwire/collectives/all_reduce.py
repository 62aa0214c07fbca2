"""All-reduce: reduce-scatter, then one more encoding by the owner of each chunk, then all-gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..codecs.base import Codec
from .all_gather import all_gather
from .frames import Chunks
from .options import CallOptions
from .reduce_scatter import reduce_scatter
from .ring import ring_reduce_scatter
from .transport import Metered


@dataclass
class Residuals:
    """Error feedback of one all-reduced tensor. Both fp32 and flat.

    sender: what this rank's first encoding lost (numel of the tensor); owner: what the second encoding lost
    of this rank's chunk.
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
    chunks = Chunks.of(x.numel(), transport.size, codec.granule)
    if options.algorithm == "ring":
        total = ring_reduce_scatter(x, codec, transport, chunks, options)
    else:
        sender = None if residuals is None else residuals.sender
        total = reduce_scatter(x, codec, transport, chunks, options, residual=sender)
    owner = None if residuals is None else residuals.owner
    # With feedback the second frames are fp32: the residual is, and x may not be.
    dtype = x.dtype if owner is None else torch.float32
    target = x if dtype == x.dtype else torch.empty_like(x, dtype=dtype)
    outs = [target[slice(*chunks.bounds(rank))] for rank in range(chunks.size)]
    all_gather(total.to(dtype), outs, codec, transport, options, residual=owner)
    if target is not x:
        x.copy_(target)

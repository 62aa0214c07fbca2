"""Ring reduce-scatter that re-encodes the partial sum on every hop, as an MPI library does it.

Its error grows with the number of ranks: a value is encoded as often as it is passed on. It exists because
the schemes of arXiv 2409.02423 run that way, and a comparison with them has to show what that costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..codecs.base import Codec
from . import frames
from .frames import Chunks
from .options import CallOptions, derive_seed
from .p2p import recv_frame, send_frame
from .transport import Metered


def ring_reduce_scatter(
    x: Tensor, codec: Codec, transport: Metered, chunks: Chunks, options: CallOptions
) -> Tensor:
    """The fp32 sum (mean) over all ranks of this rank's chunk of x. x is not changed."""
    size, me, codec = transport.size, transport.rank, transport.watch.codec(codec)
    after, before = (me + 1) % size, (me - 1) % size
    # The chunk of rank p starts at rank p + 1 and reaches p after size - 1 hops.
    partial = _wide_copy(x[slice(*chunks.bounds(before))])
    for hop in range(1, size):
        target = (before - hop) % size
        # encode -> send
        sent, sending = send_frame(
            partial.to(x.dtype),
            codec,
            transport,
            after,
            derive_seed(options.seed, me, target, hop),
            measured=hop == 1,
        )
        own = x[slice(*chunks.bounds(target))]
        frame = recv_frame(codec, own.numel(), own.dtype, transport, before, own.device)
        # decode-add
        partial = _wide_copy(own)
        with transport.tally.decoding():
            frames.decode_add(codec, frame, partial, own.dtype, transport, before, me)
        for pending in sending:
            pending.wait()
        del sent
    return partial.div_(size) if options.mean else partial


def _wide_copy(x: Tensor) -> Tensor:
    return x.to(torch.float32, copy=True)

"""All-gather: every rank's values on every rank. Encoded once, the bytes are forwarded, everyone decodes.

The sender decodes its own bytes too, so all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import wire
from ..codecs.base import Codec
from . import frames
from .options import CallOptions, derive_seed
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
    # compensate
    values = x if residual is None else residual.add_(x)
    # encode
    seed = derive_seed(options.seed, transport.rank, -1, 0)
    outgoing = frames.encode_each(
        codec,
        [values],
        transport,
        seeds=[seed],
        residuals=[None if residual is None else values],
        device=x.device,
        padded=options.padded,
    )
    # send
    bounds = [wire.max_frame_nbytes(codec, out.numel(), values.dtype) for out in outs]
    received = frames.gather(codec, outgoing.buffer, bounds, transport, padded=options.padded).wait()
    # decode
    with transport.tally.decoding():
        for frame, out in zip(received, outs, strict=True):
            wire.unpack(codec, frame, out)

"""All-to-all: a tensor for each rank, a tensor from each rank. What a rank keeps for itself stays exact."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..codecs.base import Codec
from . import frames
from .choice import resolve
from .options import CallOptions, derive_seed
from .transport import Metered
from .two_hop import two_hop_all_to_all


def all_to_all(
    ins: Sequence[Tensor],
    outs: Sequence[Tensor],
    codec: Codec,
    transport: Metered,
    options: CallOptions,
    *,
    even: bool = False,
) -> None:
    """Fill ``outs[p]`` with what rank p had for this rank in its ins. Flat, one dtype, any sizes.

    even: all messages of all ranks are of one size. So all see alike whether they are small, and go at once; and in two hops
    the ranks in between need not be told sizes.
    """
    codec, options = resolve("all_to_all", codec, 0, ins[0].dtype, transport, options)
    if options.algorithm == "hierarchical":
        two_hop_all_to_all(ins, outs, codec, transport, options, even=even)
        return
    me, size, codec = transport.rank, transport.size, transport.watch.codec(codec)
    # encode
    values = [x if peer != me and x.numel() else None for peer, x in enumerate(ins)]
    outgoing = frames.encode_each(
        codec,
        values,
        transport,
        to=range(size),
        seeds=[derive_seed(options.seed, me, peer, 0) for peer in range(size)],
        residuals=[None] * size,
        device=ins[0].device,
        padded=options.padded,
        measured=True,
    )
    # send
    bounds = [
        frames.max_nbytes(codec, out.numel(), out.dtype, transport) if peer != me and out.numel() else 0
        for peer, out in enumerate(outs)
    ]
    in_rounds = not even or max(bounds) >= options.rounds_nbytes
    incoming = frames.exchange(codec, outgoing, bounds, transport, padded=options.padded, in_rounds=in_rounds)
    # decode, each frame as it comes
    outs[me].copy_(ins[me])
    for distance in range(1, size):
        peer = (me + distance) % size
        frame = incoming.wait_for(peer)
        if outs[peer].numel():
            with transport.tally.decoding():
                frames.decode(codec, frame, outs[peer], transport, peer, me)
    incoming.wait()

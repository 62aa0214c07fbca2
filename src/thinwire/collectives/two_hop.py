"""All-to-all in two hops: inside of the host to the rank that collects what goes to a receiver elsewhere, then to that.

Between hosts there is one message from each host to each receiver instead of one from each rank. A frame lands where it is
sent on from, next to those of the other ranks for the same receiver, and is decoded where it lands; nothing is copied on
the way. What stays inside of a host goes straight to its receiver. A frame is encoded once, with the codec of the
outermost level on which sender and receiver are apart; what a rank keeps for itself stays exact. Racks and sites have no
hops of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..codecs.base import Codec
from . import frames
from .frames import Coming, Leaving
from .hierarchical import level_codec
from .options import CallOptions, derive_seed
from .pairwise import Pairwise
from .transport import Metered


def two_hop_all_to_all(
    ins: Sequence[Tensor],
    outs: Sequence[Tensor],
    codec: Codec,
    transport: Metered,
    options: CallOptions,
    *,
    even: bool,
) -> None:
    """As :func:`~thinwire.collectives.all_to_all.all_to_all`, over hosts."""
    me, size, topology = transport.rank, transport.size, options.places(transport.size)
    depth, pairwise = len(topology.levels) - 1, Pairwise(transport, ins[0].device)
    hosts: dict[tuple[str, ...], list[int]] = {}
    for rank, place in enumerate(topology.places):
        hosts.setdefault(place, []).append(rank)
    mates = [rank for rank in hosts.pop(topology.places[me]) if rank != me]
    away = [rank for host in hosts.values() for rank in host]
    codecs = [
        level_codec(topology.level_between(me, peer), topology, codec, options, transport)
        for peer in range(size)
    ]
    # All ranks must agree, so not by the codecs of this one's peers.
    levels = [level_codec(level, topology, codec, options, transport) for level in topology.levels]
    announced = (
        sum(frames.announces(c, transport, padded=options.padded) for c in levels) > 0
    )  # each is counted
    # encode
    sent = _encoded(ins, codecs, dict.fromkeys(levels), transport, options)
    # send inside: what a rank gets, and what it collects for others
    first = {peer: topology.steward(depth, me, peer) for peer in (*mates, *away)}
    collects = sorted([me, *(peer for peer in away if first[peer] == me)])
    incoming = frames.exchange_some(
        [Leaving(to, sent[d], [sent[d].numel()]) for d, to in sorted(first.items()) if to != me],
        [
            Coming(
                mate,
                [_bound(ins[d] if d != me else outs[mate], codecs[d if d != me else mate], transport, even)],
            )
            for d in collects
            for mate in mates
        ],
        pairwise,
        announced=announced or not even,
    )
    received = dict(zip(((d, mate) for d in collects for mate in mates), incoming.wait(), strict=True))
    # send between: the frame of this rank, then those of its host's others, which lie one after the other
    leaving, at = [], 0
    for d in collects:
        sizes = [received[d, mate].numel() for mate in mates]
        if d != me:
            leaving.append(Leaving(d, sent[d], [sent[d].numel()]))
            leaving.append(Leaving(d, incoming.buffer[at : at + sum(sizes)], sizes))
        at += sum(sizes)
    coming, sources = [], []
    for host in hosts.values():
        collector = topology.steward(depth, host[0], me)
        others = [rank for rank in host if rank != collector]
        for group in ([collector], others):
            coming.append(Coming(collector, [_bound(outs[s], codecs[s], transport, True) for s in group]))
            sources += group
    arriving = frames.exchange_some(leaving, coming, pairwise, announced=announced)
    # decode
    outs[me].copy_(ins[me])
    arrived = {mate: received[me, mate] for mate in mates}
    arrived |= dict(zip(sources, arriving.wait(), strict=True))
    with transport.tally.decoding():
        for peer in sorted(arrived):
            if outs[peer].numel():
                frames.decode(codecs[peer], arrived[peer], outs[peer], transport, peer, me)


def _encoded(
    ins: Sequence[Tensor],
    codecs: Sequence[Codec],
    different: Iterable[Codec],
    transport: Metered,
    options: CallOptions,
) -> dict[int, Tensor]:
    """The frame for each other rank; empty where there is nothing for it. A buffer for each of the different codecs."""
    found: dict[int, Tensor] = {}
    for codec in different:
        peers = [p for p, c in enumerate(codecs) if c == codec and p != transport.rank]
        outgoing = frames.encode_each(
            codec,
            [ins[p] if ins[p].numel() else None for p in peers],
            transport,
            to=peers,
            seeds=[derive_seed(options.seed, transport.rank, p, 0) for p in peers],
            residuals=[None] * len(peers),
            device=ins[0].device,
            padded=options.padded,
            measured=True,
        )
        found |= dict(zip(peers, torch.split(outgoing.buffer, outgoing.sizes), strict=True))
    return found


def _bound(x: Tensor, codec: Codec, transport: Metered, known: bool) -> int | None:
    """Upper bound of a frame that holds as much as x; None: nobody knows how much that is."""
    if not known:
        return None
    return frames.max_nbytes(codec, x.numel(), x.dtype, transport) if x.numel() else 0

"""Reduce-scatter and all-gather in levels: what ranks of one host can sum or share among themselves crosses its link once.

Reduce-scatter, for each rank d of the group: the ranks of a host send what they have for d to d's steward there
(:mod:`.topology`), which adds it up in fp32, in rank order; the stewards of the hosts send their sums on, level by level, in
the order of the units; d adds them up. So with hosts A = {0, 1} and B = {2, 3} the sum is (x0 + x1) + (x2 + x3): the same
in every call and for every codec. Each level has a codec of its own, and a value is encoded once on each level whose codec
loses anything, however many ranks there are. A rank's own contribution is never encoded.

All-gather: every rank encodes its values once, with the codec of the outermost level; the frames go down the same way,
forwarded as they are. So all ranks decode the same bytes.

With error feedback, a rank's residual holds for each d what its encoding for d has lost: on the innermost level of its own
values, further out of a sum that it is the steward of. For each d a rank encodes on one level only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from ..codecs.base import Codec
from . import frames, host_memory
from .frames import Chunks, Coming, Leaving
from .host_memory import HostMemory
from .monitor import EXACT
from .options import CallOptions, derive_seed
from .pairwise import Pairwise
from .streams import EVERYONE
from .topology import Step, Topology
from .transport import Metered


def level_codec(
    level: str, topology: Topology, codec: Codec, options: CallOptions, transport: Metered
) -> Codec:
    """What values are encoded with on a level. codec: the call's."""
    default = EXACT if level == topology.levels[-1] else codec
    return transport.watch.codec(dict(options.levels).get(level, default))


def hierarchical_reduce_scatter(
    x: Tensor,
    codec: Codec,
    transport: Metered,
    chunks: Chunks,
    options: CallOptions,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """As :func:`~thinwire.collectives.reduce_scatter.reduce_scatter`, in levels."""
    me, topology = transport.rank, options.places(transport.size)
    steps = [
        (step, level_codec(step.level, topology, codec, options, transport)) for step in topology.steps(me)
    ]
    start, stop = chunks.bounds(me)
    total = torch.zeros(stop - start, dtype=torch.float32, device=x.device)
    pairwise = Pairwise(transport, x.device)
    granule = max((codec.granule for _, codec in steps), default=1)
    memory = regions = None
    inside, exact = steps[0][0].level == topology.levels[-1], steps[0][1] == EXACT
    flushes = residual is not None and transport.watch.exact  # what a lossy codec has left there
    if x.device.type == "cpu" and inside and exact and not flushes:
        mates = [r for r in range(transport.size) if topology.places[r] == topology.places[me] and r != me]
        memory = host_memory.of(transport.inner, mates)
        regions = memory.open(x, me, pairwise) if mates else None

    def segments() -> Iterator[Iterator[None]]:
        lengths = [chunks.bounds(d)[1] - chunks.bounds(d)[0] for d in range(chunks.size)]
        for index, cuts in enumerate(_cuts(lengths, granule, options)):
            where = [slice(chunks.bounds(d)[0] + a, chunks.bounds(d)[0] + b) for d, (a, b) in enumerate(cuts)]
            parts = [x[w] for w in where]
            lost = None if residual is None else [residual[w] for w in where]
            into = total[slice(*cuts[me])]
            call = _Call(steps, pairwise, transport, options, index)
            if memory is None or regions is None:
                yield call.climb(dict(enumerate(parts)), x.dtype, list(map(len, parts)), lost, into)
            else:
                shared = [{rank: region[w] for rank, region in regions.items()} for w in where]
                yield call.climb_in_memory(parts, shared, memory, lost, into)

    _overlapped(segments())
    if memory is not None and regions is not None:
        memory.tell(pairwise).wait()  # before somebody writes again
    return total.div_(chunks.size) if options.mean else total


@dataclass(frozen=True)
class _Call:
    """One segment of every chunk on its way up. steps: with their codecs, innermost first."""

    steps: Sequence[tuple[Step, Codec]]
    pairwise: Pairwise
    transport: Metered
    options: CallOptions
    index: int

    def climb_in_memory(
        self,
        parts: Sequence[Tensor],
        shared: Sequence[Mapping[int, Tensor]],
        memory: HostMemory,
        residuals: Sequence[Tensor] | None,
        total: Tensor,
    ) -> Iterator[None]:
        """As ``climb``; inside of the host through memory: shared[d]: each mate's part for d, and room for this rank's."""
        (step, _), me = self.steps[0], self.transport.rank
        with self.transport.tally.encoding():
            for _, d in step.gives:
                shared[d][me].copy_(parts[d])
        self.transport.tally.memory_bytes += sum(parts[d].nbytes for _, d in step.gives)
        told = memory.tell(self.pairwise)
        yield
        told.wait()
        held: dict[int, Tensor] = {}
        with self.transport.tally.decoding():
            for d, sources in step.takes:
                into = held[d] = torch.zeros(parts[d].numel(), dtype=torch.float32)
                for source in sources:
                    into += parts[d] if source == me else shared[d][source]
        above = replace(self, steps=self.steps[1:])
        yield from above.climb(held, torch.float32, list(map(len, parts)), residuals, total)

    def climb(
        self,
        held: dict[int, Tensor],
        dtype: torch.dtype,
        numels: Sequence[int],
        residuals: Sequence[Tensor] | None,
        total: Tensor,
    ) -> Iterator[None]:
        """Yields where it waits for peers. held[d]: what this rank has for rank d, numels[d] values.

        total becomes the sum of what all ranks have for this one.
        """
        me = self.transport.rank
        for step, codec in self.steps:
            gives = [(to, d) for to, d in step.gives if numels[d]]
            takes = [(d, sources) for d, sources in step.takes if numels[d]]
            values = [held[d] for _, d in gives]
            # compensate: from here on a residual holds value + residual, and encoding leaves in it what was lost.
            lost: Sequence[Tensor | None] = [None] * len(values)
            if residuals is not None and (not codec.lossless or self.transport.watch.exact):
                lost = values = [residuals[d].add_(held[d]) for _, d in gives]
                dtype = torch.float32
            # encode
            outgoing = frames.encode_each(
                codec,
                values,
                self.transport,
                to=[to for to, _ in gives],
                seeds=[derive_seed(self.options.seed, me, d, self.index) for _, d in gives],
                residuals=lost,
                device=total.device,
                padded=self.options.padded,
                measured=self.index == 0,
            )
            # send
            nbytes = [frames.max_nbytes(codec, numel, dtype, self.transport) for numel in numels]
            wanted = sorted((source, d) for d, sources in takes for source in sources if source != me)
            incoming = frames.exchange_some(
                _messages([to for to, _ in gives], outgoing.buffer, outgoing.sizes),
                [
                    Coming(peer, [nbytes[d] for _, d in frames_of])
                    for peer, frames_of in groupby(wanted, itemgetter(0))
                ],
                self.pairwise,
                announced=frames.announces(codec, self.transport, padded=self.options.padded),
                in_rounds=max(nbytes) >= self.options.rounds_nbytes,
            )
            yield
            # decode-add
            received = dict(zip(wanted, incoming.wait(), strict=True))
            below, held = held, {}
            with self.transport.tally.decoding():
                for d, sources in takes:
                    into = held[d] = torch.zeros(numels[d], dtype=torch.float32, device=total.device)
                    for source in sources:
                        if source == me:
                            into += below[d]
                        else:
                            frames.decode_add(
                                codec, received[source, d], into, dtype, self.transport, source, me
                            )
            dtype = torch.float32
        if numels[me]:
            total += held[me]
            if residuals is not None:
                total += residuals[me]
                residuals[me].zero_()


def hierarchical_all_gather(
    x: Tensor,
    outs: Sequence[Tensor],
    codec: Codec,
    transport: Metered,
    options: CallOptions,
    *,
    residual: Tensor | None = None,
) -> None:
    """As :func:`~thinwire.collectives.all_gather.all_gather`, in levels."""
    me, topology = transport.rank, options.places(transport.size)
    codec = level_codec(topology.outermost, topology, codec, options, transport)
    steps, pairwise = topology.steps(me), Pairwise(transport, x.device)
    # compensate: from here on the residual holds x + residual, and encoding leaves in it what was lost.
    values = x if residual is None else residual.add_(x)

    def segments() -> Iterator[Iterator[None]]:
        lengths = [out.numel() for out in outs]
        for index, cuts in enumerate(_cuts(lengths, codec.granule, options)):
            part = values[slice(*cuts[me])]
            targets = [out[slice(*cut)] for out, cut in zip(outs, cuts, strict=True)]
            lost = None if residual is None else part
            yield _descend(part, lost, targets, codec, steps, pairwise, transport, options, index)

    _overlapped(segments())


def _descend(
    part: Tensor,
    residual: Tensor | None,
    outs: Sequence[Tensor],
    codec: Codec,
    steps: Sequence[Step],
    pairwise: Pairwise,
    transport: Metered,
    options: CallOptions,
    index: int,
) -> Iterator[None]:
    """One segment of every rank's values; part: this one's. Yields where it waits for peers."""
    me = transport.rank
    # encode
    outgoing = frames.encode_each(
        codec,
        [part],
        transport,
        to=[EVERYONE],
        seeds=[derive_seed(options.seed, me, -1, index)],
        residuals=[residual],
        device=part.device,
        padded=options.padded,
        measured=index == 0,
    )
    nbytes = [frames.max_nbytes(codec, out.numel(), part.dtype, transport) for out in outs]
    announced = frames.announces(codec, transport, padded=options.padded)
    held = {me: outgoing.buffer}
    for step in reversed(steps):
        # send: what came up to this rank goes down from it
        incoming = frames.exchange_some(
            [
                Leaving(peer, held[d], [held[d].numel()])
                for peer, d in sorted((source, d) for d, sources in step.takes for source in sources)
                if peer != me
            ],
            [Coming(peer, [nbytes[d]]) for peer, d in step.gives],
            pairwise,
            announced=announced,
            in_rounds=max(nbytes) >= options.rounds_nbytes,
        )
        yield
        held |= dict(zip([d for _, d in step.gives], incoming.wait(), strict=True))
    # decode
    with transport.tally.decoding():
        for d, out in enumerate(outs):
            frames.decode(codec, held[d], out, transport, d, EVERYONE)


def _messages(peers: Sequence[int], buffer: Tensor, sizes: Sequence[int]) -> list[Leaving]:
    """Frames that lie one after the other, a message for each peer; peers: of each frame, sorted."""
    found, start = [], 0
    for peer, group in groupby(zip(peers, sizes, strict=True), itemgetter(0)):
        own = [size for _, size in group]
        found.append(Leaving(peer, buffer[start : start + sum(own)], own))
        start += sum(own)
    return found


def _cuts(lengths: Sequence[int], granule: int, options: CallOptions) -> Iterator[list[tuple[int, int]]]:
    """For each segment, which values of each rank's it has: first and end."""
    step = frames.segment_step(options.segment_numel, len(lengths), granule)
    for start in range(0, max(*lengths, 1), step):
        yield [(min(start, length), min(start + step, length)) for length in lengths]


def _overlapped(segments: Iterable[Iterator[None]]) -> None:
    """Run segments side by side, each one wait behind the one before.

    The youngest goes first: its values leave for the level below before anybody waits for those of an older one above.
    """
    under_way: list[Iterator[None]] = []
    for segment in segments:
        under_way = [running for running in (segment, *under_way) if _goes_on(running)]
    while under_way:
        under_way = [running for running in under_way if _goes_on(running)]


def _goes_on(segment: Iterator[None]) -> bool:
    return next(segment, segment) is None

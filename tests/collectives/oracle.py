"""What the two-shot reduction must give, bit for bit: the same arithmetic, written once more without a network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import CallOptions, Codec
from thinwire.collectives.frames import Chunks
from thinwire.collectives.options import derive_seed

UNIT = 2.0**-24
"""Largest relative error of one fp32 rounding."""


def decoded(codec: Codec, x: Tensor, seed: int) -> Tensor:
    """x after one encoding."""
    x = x.contiguous()
    payload = torch.empty(codec.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    n = codec.encode(x, payload, seed=seed)
    out = torch.empty_like(x)
    codec.decode(payload[:n], out)
    return out


def two_shot_totals(xs: Sequence[Tensor], codec: Codec, options: CallOptions, chunks: Chunks) -> list[Tensor]:
    """The owners' fp32 sums (means) of their chunks: decoded contributions, added in rank order, own as it is."""
    step = max(options.segment_numel // chunks.size // codec.granule, 1) * codec.granule
    totals = []
    for owner in range(chunks.size):
        start, stop = chunks.bounds(owner)
        total = torch.zeros(stop - start)
        for rank, x in enumerate(xs):
            part = x[start:stop]
            if rank != owner:
                pieces = [
                    decoded(codec, piece, derive_seed(options.seed, rank, owner, index))
                    for index, piece in enumerate(part.split(step))
                ]
                part = torch.cat(pieces) if pieces else part
            total += part
        totals.append(total.div_(chunks.size) if options.mean else total)
    return totals


def two_shot(xs: Sequence[Tensor], codec: Codec, options: CallOptions) -> Tensor:
    """The result of all_reduce on every rank."""
    if len(xs) == 2:  # each sends the other everything, encoded once
        sent = gathered(xs, codec, options)
        total = sent[0].float() + sent[1].float()
        return (total / 2 if options.mean else total).to(xs[0].dtype)
    chunks = Chunks.of(xs[0].numel(), len(xs), codec.granule)
    totals = two_shot_totals(xs, codec, options, chunks)
    return torch.cat(gathered([t.to(xs[0].dtype) for t in totals], codec, options))


def gathered(xs: Sequence[Tensor], codec: Codec, options: CallOptions) -> list[Tensor]:
    """What all_gather gives on every rank: each rank's values after one encoding, segment by segment."""
    step = max(options.segment_numel // len(xs) // codec.granule, 1) * codec.granule
    return [
        torch.cat(
            [x[:0]]
            + [
                decoded(codec, piece, derive_seed(options.seed, rank, -1, index))
                for index, piece in enumerate(x.split(step))
                if piece.numel()
            ]
        )
        for rank, x in enumerate(xs)
    ]


def totals_bound(xs: Sequence[Tensor], codec: Codec, mean: bool) -> Tensor:
    """Bound of |owner's total - exact sum (mean)|, float64: the encodings of all ranks, and fp32's roundings.

    Each of the additions rounds a partial sum that is at most the sum of the decoded magnitudes.
    """
    n = len(xs)
    bounds = [_bound(codec, x) for x in xs]
    encoding = torch.stack(bounds).sum(0)
    magnitude = torch.stack([x.double().abs() for x in xs]).sum(0) + encoding
    bound = encoding + n * UNIT * magnitude
    return bound / n + UNIT * magnitude / n if mean else bound


def two_shot_bound(xs: Sequence[Tensor], codec: Codec, options: CallOptions) -> Tensor:
    """Bound of |result - exact| of all_reduce: that of the totals, the cast to the dtype, the second encoding."""
    first = totals_bound(xs, codec, options.mean)
    if len(xs) == 2:
        total = torch.stack(gathered(xs, codec, options)).float().sum(0)
        total = total / 2 if options.mean else total
        return first + (total.to(xs[0].dtype).double() - total.double()).abs()
    chunks = Chunks.of(xs[0].numel(), len(xs), codec.granule)
    totals = two_shot_totals(xs, codec, options, chunks)
    cast = torch.cat([t.to(xs[0].dtype) for t in totals])
    second = torch.cat([_bound(codec, t.to(xs[0].dtype)) for t in totals])
    return first + (cast.double() - torch.cat(totals).double()).abs() + second


def exact(xs: Sequence[Tensor], mean: bool) -> Tensor:
    total = torch.stack([x.double() for x in xs]).sum(0)
    return total / len(xs) if mean else total


def _bound(codec: Codec, x: Tensor) -> Tensor:
    bound = codec.error_bound(x)
    assert bound is not None, codec
    return bound.double()

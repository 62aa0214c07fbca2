"""Options of one call of a collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["two_shot", "ring"]


@dataclass(frozen=True)
class CallOptions:
    """How a collective runs. Equal on all ranks.

    mean: divide by the number of ranks, once, in fp32. seed: of this call, for stochastic rounding.
    algorithm: ``two_shot`` encodes a value once on its way to the owner; ``ring`` re-encodes partial sums
    on every hop, and its error grows with the number of ranks. segment_numel: values that travel at once;
    depth: segments in flight before the oldest is decoded. rounds_nbytes: frames of a reduction, or of an all-to-all of
    equal messages, from this size on go pair by pair, see :mod:`~thinwire.collectives.rounds` (smaller ones took longer
    so on four hosts at 200 Mbit/s). padded: send variable-size frames in slots of their upper bound instead of
    exchanging sizes first.
    """

    mean: bool = False
    seed: int = 0
    algorithm: Algorithm = "two_shot"
    segment_numel: int = 2 << 20
    depth: int = 2
    rounds_nbytes: int = 512 << 10
    padded: bool = False


_MASK = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from integers (splitmix64): other parts, independent rounding."""
    state = 0
    for part in parts:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1

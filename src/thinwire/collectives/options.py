"""Options of one call of a collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..codecs.base import Codec
from ..errors import UnsupportedError
from .topology import Topology

Algorithm = Literal["two_shot", "ring", "hierarchical", "recursive_doubling", "auto"]


@dataclass(frozen=True)
class CallOptions:
    """How a collective runs. Equal on all ranks.

    mean: divide by the number of ranks, once, in fp32. seed: of this call, for stochastic rounding.
    algorithm: ``two_shot`` encodes a value once on its way to the owner; ``ring`` re-encodes partial sums
    on every hop, and its error grows with the number of ranks; ``hierarchical`` reduces inside hosts first
    (:mod:`.hierarchical`); ``recursive_doubling`` gathers all values in log2(ranks) rounds (:mod:`.doubling`); ``auto``
    takes one of these by size and ranks (:mod:`.choice`). Ops without a form of an algorithm run as with ``two_shot``.
    topology: where the ranks are; hierarchical needs it. levels: (level, codec) where it is not the call's: without it
    the innermost level, inside of hosts, has ``none``, and all others have the call's codec.
    segment_numel: values that travel at once; depth: segments in flight before the oldest is decoded. rounds_nbytes:
    frames of a reduction, or of an all-to-all of equal messages, from this size on go pair by pair, see
    :mod:`~thinwire.collectives.rounds` (smaller ones took longer so on four hosts at 200 Mbit/s). padded: send
    variable-size frames in slots of their upper bound instead of exchanging sizes first.
    """

    mean: bool = False
    seed: int = 0
    algorithm: Algorithm = "two_shot"
    topology: Topology | None = None
    levels: tuple[tuple[str, Codec], ...] = ()
    segment_numel: int = 2 << 20
    depth: int = 2
    rounds_nbytes: int = 512 << 10
    padded: bool = False

    def places(self, size: int) -> Topology:
        """The topology of a group of ``size`` ranks. Raises UnsupportedError if there is none, or one of another size."""
        if self.topology is None:
            raise UnsupportedError(
                'algorithm = "hierarchical" needs to know which ranks share a host: give CallOptions(topology=...); a '
                "thinwire group finds it out"
            )
        if self.topology.size != size:
            raise UnsupportedError(f"a topology of {self.topology.size} ranks in a group of {size}")
        return self.topology


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

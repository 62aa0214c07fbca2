"""Which algorithm a call runs: what ``auto`` means, and what is left of a hierarchical call where there is one level only.

``auto`` is decided by the op, the size of the encoded message (its upper bound), the number of ranks and the topology: by
what all ranks know alike, and by a table that comes with the package and says where it was measured (``crossover.toml``).
A ring is never chosen.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources

import torch

from .. import wire
from ..codecs.base import Codec
from .hierarchical import level_codec
from .options import Algorithm, CallOptions
from .topology import Topology
from .transport import Metered


@dataclass(frozen=True)
class Crossover:
    """Bytes up to which recursive doubling is faster, by number of ranks."""

    flat: Mapping[int, int] = field(default_factory=dict)
    layered: Mapping[int, int] = field(default_factory=dict)

    def algorithm(self, op: str, nbytes: int, size: int, topology: Topology | None) -> Algorithm:
        """That of a call. nbytes: upper bound of the message's frame, the same on all ranks."""
        layered = topology is not None and topology.layered
        limits = self.layered if layered else self.flat
        ranks = max((n for n in limits if n <= size), default=None)
        if op == "all_reduce" and size > 2 and ranks is not None and nbytes <= limits[ranks]:
            return "recursive_doubling"
        return "hierarchical" if layered else "two_shot"


@lru_cache
def measured() -> Crossover:
    """The table that comes with the package."""
    entries = tomllib.loads((resources.files(__package__) / "crossover.toml").read_text())["crossover"]
    flat, layered = (
        {entry["ranks"]: entry["nbytes"] for entry in entries if entry["kind"] == kind}
        for kind in ("flat", "layered")
    )
    return Crossover(flat, layered)


def resolve(
    op: str, codec: Codec, numel: int, dtype: torch.dtype, transport: Metered, options: CallOptions
) -> tuple[Codec, CallOptions]:
    """The codec and the options of a call, with the algorithm that it runs: neither ``auto`` nor one that op lacks.

    numel: of the message; of all_to_all, which the ranks may not see alike, it is not used. Raises UnsupportedError for a
    hierarchical call without a topology.
    """
    algorithm = options.algorithm
    if algorithm == "auto":
        nbytes = 0 if op == "all_to_all" else wire.max_frame_nbytes(codec, numel, dtype)
        algorithm = measured().algorithm(op, nbytes, transport.size, options.topology)
    if algorithm == "hierarchical":
        topology = options.places(transport.size)
        if not topology.layered:
            codec = level_codec(topology.outermost, topology, codec, options, transport)
            algorithm = "two_shot"
    elif algorithm == "recursive_doubling" and op != "all_reduce":
        algorithm = "two_shot"
    return codec, replace(options, algorithm=algorithm)

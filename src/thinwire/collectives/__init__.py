"""Frames to peers and back. Functions over a transport; the group is an argument."""

from .all_gather import all_gather
from .all_reduce import Residuals, all_reduce
from .all_to_all import all_to_all
from .broadcast import broadcast
from .frames import Chunks
from .low_rank import Matrix, low_rank_all_reduce
from .p2p import recv, send
from .reduce_scatter import reduce_scatter
from .ring import ring_reduce_scatter
from .work import Joined, Work, done

__all__ = [
    "Chunks",
    "Joined",
    "Matrix",
    "Residuals",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "done",
    "low_rank_all_reduce",
    "recv",
    "reduce_scatter",
    "ring_reduce_scatter",
    "send",
]

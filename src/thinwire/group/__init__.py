"""The drop-in process group. :mod:`.options`, :mod:`.base` (what every message passes), :mod:`.ops` (the operations),
:mod:`.statistics` (what was sent)."""

from .base import BACKEND, ROLE_TAGS
from .ops import ThinwireGroup, register
from .options import GroupOptions
from .statistics import MessageStats, Stats, stats

__all__ = [
    "BACKEND",
    "ROLE_TAGS",
    "GroupOptions",
    "MessageStats",
    "Stats",
    "ThinwireGroup",
    "register",
    "stats",
]

"""The drop-in process group. :mod:`.options`, :mod:`.base` (what every message passes), :mod:`.ops` (the operations),
:mod:`.statistics` and :mod:`.stats_log` (what was sent)."""

from .base import BACKEND, ROLE_TAGS
from .ops import ThinwireGroup, register
from .options import GroupOptions
from .statistics import MessageStats, Stats, stats
from .stats_log import StatsLog

__all__ = [
    "BACKEND",
    "ROLE_TAGS",
    "GroupOptions",
    "MessageStats",
    "Stats",
    "StatsLog",
    "ThinwireGroup",
    "register",
    "stats",
]

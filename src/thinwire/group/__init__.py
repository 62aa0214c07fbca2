"""The drop-in process group. :mod:`.options`, :mod:`.base` (what every message passes), :mod:`.ops` (the operations)."""

from .base import BACKEND, ROLE_TAGS
from .ops import ThinwireGroup, register
from .options import GroupOptions

__all__ = ["BACKEND", "ROLE_TAGS", "GroupOptions", "ThinwireGroup", "register"]

"""How a rank makes its groups: over emulated links, over MPI, or as they are."""

from __future__ import annotations

from dataclasses import dataclass

from ..group import BACKEND, GroupOptions


@dataclass(frozen=True)
class Wiring:
    """Arguments of :func:`thinwire.init_mesh` and :class:`thinwire.Ladder`."""

    backend: str = BACKEND
    options: GroupOptions = GroupOptions()
    ranks_per_host: int | None = None
    """Neighbours in rank that share a host; None: all of them."""

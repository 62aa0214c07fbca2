"""How a rank makes its groups: over emulated links, over MPI, or as they are."""

from __future__ import annotations

from dataclasses import dataclass

from ..group import BACKEND, GroupOptions


@dataclass(frozen=True)
class Wiring:
    """Arguments of :func:`thinwire.init_mesh`."""

    backend: str = BACKEND
    options: GroupOptions = GroupOptions()

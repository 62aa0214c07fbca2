"""Reductions of FSDP2 that travel while the backward pass goes on; its end waits for them.

FSDP takes what was reduced for a gradient as soon as the collective returns. On the CPU it only keeps a view of it, in most
cases (:meth:`.fsdp_units.Unit.takes_views`), so that the values may come later.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

_UNDER_WAY = 2  # reductions: each keeps the gradients of a unit in memory


class Deferred:
    """The reductions under way, two at most: a third one waits for the first."""

    def __init__(self) -> None:
        self._works: deque[dist.Work] = deque()

    @staticmethod
    def possible() -> bool:
        """Whether this thread runs a backward pass, which has an end. (Pipeline schedules reduce outside of one.)"""
        return bool(torch._C._current_graph_task_id() != -1)

    def add(self, work: dist.Work) -> None:
        """Wait for ``work`` at the end of this backward pass at the latest, which raises what it raises."""
        self._works.append(work)
        if len(self._works) > _UNDER_WAY:
            self._works.popleft().wait()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._wait)

    def _wait(self) -> None:
        while self._works:
            self._works.popleft().wait()

"""A worker's stream on a CUDA device: its kernels run beside the caller's, in the order that both need.

The caller's stream says how far it is when a call is made (an event), the worker's stream waits for that; the Work's
future, which knows the device, makes whoever waits for it wait for the worker's stream. No thread of the caller waits for
the device. Unproven until ``bench/gpu.py`` has run on one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def cuda_device(result: Any) -> torch.device | None:
    """The CUDA device of a call, by its result (a tensor, or any nesting of lists of them); None: it is on the CPU."""
    if isinstance(result, Tensor):
        return result.device if result.is_cuda else None
    if isinstance(result, Iterable) and not isinstance(result, (str, bytes)):
        return next((found for part in result if (found := cuda_device(part)) is not None), None)
    return None


def reached(device: torch.device) -> torch.cuda.Event:
    """How far this thread's current stream is."""
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


class SideStreams:
    """The streams of one thread, one for each device, and what their kernels still read. For that thread only."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._held: deque[tuple[torch.cuda.Event, Callable[[], object]]] = deque()

    @contextmanager
    def after(self, event: torch.cuda.Event, device: torch.device) -> Iterator[None]:
        """Inside, this thread's kernels go to its stream on the device, behind ``event`` of another."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            yield

    def hold(self, call: Callable[[], object], device: torch.device) -> None:
        """Keep what a call refers to until its kernels, the last ones of this stream, have run.

        Memory that is freed before that may be used again by the caller's stream.
        """
        self._held.append((self._streams[device].record_event(), call))

    def release(self, *, wait: bool) -> None:
        """Let go of calls whose kernels have run. wait: until all of them have."""
        while self._held:
            event: Any = self._held[0][0]
            if not wait and not event.query():
                return
            event.synchronize()
            self._held.popleft()

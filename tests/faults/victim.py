"""A rank that falls silent in the middle of its calls, at the same place in every run, and what the others saw of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire import GroupOptions, ThinwireGroup, wire
from thinwire.collectives.endpoint import Endpoint
from thinwire.policy import Policy, from_dict


@dataclass
class Seen:
    """What waiting for a call raised: nothing if it ended well. seconds: from the start of the wait."""

    kind: str
    text: str
    seconds: float


def policy(codec: str, **settings: Any) -> Policy:
    return from_dict({"axis": {"dp": {"all": codec, "min_nbytes": 0, **settings}}}, "test")


def new_group(chosen: Policy | str, timeout_s: float, **options: Any) -> ThinwireGroup:
    made = dist.new_group(
        backend="thinwire",
        pg_options=GroupOptions(policy=chosen, **options),
        timeout=timedelta(seconds=timeout_s),
    )
    assert isinstance(made, ThinwireGroup)
    return made


def group_on(store: Any, rank: int, world: int, chosen: Policy, timeout_s: float) -> ThinwireGroup:
    """A group that meets at a store of its own; torch.distributed does not know it."""
    options = GroupOptions(policy=chosen)
    return ThinwireGroup(store, rank, world, options, timedelta(seconds=timeout_s))


def kept_by(keeper: int, rank: int, world: int, address: str = "127.0.0.1") -> Any:
    """A TCPStore in rank ``keeper``'s process; address: of its host."""
    port = torch.zeros(1, dtype=torch.int64)
    store: Any = None
    if rank == keeper:
        store = dist.TCPStore(address, 0, world, True, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast(port, keeper)
    return store or dist.TCPStore(address, int(port), world, False, wait_for_workers=False)


def seen(wait: Callable[[], object]) -> Seen:
    start = time.monotonic()
    try:
        wait()
    except Exception as e:
        return Seen(type(e).__name__, str(e), time.monotonic() - start)
    return Seen("nothing", "", time.monotonic() - start)


class FallsSilent:
    """Sends this process a signal once calls have come to their places, all of them: SIGKILL or SIGSTOP.

    places: (op, bytes of the message) -> at which frame that the call encodes, counted from 1, it stands still.
    """

    def __init__(self, number: signal.Signals, places: Mapping[tuple[str, int], int]) -> None:
        self._number = number
        self._places = places
        self._all_there = threading.Barrier(len(places))
        self._over = threading.Event()
        self._here = threading.local()
        self._run, self._pack = Endpoint.run, wire.pack
        Endpoint.run = self._noted(Endpoint.run)  # type: ignore[method-assign]
        wire.pack = self._counted(wire.pack)

    def _noted(self, run: Callable[..., None]) -> Any:
        def noted(endpoint: Endpoint, message: Any, *rest: Any) -> None:
            self._here.call, self._here.frames = (message.op, message.nbytes), 0
            run(endpoint, message, *rest)

        return noted

    def _counted(self, pack: Callable[..., int]) -> Any:
        def counted(*args: Any, **kwargs: Any) -> int:
            self._here.frames += 1
            if self._here.frames == self._places.get(self._here.call):
                if self._all_there.wait() == 0:  # one of them: a second SIGSTOP could come after the SIGCONT
                    Endpoint.run, wire.pack = self._run, self._pack  # type: ignore[method-assign]
                    os.kill(os.getpid(), self._number)
                    self._over.set()
                self._over.wait()
            return pack(*args, **kwargs)

        return counted


def filled(numel: int, rank: int) -> torch.Tensor:
    return torch.full((numel,), float(rank + 1))

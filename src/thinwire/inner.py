"""The group inside a thinwire group: its creation, what its ranks must agree on, and its Work with a clock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from .collectives.torch_transport import TorchTransport
from .collectives.transport import Transport
from .errors import MismatchError, PeerError, PolicyError
from .mpi.communicator import Communicator, card
from .mpi.group import MpiGroup
from .mpi.transport import MpiTransport


@lru_cache
def _gloo_devices(interfaces: str, pid: int) -> tuple[Any, ...]:
    """The network interfaces of gloo groups, shared by all inner groups of a process (a fork needs its own).

    Each device has a thread that wakes up a hundred times a second, whether its groups are used or not: with one for
    every group, the two inner groups of every axis cost a busy machine a tenth of its step.
    """
    names = [n for n in interfaces.split(",") if n]
    make = dist.ProcessGroupGloo
    return tuple(make.create_device(interface=n) for n in names) or (make.create_default_device(),)


_BACKENDS = {
    "gloo": ("cpu",),
    "nccl": ("cuda",),
    "cpu:gloo,cuda:nccl": ("cpu", "cuda"),
    "mpi": ("cpu", "cuda"),
}
"""Inner backends, each with the devices whose tensors it takes."""


def inner_devices(backend: str) -> list[torch.device]:
    """The devices of an inner backend: gloo, nccl, both (``cpu:gloo,cuda:nccl``) or mpi. Raises PolicyError for another."""
    if backend not in _BACKENDS:
        raise PolicyError(f"inner backend {backend!r} is not known; use {', '.join(_BACKENDS)}")
    return [torch.device(name) for name in _BACKENDS[backend]]


def make_inner_group(
    store: Store, rank: int, size: int, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A group of ``backend`` (see :func:`inner_devices`). A bare ProcessGroupGloo would lack the coalesced gathers.

    mpi: raises UnsupportedError where there is no MPI, MismatchError where the ranks are not of one MPI job.
    """
    if backend == "mpi":
        cards = gathered(store, "mpi", rank, size, card(), timeout)
        return MpiGroup(Communicator(cards, rank, timeout.total_seconds()))
    group = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    devices = inner_devices(backend)
    # As PyTorch does where there are both: NCCL's, which its barrier goes by.
    group._set_default_backend(kinds.GLOO if backend == "gloo" else kinds.NCCL)
    for device in devices:
        # One store for both would mix up their keys.
        own = store if len(devices) == 1 else PrefixStore(device.type, store)
        if device.type == "cpu":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._devices = list(_gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid()))
            group._register_backend(device, kinds.GLOO, dist.ProcessGroupGloo(own, rank, size, options))
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group._register_backend(device, kinds.NCCL, dist.ProcessGroupNCCL(own, rank, size, options))
    return group


def transport_of(group: dist.ProcessGroup) -> Transport:
    """The transport over an inner group."""
    return MpiTransport(group.communicator) if isinstance(group, MpiGroup) else TorchTransport(group)


def disconnect(*groups: dist.ProcessGroup) -> None:
    """Close the connections of inner groups, so that their calls under way fail: here, and by that on all their ranks."""
    for group in groups:
        _disconnect(group)


def _disconnect(group: dist.ProcessGroup) -> None:
    if group.size() == 1:
        return
    group.abort()  # NCCL's and MPI's connections; gloo's backend has no such thing
    if isinstance(group, MpiGroup):
        return
    # But gloo closes all connections of a group when the time of one receive is up. NCCL refuses the tensor.
    with suppress(RuntimeError):
        nothing = torch.empty(1, dtype=torch.uint8)
        group.recv([nothing], (group.rank() + 1) % group.size(), _NOBODY_SENDS).wait(
            timedelta(milliseconds=1)
        )


_NOBODY_SENDS = 0x7477DEAD
"""Tag of a receive that is there to fail."""


def agree(store: Store, rank: int, size: int, mine: str, timeout: timedelta) -> None:
    """Compare a text among the ranks of a group; all of them raise MismatchError where it differs.

    Raises PeerError if some do not come within ``timeout``.
    """
    every = gathered(store, "agree", rank, size, mine, timeout)
    if any(other != mine for other in every):
        lines = "\n".join(f"  rank {r}: {text}" for r, text in enumerate(every))
        raise MismatchError(f"the ranks of a group disagree; give all the same policy and version:\n{lines}")


def meet(store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until all ranks are here: one that leaves earlier would break connections that others still make.

    Raises PeerError as :func:`agree`.
    """
    gathered(store, "meet", rank, size, "", timeout)


def gathered(store: Store, key: str, rank: int, size: int, mine: str, timeout: timedelta) -> list[str]:
    """Every rank's text, in rank order. Raises PeerError as :func:`agree`. key: of the store, used for nothing else."""
    store.set(f"{key}/{rank}", mine)
    keys = [f"{key}/{r}" for r in range(size)]
    end = time.monotonic() + timeout.total_seconds()
    missing = []
    for r, theirs in enumerate(keys):
        try:
            store.wait([theirs], timedelta(seconds=max(end - time.monotonic(), 0.01)))
        except dist.DistNetworkError:  # the store is gone
            raise
        except RuntimeError:
            missing.append(r)
    if missing:
        raise PeerError(
            f"rank {rank}: rank(s) {', '.join(map(str, missing))} of {size} did not come to make this group within "
            f"{timeout.total_seconds():g} s: lost, or elsewhere in the program; every rank of a group makes it"
        )
    return [store.get(k).decode() for k in keys]


class Counted(dist.Work):
    """The inner group's Work; reports the seconds from the call to the end of the first wait.

    explain: what to raise instead of the inner group's error.
    """

    def __init__(
        self,
        start: Callable[[], dist.Work],
        report: Callable[[float], None],
        explain: Callable[[RuntimeError], Exception],
    ) -> None:
        super().__init__()
        self._start_s = time.perf_counter()
        self._inner = start()
        self._report = report
        self._explain = explain
        self._once = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is None:
            try:
                self._inner.wait()
            except RuntimeError as e:
                raise self._explain(e) from e
        else:
            self._inner.wait(timeout)  # the caller's own time-out: the call goes on after it
        self._count()
        return True

    def get_future(self) -> Any:
        future = self._inner.get_future()
        future.add_done_callback(lambda _: self._count())
        return future

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> Any:
        return self._inner.result()

    def _count(self) -> None:
        # A future's callback may run while another thread waits. The lock is never released: once is enough.
        if self._once.acquire(blocking=False):
            self._report(time.perf_counter() - self._start_s)

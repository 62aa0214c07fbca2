"""What tests of several ranks share: inputs that every rank knows, and ranks that are threads of one process.

Threads cost no start-up and talk over real gloo groups; processes (``thinwire.launch.run_ranks``) are for what
needs ``torch.distributed``'s global state.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.torch_transport import TorchTransport
from thinwire.collectives.traffic import Tally
from thinwire.collectives.transport import Metered
from thinwire.inner import make_inner_group

TIMEOUT_S = 100.0


def gaussian(seed: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(world: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Every rank's Gaussian input, the same list on all ranks."""
    return [gaussian(1000 * seed + rank, numel, dtype) for rank in range(world)]


def bits(x: Tensor) -> Tensor:
    """The bits of a float tensor as integers: equal means the same NaN payloads and signed zeros, too."""
    return x.detach().contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def meter(group: dist.ProcessGroup) -> Metered:
    """A transport over a group, with counters of its own in ``tally``."""
    return Metered(TorchTransport(group), Tally())


def run_threads(fn: Callable[..., Any], world: int, *args: Any, timeout: float = TIMEOUT_S) -> list[Any]:
    """Run ``fn(group, *args)`` on ``world`` threads, each a rank of one gloo group; results in rank order."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.HashStore()
    results: list[Any] = [None] * world
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            group = make_inner_group(store, rank, world, "gloo", timedelta(seconds=timeout))
            with torch.no_grad():
                results[rank] = fn(group, *args)
        except BaseException as e:
            errors.append((rank, e))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        # The first is the cause; the others lost a peer.
        raise AssertionError(f"rank {errors[0][0]} of {world} failed") from errors[0][1]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def each(kinds: Iterable[type[Any]], check: Callable[[type[Any]], None]) -> None:
    """Check every case; an error says in which one it was."""
    for kind in kinds:
        try:
            check(kind)
        except Exception as error:
            error.add_note(f"case {kind.__name__}")
            raise

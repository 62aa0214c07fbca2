"""Starting ranks: results in order, messages, and a named rank for every way to die."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from thinwire.errors import RankError
from thinwire.launch import Place, run_ranks


def _sum(rank: int, world: int, factor: int, report: Any) -> tuple[int, float]:
    report(("hello", rank))
    x = torch.tensor([float(rank + 1)])
    dist.all_reduce(x)
    return rank, factor * x.item()


def test_results_come_in_rank_order_with_messages() -> None:
    heard: list[tuple[int, Any]] = []
    results = run_ranks(_sum, 3, 10, on_message=lambda rank, body: heard.append((rank, body)), timeout=120)
    assert results == [(0, 60.0), (1, 60.0), (2, 60.0)]
    assert sorted(heard) == [(r, ("hello", r)) for r in range(3)]


def _raise(rank: int, world: int, report: Any) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def test_an_exception_names_its_rank_and_shows_its_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 3 failed: ValueError: the reason") as caught:
        run_ranks(_raise, 3, timeout=120)
    assert caught.value.rank == 1
    assert "in _raise" in caught.value.traceback


def _die(rank: int, world: int, report: Any) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_named_not_its_peers() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 of 3 failed: ended with exit code -9") as caught:
        run_ranks(_die, 3, timeout=120)
    assert caught.value.rank == 2
    assert time.monotonic() - start < 60, "found by its death, not by the time-out"


def _hang(rank: int, world: int, report: Any) -> int:
    if rank == 1:
        threading.Event().wait()
    return os.getpid()


def test_a_rank_that_hangs_is_named_when_the_time_is_up() -> None:
    with pytest.raises(RankError, match=r"no answer from rank\(s\) \[1\] within 5 s") as caught:
        run_ranks(_hang, 2, timeout=5)
    assert caught.value.rank == 1


def _pid(rank: int, world: int, report: Any) -> int:
    report(os.getpid())
    if rank == 0:
        raise ValueError
    threading.Event().wait()
    return 0


def test_no_rank_process_survives() -> None:
    pids: list[int] = []
    with pytest.raises(RankError):
        run_ranks(_pid, 3, on_message=lambda rank, pid: pids.append(pid), timeout=120)
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _environment(rank: int, world: int, report: Any) -> tuple[str, int, bool]:
    return os.environ["GLOO_SOCKET_IFNAME"], torch.get_num_threads(), dist.is_initialized()


def test_a_rank_starts_with_one_thread_its_interface_and_a_group() -> None:
    assert run_ranks(_environment, 1, places=[Place(interface="lo")], timeout=120) == [("lo", 1, True)]


def test_places_must_match_the_ranks() -> None:
    with pytest.raises(ValueError, match="1 places for 2 ranks"):
        run_ranks(_pid, 2, places=[Place()])


def _leave(rank: int, world: int, report: Any) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_a_rank_may_leave_its_group_at_once() -> None:
    run_ranks(_leave, 4, timeout=120)

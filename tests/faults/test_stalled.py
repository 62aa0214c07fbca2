"""A rank that stands still (SIGSTOP) in the middle of calls: named within the time-out; when it goes on, it ends, too.

# pccl 13
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from faults.victim import FallsSilent, Seen, filled, group_on, kept_by, new_group, policy, seen
from support import TIMEOUT_S
from thinwire.launch import run_ranks

pytestmark = pytest.mark.usefixtures("kernels")

TIME_OUT_S = 5.0
ROLL_CALL_S = 6.0
WORLD, VICTIM = 3, 1
NUMEL = 3 << 18


def _stalled(rank: int, world: int, report: Any) -> None:
    coded = policy("int8:block=32")
    group = new_group(coded, TIME_OUT_S)
    gathered = new_group(coded, TIME_OUT_S)
    its_store = group_on(kept_by(VICTIM, rank, world), rank, world, coded, TIME_OUT_S)
    x = filled(NUMEL, rank)

    def start(x: torch.Tensor) -> dict[str, Any]:
        full, part = torch.empty(NUMEL), filled(NUMEL // world, rank)
        return {
            "all_reduce": dist.all_reduce(x, group=group, async_op=True),
            "all_gather": dist.all_gather_single(full, part, group=gathered, async_op=True),
        }

    for work in start(x.clone()).values():  # once undisturbed: on a busy machine first calls take their time
        work.wait()
    dist.barrier()
    if rank == VICTIM:
        report(os.getpid())
        FallsSilent(signal.SIGSTOP, {("all_reduce", 4 * NUMEL): 2, ("all_gather", 4 * NUMEL): 1})
    begin = time.monotonic()
    works = start(x)
    if rank != VICTIM:
        works["its store"] = its_store.allreduce([filled(5000, rank)])
    found = {name: seen(work.wait) for name, work in works.items()}
    assert torch.equal(x, filled(NUMEL, rank))
    report((time.monotonic() - begin, found))


def test_a_rank_that_stands_still_is_named_and_ends_when_it_goes_on() -> None:
    # pccl 13
    pid = 0
    heard: dict[int, tuple[float, dict[str, Seen]]] = {}

    def on_message(rank: int, message: Any) -> None:
        nonlocal pid
        if isinstance(message, int):
            pid = message
            return
        heard[rank] = message
        if set(heard) == {0, 2}:
            os.kill(pid, signal.SIGCONT)

    run_ranks(_stalled, WORLD, timeout=TIMEOUT_S, on_message=on_message)
    for rank, (seconds, found) in heard.items():
        for name, what in sorted(found.items()):
            print(f"rank {rank} {name}: {what.seconds:.2f} s {what.kind}: {what.text}\n")
        assert {what.kind for what in found.values()} == {"PeerError"}
        assert f"rank {rank}: all_reduce, unknown, int8" in found["all_reduce"].text
        assert f"rank {rank}: all_gather, unknown, int8" in found["all_gather"].text
        if rank != VICTIM:
            assert seconds < TIME_OUT_S + ROLL_CALL_S + 10  # encoding, on a busy machine
            for name in ("all_reduce", "all_gather"):
                assert "rank(s) 1 of the 3 of this group (axis dp) did not report" in found[name].text
            assert "The store does not answer either" in found["its store"].text
    for what in heard[VICTIM][1].values():
        assert "All 3 ranks report a failure, none is lost" in what.text

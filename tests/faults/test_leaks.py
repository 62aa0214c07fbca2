"""Nothing grows: memory over many steps, threads, sockets and memory over many groups."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from faults.victim import new_group, policy
from support import TIMEOUT_S, gaussian
from thinwire import GradientSync, compress_ddp
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")

OBJECT_NBYTES = 64  # a small Python object; C++'s are larger
MESSAGES = 9  # of a step, at least
GROUP_NBYTES = 64 << 10  # a group's first page of each buffer and stack would be more


def training_step(rank: int) -> Callable[[], None]:
    """A step of everything that keeps something: residuals, codebooks, differences, streams."""
    dp = {"reduce": "int4:block=32", "feedback": True, "min_nbytes": 0}
    zero = {"gather": "int4:block=32", "difference": True, "min_nbytes": 0}
    feedback = from_dict({"axis": {"dp": dp, "zero": zero}}, "feedback")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Linear(32, 32), process_group=new_group(feedback, 60, feedback_by_caller=True)
    )
    compress_ddp(model)
    layer = nn.Linear(32, 32)
    options = {"feedback_by_caller": True, "op_axes": {"all_gather": "zero"}}
    sync = GradientSync(layer.named_parameters(), new_group(feedback, 60, **options), rollback=True)
    optimizer = torch.optim.SGD(sync.masters(), lr=1e-3, momentum=0.9)
    groups = [new_group(policy(spec), 60) for spec in ("exponent", "mpc:dim=1", "zfp:rate=16", "none")]
    count = 0

    def step() -> None:
        nonlocal count
        x = gaussian(count % 5, 4 * 32).view(4, 32)
        model.zero_grad()
        model(x).square().mean().backward()
        sync.start()
        layer(x).square().mean().backward()
        sync.finish()
        optimizer.step()
        sync.commit()
        sync.gather()
        message = gaussian(count % 5, 3000)
        for group in groups:
            dist.all_reduce(message, group=group)
        full = torch.empty(6000)
        dist.all_gather_single(full, message, group=groups[0])
        (dist.send if rank == 0 else dist.recv)(message, 1 - rank, groups[0])
        count += 1

    return step


def rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _objects(rank: int, world: int, report: Any) -> int:
    step = training_step(rank)
    for _ in range(200):  # caches of headers are full
        step()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(200):
        step()
    gc.collect()
    return sys.getallocatedblocks() - before


@pytest.mark.slow
def test_steps_leave_no_object_behind() -> None:
    grown = run_ranks(_objects, 2, timeout=TIMEOUT_S)
    assert max(grown) < 200, "less than one block of memory a step"


def _memory(rank: int, world: int, report: Any) -> list[int]:
    step = training_step(rank)
    sizes = []
    for number in range(10_001):
        step()
        if number in (2_000, 10_000):
            sizes.append(rss())
    return sizes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_does_not_grow_over_ten_thousand_steps() -> None:
    for early, late in run_ranks(_memory, 2, timeout=800):
        print(early, late)
        assert late - early < 8_000 * MESSAGES * OBJECT_NBYTES, "not one small object a message is kept"


def _groups(rank: int, world: int, count: int, report: Any) -> list[tuple[int, int, int]]:
    """Threads, descriptors and memory after 20 groups, half of the others and all of them."""
    coded = policy("exponent")
    found = []
    for turn in range(21 + count):
        if turn in (20, 20 + count // 2, 20 + count):
            memory = rss()  # collects first
            found.append((len(threading.enumerate()), len(os.listdir("/proc/self/fd")), memory))
        group = new_group(coded, 30)
        dist.all_reduce(gaussian(rank, 5000), group=group)
        if turn % 2 == 0:
            (dist.send if rank == 0 else dist.recv)(gaussian(rank, 5000), 1 - rank, group)
        dist.destroy_process_group(group)
        del group
    return found


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_groups_that_are_destroyed_leave_no_thread_no_socket_and_no_memory(count: int) -> None:
    for found in run_ranks(_groups, 2, count, timeout=TIMEOUT_S + count):
        print(found)
        assert len({(threads, files) for threads, files, _ in found}) == 1
        if count >= 200:
            half, whole = found[1][2], found[2][2]
            assert whole - half < count // 2 * GROUP_NBYTES

"""Ranks that are not of one mind: the error says which ranks, and which values.

Another policy, seed or size is in tests/test_group.py; bytes that say so themselves are in tests/test_wire.py.

# hivemind 572, 519, torchft 206
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from faults.victim import filled, new_group, policy, seen
from support import TIMEOUT_S
from thinwire.errors import MismatchError, PeerError
from thinwire.group import base
from thinwire.launch import run_ranks

pytestmark = pytest.mark.usefixtures("kernels")
N = 2000
CODED = policy("int8:block=32")


def _disagree(rank: int, world: int, report: Any) -> None:
    base.VERSION += rank
    with pytest.raises(MismatchError, match=r"rank 0: wire format 1,(.|\n)*rank 1: wire format 2,"):
        new_group(CODED, 10)
    base.VERSION -= rank
    with pytest.raises(MismatchError, match=r"rank 0:.*checksum False(.|\n)*rank 1:.*checksum True"):
        new_group(CODED, 10, checksum=rank == 1)
    with pytest.raises(MismatchError, match=r"rank 0:.*block=32(.|\n)*rank 1:.*block=64"):
        new_group(policy(f"int8:block={32 + 32 * rank}"), 10)

    x = filled(N, rank)
    with pytest.raises(MismatchError, match=r"rank 0: .*float32, 8000 bytes\n  rank 1: .*bfloat16, 4000 by"):
        dist.all_reduce(x.to([torch.float32, torch.bfloat16][rank]), group=new_group(CODED, 10))
    group = new_group(CODED, 10)
    calls = (
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.all_gather_single(torch.empty(world * N), x, group=group),
    )
    with pytest.raises(MismatchError, match=r"rank 0: all_reduce(.|\n)*rank 1: all_gather"):
        calls[rank]()

    # Another order of calls that are all known: found where the group compares every call.
    careful = new_group(CODED, 10, compare_calls=True)
    sizes = [1000, 3000]
    for size in sizes:
        dist.all_reduce(x[:size] if size < N else filled(size, rank), group=careful)
    with pytest.raises(
        MismatchError, match=r"rank 0: all_reduce.*4000 bytes\n  rank 1: all_reduce.*12000 by"
    ):
        dist.all_reduce(filled(sizes[rank], rank), group=careful)

    # One rank's message is small and passes through, the other's is not.
    torn = new_group(policy("int8:block=32", min_nbytes=4000), 2)
    found = seen(lambda: dist.all_reduce(filled(10 + 2000 * rank, rank), group=torn))
    assert found.kind == "PeerError"
    assert found.seconds < 10
    assert "rank(s) 0: all_reduce, unknown, pass-through, float32, 40 bytes" in found.text
    assert "rank(s) 1: all_reduce, unknown, int8:block=32,round=nearest, float32, 8040 bytes" in found.text

    # A rank that never makes the group.
    if rank == 0:
        with pytest.raises(PeerError, match=r"rank\(s\) 1 of 2 did not come to make this group within 1 s"):
            new_group(CODED, 1)
    dist.barrier()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == world, "none of that has harmed the default group"


def test_ranks_that_differ_are_told_which_and_in_what() -> None:
    run_ranks(_disagree, 2, timeout=TIMEOUT_S)

"""A link that is cut and comes back: before the time-out a collective ends with the right result, after it with an error.

# hivemind 624
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from faults.victim import Seen, group_on, kept_by, new_group, policy, seen
from support import TIMEOUT_S, gaussian
from thinwire.lab.net import Network, Topology
from thinwire.launch import run_ranks

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("kernels", "netlab")]

RATE = "50mbit"
NUMEL = 3 << 20  # 3.4 MB of int8 frames: half a second at this rate
CUT_S = 2.0
LONG_S, SHORT_S = 30.0, 3.0


def _cut(rank: int, world: int, address: str, report: Any) -> Seen:
    coded = policy("int8:block=32")
    patient, hasty = new_group(coded, LONG_S), new_group(coded, SHORT_S)
    its_store = group_on(kept_by(0, rank, world, address), rank, world, coded, SHORT_S)
    x = gaussian(rank, NUMEL)
    expected = gaussian(rank, NUMEL)
    dist.all_reduce(
        expected, group=patient
    )  # undisturbed; the second call of the same input gives the same bits
    dist.barrier()
    begin = time.monotonic()
    work = dist.all_reduce(x, group=patient, async_op=True)
    report("cut")
    work.wait()
    report(("patient", time.monotonic() - begin))
    assert torch.equal(x, expected)

    dist.all_reduce(gaussian(rank, 1000), group=hasty)
    dist.barrier()
    y = gaussian(rank, NUMEL)
    works = [dist.all_reduce(y, group=hasty, async_op=True), its_store.allreduce([gaussian(rank, NUMEL)])]
    report("cut and leave")
    begin = time.monotonic()
    found = [seen(work.wait) for work in works]
    report(("hasty", time.monotonic() - begin))
    assert torch.equal(y, gaussian(rank, NUMEL))
    report(("found", found))
    return found[0]


@pytest.mark.slow
def test_a_cut_shorter_than_the_time_out_is_survived_and_a_longer_one_is_an_error_on_both_sides() -> None:
    heard: dict[tuple[int, str], Any] = {}
    with Network(Topology(hosts=2, rate=RATE)) as network:

        def on_message(rank: int, message: Any) -> None:
            if isinstance(message, tuple):
                heard[rank, message[0]] = message[1]
                return
            heard[rank, message] = True
            if {(0, message), (1, message)} <= set(heard):
                network.cut(1)
                if message == "cut":
                    time.sleep(CUT_S)
                    network.restore(1)

        run_ranks(
            _cut,
            2,
            network.address(0),
            timeout=TIMEOUT_S,
            places=network.places(),
            preload=("thinwire.lab.net",),
            on_message=on_message,
        )
    print(heard)
    for rank in range(2):
        assert CUT_S <= heard[rank, "patient"] < LONG_S
        assert heard[rank, "hasty"] < SHORT_S + 10
        hasty, stored = heard[rank, "found"]
        assert (hasty.kind, stored.kind) == ("PeerError", "PeerError")
        assert f"rank {rank}: all_reduce, unknown, int8" in hasty.text
        # The store of this group is a file, which both can read.
        assert "All 2 ranks report a failure, none is lost" in hasty.text
    # The other is in rank 0's process, at the other end of the link.
    assert "rank(s) 1 of the 2 of this group (axis dp) did not report" in heard[0, "found"][1].text
    assert "The store does not answer either" in heard[1, "found"][1].text

"""A rank that dies (kill -9) in the middle of calls: every other rank gets an error that names it, long before the time-out.

# hivemind 624, pccl 13
"""

from __future__ import annotations

import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from faults.victim import FallsSilent, Seen, filled, group_on, kept_by, new_group, policy, seen
from support import TIMEOUT_S
from thinwire import GradientSync, compress_ddp
from thinwire.errors import RankError
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")

TIME_OUT_S = 60.0  # much longer than all of it takes: nothing here ends by the time-out
WORLD, VICTIM = 4, 1
CHUNK = 1 << 20  # values: two segments among four ranks
LATE = 4 * CHUNK + 4096  # three segments
# Of a segment a rank encodes a frame for each other rank, or, to gather, one.
PLACES = {
    ("all_reduce", 16 * CHUNK): 4,  # in the first round: the first segment is sent
    ("all_reduce", 4 * LATE): 3 * 3 + 2,  # in the second round
    ("reduce_scatter", 16 * CHUNK): 4,
    ("all_gather", 16 * CHUNK): 2,
    ("send", 4 * CHUNK): 1,
}


class Training:
    """A linear layer on a group; what its parameters were before the step in which the victim dies."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 40, bias=False)
        self.before = self.layer.weight.detach().clone()

    def same(self) -> bool:
        return torch.equal(self.layer.weight.detach(), self.before)


def _killed(rank: int, world: int, report: Any) -> None:
    coded = policy("int8:block=32")
    groups = {
        name: new_group(coded, TIME_OUT_S)
        for name in ("all_reduce", "late", "reduce_scatter", "all_gather", "send", "to the victim")
    }
    plain = new_group("none", TIME_OUT_S)
    groups["its store"] = group_on(kept_by(VICTIM, rank, world), rank, world, coded, TIME_OUT_S)
    dp = from_dict({"axis": {"dp": {"reduce": "int4", "feedback": True, "min_nbytes": 0}}}, "test")
    ddp, zero = Training(), Training()
    on = new_group(dp, TIME_OUT_S, feedback_by_caller=True)
    model = DistributedDataParallel(ddp.layer, process_group=on)
    compress_ddp(model)
    sync = GradientSync(zero.layer.named_parameters(), new_group(dp, TIME_OUT_S, feedback_by_caller=True))
    nbytes = ddp.before.nbytes

    if rank == VICTIM:
        FallsSilent(signal.SIGKILL, {**PLACES, ("all_reduce", nbytes): 2, ("reduce_scatter", nbytes): 2})

    def start() -> dict[str, dist.Work]:
        works: dict[str, Any] = {
            "all_reduce": dist.all_reduce(xs[0], group=groups["all_reduce"], async_op=True),
            "late": dist.all_reduce(xs[1], group=groups["late"], async_op=True),
            "reduce_scatter": dist.reduce_scatter_single(
                torch.empty(CHUNK), xs[2], group=groups["reduce_scatter"], async_op=True
            ),
            "all_gather": dist.all_gather_single(
                xs[3], filled(CHUNK, rank), group=groups["all_gather"], async_op=True
            ),
        }
        if rank == VICTIM:
            works["send"] = dist.isend(filled(CHUNK, rank), 0, groups["send"])
            return works
        works["its store"] = groups["its store"].allreduce([filled(5000, rank)])
        works["pass-through"] = dist.all_reduce(xs[4], group=plain, async_op=True)
        if rank == 0:
            works["recv"] = dist.irecv(torch.empty(CHUNK), VICTIM, groups["send"])
        if rank == 2:
            # More than the sockets' buffers take.
            works["send"] = dist.isend(filled(32 * CHUNK, rank), VICTIM, groups["to the victim"])
        return works

    xs = [filled(numel, rank) for numel in (4 * CHUNK, LATE, 4 * CHUNK, 4 * CHUNK, CHUNK)]
    before = xs[0].clone()
    begin = time.monotonic()
    works = start()
    sync.start()
    zero.layer(torch.ones(1, 64)).sum().backward()
    found = {"DDP": seen(lambda: model(torch.ones(1, 64)).sum().backward())}
    found["GradientSync"] = seen(sync.finish)
    found |= {name: seen(work.wait) for name, work in works.items()}
    # Whatever comes later fails at once, with the first error.
    again = seen(lambda: dist.all_reduce(xs[0], group=groups["all_reduce"]))
    assert again.kind == "PeerError"
    assert again.seconds < 1
    assert torch.equal(xs[0], before), "the first round has written nothing"
    assert ddp.same()
    assert zero.same()
    start_closing = time.monotonic()
    groups["its store"].abort()
    dist.destroy_process_group()
    assert time.monotonic() - start_closing < 10
    assert not [t for t in threading.enumerate() if t.name.startswith("thinwire/")]
    report((time.monotonic() - begin, found))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_every_call_of_every_other_rank_names_the_rank_that_was_killed() -> None:
    # hivemind 624, pccl 13
    heard: dict[int, tuple[float, dict[str, Seen]]] = {}
    with pytest.raises(RankError, match=r"rank 1 of 4 failed: ended with exit code -9"):
        run_ranks(
            _killed, WORLD, timeout=TIMEOUT_S, grace=60, on_message=lambda rank, m: heard.update({rank: m})
        )
    assert sorted(heard) == [0, 2, 3]
    for rank, (_, found) in heard.items():  # of all ranks: one alone does not tell why another is missing
        for name, what in sorted(found.items()):
            print(f"rank {rank} {name}: {what.seconds:.2f} s {what.kind}: {what.text}\n")
    for rank, (seconds, found) in heard.items():
        assert seconds < 30, "several roll calls at a time, and no time-out"
        for name, op in (
            ("all_reduce", "all_reduce, unknown, int8"),
            ("late", "all_reduce, unknown, int8"),
            ("reduce_scatter", "reduce_scatter, unknown, int8"),
            ("all_gather", "all_gather, unknown, int8"),
            ("pass-through", "all_reduce, unknown, pass-through"),
            ("DDP", "all_reduce, gradient, int4"),
            ("GradientSync", "reduce_scatter, gradient, int4"),
        ):
            what = found[name]
            if name != "DDP":  # autograd raises its own kind of error
                assert what.kind == "PeerError", (rank, name, what)
            assert f"rank {rank}: {op}" in what.text, (rank, name, what)
            # Others are in the same call at the same time, but for the one that waits in the main thread.
            others = "[0-9, ]*" if name == "pass-through" else ""
            named = rf"rank\(s\) {others}\b1\b{others} of the 4 of this group \(axis dp\) did not report"
            assert re.search(named, what.text), (rank, name, what)
        assert found["its store"].kind == "PeerError"
        assert "The store does not answer either" in found["its store"].text
    assert "recv from rank 1 failed" in heard[0][1]["recv"].text
    assert "send to rank 1 failed" in heard[2][1]["send"].text

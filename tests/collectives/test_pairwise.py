"""Messages between some pairs: at once, in rounds, and as an all-to-all; and memory that ranks of a host share."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support import run_threads
from thinwire.collectives import host_memory, pairwise
from thinwire.collectives.pairwise import Pairwise
from thinwire.collectives.torch_transport import TorchTransport

WORLD = 5
SIZES = {(0, 1): [3, 5], (1, 0): [1], (0, 4): [0, 7], (3, 2): [100_000], (4, 0): [9, 9, 9], (2, 2): []}
"""(from, to) -> bytes of each message."""


def message(source: int, to: int, number: int) -> Tensor:
    nbytes = SIZES[source, to][number]
    return torch.arange(nbytes, dtype=torch.int64).add(10 * source + to + number).to(torch.uint8)


@pytest.mark.parametrize("how", ["at once", "rounds", "all_to_all"])
def test_messages_of_a_pair_come_in_order(how: str) -> None:
    def run(group: dist.ProcessGroup) -> None:
        me, transport = group.rank(), TorchTransport(group)
        pairs = Pairwise(transport, torch.device("cpu"))
        pending = []
        for _ in range(2):  # two under way
            leaving = [
                (to, message(me, to, i)) for (s, to), n in SIZES.items() if s == me for i in range(len(n))
            ]
            arriving = [
                (s, torch.zeros(n, dtype=torch.uint8))
                for (s, to), sizes in SIZES.items()
                if to == me
                for n in sizes
            ]
            if how == "all_to_all":
                exchange = pairwise._all_to_all(transport, leaving, arriving, torch.device("cpu"))
            else:
                exchange = pairs.start(leaving, arriving, in_rounds=how == "rounds")
            pending.append((exchange, arriving))
        for exchange, arriving in pending:
            for source in {source for source, buffer in arriving if buffer.numel()}:
                exchange.wait_for(source)
            exchange.wait()
            expected = [message(s, to, i) for (s, to), n in SIZES.items() if to == me for i in range(len(n))]
            assert all(torch.equal(got, sent) for (_, got), sent in zip(arriving, expected, strict=True))

    run_threads(run, WORLD)


def test_memory_is_shared_grows_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(os.listdir("/dev/shm"))

    def run(group: dist.ProcessGroup, able: int) -> list[bool]:
        me, transport = group.rank(), TorchTransport(group)
        pairs = Pairwise(transport, torch.device("cpu"))
        mates = [rank for rank in range(3) if rank != me]
        memory, shared = host_memory.of(transport, mates), []
        assert host_memory.of(transport, mates) is memory
        if me >= able:
            monkeypatch.setattr(memory, "_mapped", _refused)
        for numel in (0, 10, 7, 5000):
            regions = memory.open(torch.zeros(numel, dtype=torch.bfloat16), me, pairs)
            shared.append(regions is not None)
            if regions is None:
                continue
            regions[me].fill_(me + numel)
            memory.tell(pairs).wait()
            for rank, region in regions.items():
                assert torch.equal(region, torch.full((numel,), rank + numel, dtype=torch.bfloat16))
            memory.tell(pairs).wait()
        return shared

    assert run_threads(run, 3, 3) == [[True] * 4] * 3
    assert not caplog.records
    assert run_threads(run, 3, 2) == [[False] * 4] * 3, "one that cannot: all do without, and know it alike"
    said = sorted(record.getMessage().split(" (")[0] for record in caplog.records)
    assert said == [
        f"rank {r}: ranks [0, 1, 2] of its host cannot share 2 bytes of memory in /dev/shm" for r in range(3)
    ]
    assert set(os.listdir("/dev/shm")) <= before


def _refused(fd: int) -> Tensor:
    os.close(fd)
    raise OSError("no memory to map")

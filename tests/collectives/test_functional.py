"""The functions over plain torch groups, in rank processes."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from collectives.oracle import two_shot
from support import TIMEOUT_S, gaussian, inputs, same
from thinwire.errors import SpecError, UnsupportedError
from thinwire.launch import run_ranks

SPEC = "int8:block=32"


def _every_function(rank: int, world: int, report: Any) -> None:
    xs = inputs(world, 600)
    x = xs[rank].clone().view(20, 30)
    assert tw.all_reduce(x, SPEC, op="mean") is None
    expected = two_shot(xs, tw.parse(SPEC), tw.CallOptions(mean=True))
    assert same(x.view(-1), expected)

    work = tw.all_reduce(y := xs[rank].clone(), "mpc:dim=1", async_op=True)
    assert work is not None
    work.wait()
    assert same(y, (torch.zeros(600) + xs[0] + xs[1]) + xs[2])
    assert same(work.get_future().value(), y)

    ring = xs[rank].clone()
    tw.all_reduce(ring, "none", options=tw.CallOptions(algorithm="ring"))
    assert torch.allclose(ring, sum(xs), rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]

    for algorithm in ("two_shot", "ring"):
        out = torch.empty(200)
        tw.reduce_scatter(out, xs[rank], "none", options=tw.CallOptions(algorithm=algorithm))
        part = slice(rank * 200, rank * 200 + 200)
        assert torch.allclose(out, sum(x[part] for x in xs), rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]

    gathered = torch.empty(world, 600)
    tw.all_gather(gathered, xs[rank], "none")
    assert same(gathered, torch.stack(xs))

    b = xs[rank].clone()
    tw.broadcast(b, "none", 2)
    assert same(b, xs[2])

    outs = [torch.empty(10 * (peer + 1)) for peer in range(world)]
    tw.all_to_all(outs, [xs[rank][: 10 * (rank + 1)]] * world, "none")
    assert all(same(out, xs[peer][: 10 * (peer + 1)]) for peer, out in enumerate(outs))

    after, before = (rank + 1) % world, (rank - 1) % world
    received = torch.empty(600)
    works = [
        tw.recv(received, "none", before, async_op=True),
        tw.send(xs[rank], "none", after, async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()
    assert same(received, xs[before])

    empty = torch.empty(0)
    tw.all_reduce(empty, SPEC)
    tw.all_gather(empty, empty, SPEC)
    tw.reduce_scatter(empty, empty, SPEC)

    counted = {m: e for m, e in tw.traffic().entries().items() if m.role != "control"}
    assert {m.op for m in counted} == {
        "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "recv"
    }  # fmt: skip
    (mean,) = (
        e for m, e in counted.items() if m.op == "all_reduce" and m.codec.startswith("int8") and m.nbytes
    )
    assert (mean.calls, mean.raw_bytes) == (1, 2 * 2 / 3 * 2400)


def _errors(rank: int, world: int, report: Any) -> None:
    x = gaussian(0, 12)
    with pytest.raises(UnsupportedError, match="contiguous"):
        tw.all_reduce(x.view(3, 4).t(), SPEC)
    with pytest.raises(UnsupportedError, match="cannot be compressed"):
        tw.all_reduce(x, SPEC, op="max")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"input of 12 values, 3 outputs of 5"):
        tw.reduce_scatter(torch.empty(5), x, SPEC)
    with pytest.raises(UnsupportedError, match=r"3 inputs of 12 values, output of 35"):
        tw.all_gather(torch.empty(35), x, SPEC)
    with pytest.raises(SpecError, match="did you mean"):
        tw.all_reduce(x, "int9")
    with pytest.raises(UnsupportedError, match="int64"):
        tw.all_reduce(torch.arange(12), SPEC)
    tw.all_reduce(x, SPEC)  # none of it has cost the ranks their order


def _groups_end_with_their_threads(rank: int, world: int, report: Any) -> None:
    before = len(threading.enumerate())
    for _ in range(5):
        group = dist.new_group()
        tw.all_reduce(torch.ones(100), SPEC, group)
        tw.send(torch.ones(5), "none", 1, group) if rank == 0 else None
        tw.recv(torch.ones(5), "none", 0, group) if rank == 1 else None
        dist.destroy_process_group(group)
        del group
    gc.collect()
    assert len(threading.enumerate()) == before, threading.enumerate()


def _all(rank: int, world: int, report: Any) -> None:
    _every_function(rank, world, report)
    _errors(rank, world, report)


def _all_threads(rank: int, world: int, report: Any) -> None:
    _groups_end_with_their_threads(rank, world, report)


@pytest.mark.usefixtures("kernels")
def test_functions_and_their_errors() -> None:
    run_ranks(_all, 3, timeout=TIMEOUT_S)


@pytest.mark.usefixtures("kernels")
def test_groups_end_with_their_threads() -> None:
    run_ranks(_all_threads, 3, timeout=TIMEOUT_S)

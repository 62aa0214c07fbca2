from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from collectives.oracle import decoded
from support import inputs, meter, run_threads, same
from thinwire import CallOptions, parse, wire
from thinwire.collectives import all_gather, frames
from thinwire.collectives.options import derive_seed
from thinwire.errors import WireError

pytestmark = pytest.mark.usefixtures("kernels")
SPECS = (
    "none",
    "bf16",
    "int4:block=128",
    "zfp:rate=8",
    "mpc:dim=1",
    "int4|huffman",
    "int4:block=32,round=stochastic",
)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_gets_every_ranks_decoded_bits(world: int) -> None:
    """Sizes differ between ranks: rank p has numel * (p + 1) values."""
    cases = [
        (spec, numel, dtype, CallOptions(seed=9, padded=padded))
        for spec in SPECS
        for numel in (0, 1, 257)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for padded in ((False,) if parse(spec).fixed_size else (False, True))
    ]

    def values(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [x[: numel * (p + 1)] for p, x in enumerate(inputs(world, numel * world, dtype))]

    def run(group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
        results = []
        for spec, numel, dtype, options in cases:
            xs = values(numel, dtype)
            outs = [torch.full_like(x, torch.nan) for x in xs]
            x = xs[group.rank()].contiguous()
            all_gather(x, outs, parse(spec), meter(group), options)
            assert same(x, xs[group.rank()])
            results.append(outs)
        return results

    results = run_threads(run, world)
    for i, (spec, numel, dtype, _) in enumerate(cases):
        for p, x in enumerate(values(numel, dtype)):
            expected = decoded(parse(spec), x, derive_seed(9, p, -1, 0))
            assert all(same(results[rank][i][p], expected) for rank in range(world)), spec


def test_the_input_may_be_a_part_of_the_output() -> None:
    def run(group: dist.ProcessGroup) -> torch.Tensor:
        out = torch.zeros(3 * 64)
        outs = list(out.split(64))
        mine = outs[group.rank()]
        mine.copy_(inputs(3, 64)[group.rank()])
        all_gather(mine, outs, parse("int8:block=32"), meter(group), CallOptions())
        return out

    a, b, c = run_threads(run, 3)
    assert same(a, b)
    assert same(b, c)
    bound = parse("int8:block=32").error_bound(torch.cat(inputs(3, 64)))
    assert bound is not None
    assert ((a - torch.cat(inputs(3, 64))).abs() <= bound).all()


def test_bytes_and_modes_are_counted() -> None:
    def run(group: dist.ProcessGroup, spec: str, padded: bool) -> tuple[int, int, int]:
        transport, outs = meter(group), [torch.empty(5000) for _ in range(3)]
        all_gather(inputs(3, 5000)[group.rank()], outs, parse(spec), transport, CallOptions(padded=padded))
        return transport.tally.wire_bytes, transport.tally.two_phase, transport.tally.padded

    codec = parse("int8:block=32")
    expected = 2 * wire.max_frame_nbytes(codec, 5000, torch.float32)
    assert run_threads(run, 3, "int8:block=32", False) == [(expected, 0, 0)] * 3
    bound = 2 * wire.max_frame_nbytes(parse("mpc:dim=1"), 5000, torch.float32)
    assert run_threads(run, 3, "mpc:dim=1", True) == [(bound, 0, 1)] * 3
    for sent, phases, padded in run_threads(run, 3, "mpc:dim=1", False):
        assert sent < bound
        assert (phases, padded) == (1, 0)


def test_an_impossible_size_is_refused_before_memory_is_taken() -> None:
    def run(group: dist.ProcessGroup) -> str:
        outs = [torch.empty(10), torch.empty(10)]
        transport = meter(group)
        if group.rank() == 1:
            # Rank 1 lies about its size: 2^40 bytes.
            size = torch.tensor([frames._sealed(2**40)])
            sizes = torch.empty(2, dtype=torch.int64)
            transport.all_gather(sizes.view(torch.uint8), size.view(torch.uint8)).wait()
            return ""
        with pytest.raises(WireError, match=r"rank 1 announces a frame of 1099511627776 bytes, at most") as e:
            all_gather(torch.zeros(10), outs, parse("mpc:dim=1"), transport, CallOptions())
        return str(e.value)

    assert run_threads(run, 2)[0]

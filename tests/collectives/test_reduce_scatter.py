from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from collectives.oracle import UNIT, exact, totals_bound, two_shot_totals
from support import inputs, meter, run_threads, same
from thinwire import CallOptions, parse
from thinwire.collectives import Chunks, reduce_scatter, ring_reduce_scatter

pytestmark = pytest.mark.usefixtures("kernels")
SPECS = ("none", "bf16", "int8:block=32", "int4:block=128", "zfp:rate=8", "mpc:dim=1", "int4|huffman")
OPTIONS = CallOptions(seed=3, segment_numel=512)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("granular", [True, False])
def test_owners_get_the_oracles_bits(world: int, granular: bool) -> None:
    """granular: chunks at multiples of the codec's granule; else equal chunks, which cut its blocks anywhere."""
    cases = [
        (spec, share, dtype, replace(OPTIONS, mean=share % 2 == 1))
        for spec in SPECS
        for share in (0, 1, 33, 1000)
        for dtype in (torch.float32, torch.bfloat16)
    ]

    def chunks_of(spec: str, share: int) -> Chunks:
        numel = world * share
        return Chunks.of(numel, world, parse(spec).granule) if granular else Chunks(numel, world, share)

    def run(group: dist.ProcessGroup) -> list[torch.Tensor]:
        found = []
        for spec, share, dtype, options in cases:
            x = inputs(world, world * share, dtype)[group.rank()]
            before = x.clone()
            found.append(reduce_scatter(x, parse(spec), meter(group), chunks_of(spec, share), options))
            assert same(x, before), "the input is not changed"
        return found

    results = run_threads(run, world)
    for i, (spec, share, dtype, options) in enumerate(cases):
        xs = inputs(world, world * share, dtype)
        codec, chunks = parse(spec), chunks_of(spec, share)
        for rank, total in enumerate(two_shot_totals(xs, codec, options, chunks)):
            assert same(results[rank][i], total), f"{spec} {share} {dtype}"
            error = (total.double() - exact(xs, options.mean)[slice(*chunks.bounds(rank))]).abs()
            if granular:
                assert (error <= totals_bound(xs, codec, options.mean)[slice(*chunks.bounds(rank))]).all()


def test_segments_do_not_change_the_values() -> None:
    """Contract: bytes do not depend on the scheduler's chunking, nor on the order in which pairs exchange them."""

    def run(group: dist.ProcessGroup, spec: str, segment: int, depth: int, rounds: int) -> torch.Tensor:
        x = inputs(3, 3 * 4096)[group.rank()]
        chunks = Chunks.of(x.numel(), 3, parse(spec).granule)
        options = CallOptions(segment_numel=segment, depth=depth, rounds_nbytes=rounds)
        return reduce_scatter(x, parse(spec), meter(group), chunks, options)

    for spec in ("int8:block=128", "zfp:rate=8", "mpc:dim=1"):
        whole = run_threads(run, 3, spec, 1 << 20, 2, 1 << 20)
        for how in ((1, 1, 1 << 20), (1, 8, 0), (3000, 0, 1 << 20), (3000, 2, 0)):
            assert all(same(a, b) for a, b in zip(whole, run_threads(run, 3, spec, *how), strict=True))


def test_residual_is_what_this_ranks_encoding_lost() -> None:
    codec, world, share = parse("int4:block=32"), 3, 96
    chunks = Chunks(world * share, world, share)
    given = [torch.full((world * share,), 0.01 * rank) for rank in range(world)]

    def run(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        residual = given[group.rank()].clone()
        x = inputs(world, world * share)[group.rank()]
        return reduce_scatter(x, codec, meter(group), chunks, OPTIONS, residual=residual), residual

    results = run_threads(run, world)
    total = torch.cat([t for t, _ in results]).double()
    left = sum(r.double() for _, r in results)
    meant = exact([x + g for x, g in zip(inputs(world, world * share), given, strict=True)], mean=False)
    # One rounding per residual and per addition, of values below 16.
    assert (total + left - meant).abs().max() <= 2 * world * UNIT * 16
    for rank, (_, residual) in enumerate(results):
        assert not residual[slice(*chunks.bounds(rank))].any()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ring_leaves_its_input_alone_and_lossless_is_exact(world: int) -> None:
    def run(group: dist.ProcessGroup) -> torch.Tensor:
        x = inputs(world, world * 50)[group.rank()]
        before = x.clone()
        chunks = Chunks(x.numel(), world, 50)
        total = ring_reduce_scatter(x, parse("none"), meter(group), chunks, CallOptions(mean=True))
        assert same(x, before)
        total.zero_()
        assert same(x, before), "the result is not a view of the input"
        return ring_reduce_scatter(x, parse("none"), meter(group), chunks, CallOptions())

    xs = inputs(world, world * 50)
    for rank, total in enumerate(run_threads(run, world)):
        # The chunk of rank p travels p + 1, p + 2, ..., p: that is the order of the additions.
        order = [(rank + 1 + hop) % world for hop in range(world)]
        expected = xs[order[0]][rank * 50 : rank * 50 + 50].clone()
        for peer in order[1:]:
            expected = xs[peer][rank * 50 : rank * 50 + 50] + expected
        assert same(total, expected)

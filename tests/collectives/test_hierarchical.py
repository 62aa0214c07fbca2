"""Collectives in levels on real gloo groups: the bits, the order of sums, the bounds, the bytes, the residuals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.oracle import decoded, exact, gathered
from support import gaussian, inputs, meter, run_threads, same
from thinwire import CallOptions, Codec, parse
from thinwire.collectives import Chunks, Residuals, all_gather, all_reduce, all_to_all, reduce_scatter
from thinwire.collectives.endpoint import Endpoint
from thinwire.collectives.options import Algorithm, derive_seed
from thinwire.collectives.topology import Topology
from thinwire.collectives.torch_transport import TorchTransport
from thinwire.collectives.traffic import Message
from thinwire.collectives.transport import Metered
from thinwire.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("kernels")
SPECS = ("none", "int4:block=32", "mpc:dim=1", "exponent", "bf16", "zfp:rate=8")
WORLD = 5
HOSTS = (
    "aabbb",
    "abaca",
    "aaaab",
    "aaaaa",
    "abcde",
)  # uneven, interleaved, one rank alone, one host, a host each
NUMELS = (1, 131, 4099)
SEGMENT = 2048


def options_of(hosts: str, **changes: object) -> CallOptions:
    base = CallOptions(
        algorithm="hierarchical", topology=Topology.of_hosts(hosts), seed=5, segment_numel=SEGMENT
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def by_host(hosts: str) -> list[list[int]]:
    return [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]


def totals(
    xs: Sequence[Tensor], codec: Codec, options: CallOptions, hosts: str, chunks: Chunks
) -> list[Tensor]:
    """The same arithmetic without a network: sums inside of hosts, in fp32, encoded once each, added in order of hosts."""
    groups, size = by_host(hosts), len(xs)
    step = max(options.segment_numel // size // codec.granule, 1) * codec.granule
    found = []
    for d in range(size):
        where = slice(*chunks.bounds(d))
        own = next(group for group in groups if d in group)
        total = torch.zeros(where.stop - where.start)
        for group in groups:
            part = torch.zeros_like(total)
            for rank in group:
                part += xs[rank][where]
            if group is not own:
                steward = group[own.index(d) % len(group)]
                pieces = [
                    decoded(codec, piece, derive_seed(options.seed, steward, d, index))
                    for index, piece in enumerate(part.split(step))
                    if piece.numel()
                ]
                part = torch.cat([part[:0], *pieces])
            total += part
        found.append(total.div_(size) if options.mean else total)
    return found


def layered(xs: Sequence[Tensor], codec: Codec, options: CallOptions, hosts: str) -> Tensor:
    """The result of all_reduce where there are several hosts with several ranks each."""
    chunks = Chunks.of(xs[0].numel(), len(xs), codec.granule)
    sums = [t.to(xs[0].dtype) for t in totals(xs, codec, options, hosts, chunks)]
    return torch.cat(gathered(sums, codec, options))


def test_all_reduce_is_host_sums_in_order_for_every_topology_size_dtype_and_codec() -> None:
    cases = [
        (spec, hosts, numel, dtype, options_of(hosts, mean=numel == 131, padded=padded))
        for spec in SPECS
        for hosts in HOSTS[:3]
        for numel in NUMELS
        for dtype in (torch.float32, torch.bfloat16)
        for padded in ((False,) if parse(spec).fixed_size else (False, True))
    ]

    def run(group: dist.ProcessGroup) -> list[Tensor]:
        results = []
        for spec, _, numel, dtype, options in cases:
            x = inputs(WORLD, numel, dtype)[group.rank()]
            all_reduce(x, parse(spec), meter(group), options)
            results.append(x)
        return results

    results = run_threads(run, WORLD)
    for i, (spec, hosts, numel, dtype, options) in enumerate(cases):
        expected = layered(inputs(WORLD, numel, dtype), parse(spec), options, hosts)
        for rank in range(WORLD):
            assert same(results[rank][i], expected), f"rank {rank}: {spec} {hosts} {numel} {dtype} {options}"


def test_one_host_is_the_flat_one_with_its_codec_and_a_host_each_the_flat_one() -> None:
    def run(group: dist.ProcessGroup, hosts: str, algorithm: Algorithm, spec: str) -> Tensor:
        x = gaussian(group.rank(), 4099)
        options = options_of(hosts, algorithm=algorithm, levels=(("inter", parse("int4:block=32")),))
        all_reduce(x, parse(spec), meter(group), options)
        return x

    for hosts, spec, flat in (("abc", "int4:block=32", "int4:block=32"), ("aaa", "int4:block=32", "none")):
        ours, theirs = (
            run_threads(run, 3, hosts, algorithm, name)
            for algorithm, name in (("hierarchical", spec), ("two_shot", flat))
        )
        assert all(map(same, ours, theirs))


def test_every_op_agrees_with_the_flat_one_where_nothing_is_lost() -> None:
    """All-gather and all-to-all bit for bit, sums up to the order in which they are taken."""

    def run(group: dist.ProcessGroup, options: CallOptions, spec: str, even: bool) -> list[Tensor]:
        me, codec, t = group.rank(), parse(spec), meter(group)
        whole = torch.empty(WORLD * 300)
        all_gather(gaussian(me, 300), list(whole.split(300)), codec, t, options)
        sizes = [[60 if even else (s * 7 + d * 13) % 4 * 37 for d in range(WORLD)] for s in range(WORLD)]
        outs = [torch.full((sizes[source][me],), torch.nan) for source in range(WORLD)]
        ins = [gaussian(10 * me + d, sizes[me][d]) for d in range(WORLD)]
        all_to_all(ins, outs, codec, t, options, even=even)
        x = gaussian(me, WORLD * 96)
        part = reduce_scatter(x, codec, t, Chunks(WORLD * 96, WORLD, 96), options)
        return [whole, torch.cat(outs), part]

    flat = (
        run_threads(run, WORLD, CallOptions(), "none", True),
        run_threads(run, WORLD, CallOptions(), "none", False),
    )
    for hosts in HOSTS[:4]:
        for spec in ("none", "exponent"):
            for even, padded in ((True, False), (False, False), (True, True), (False, True)):
                options = options_of(hosts, padded=padded, levels=(("intra", parse("mpc:dim=1")),))
                for ours, theirs in zip(
                    run_threads(run, WORLD, options, spec, even), flat[not even], strict=True
                ):
                    assert same(ours[0], theirs[0]), f"all_gather {hosts} {spec} {options}"
                    assert same(ours[1], theirs[1]), f"all_to_all {hosts} {spec} {even} {options}"
                    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-6, atol=1e-6)


def test_levels_have_codecs_of_their_own() -> None:
    """All-to-all tells them apart: exact to the own host, int8 to the rack, int4 beyond. All-reduce in three levels."""
    places = (("r1", "a"), ("r1", "a"), ("r1", "b"), ("r2", "c"), ("r2", "c"))
    topology = Topology(places, ("inter", "rack", "intra"))
    options = CallOptions(
        algorithm="hierarchical", topology=topology, seed=1, levels=(("rack", parse("int8:block=32")),)
    )

    def run(group: dist.ProcessGroup) -> tuple[list[Tensor], Tensor]:
        me, codec = group.rank(), parse("int4:block=32")
        outs = [torch.empty(500) for _ in range(WORLD)]
        all_to_all(
            [gaussian(10 * me + d, 500) for d in range(WORLD)], outs, codec, meter(group), options, even=True
        )
        x = gaussian(me, 3000)
        all_reduce(x, parse("none"), meter(group), replace(options, levels=()))
        return outs, x

    results = run_threads(run, WORLD)
    for me, (outs, total) in enumerate(results):
        for source, out in enumerate(outs):
            sent = gaussian(10 * source + me, 500)
            level = topology.level_between(source, me)
            spec = {"intra": "none", "rack": "int8:block=32", "inter": "int4:block=32"}[level]
            expected = sent if source == me else decoded(parse(spec), sent, derive_seed(1, source, me, 0))
            assert same(out, expected), (source, me)
        assert same(total, results[0][1])
        torch.testing.assert_close(total, sum(gaussian(r, 3000) for r in range(WORLD)), rtol=1e-6, atol=2e-6)


def test_bytes_between_hosts_are_those_of_one_rank_each() -> None:
    """Four ranks on two hosts: what a rank sends beyond its host is a quarter of the message each way."""
    numel = 1 << 16

    def run(group: dist.ProcessGroup, options: CallOptions) -> int:
        counted = _ByPeer(TorchTransport(group))
        transport = Metered(counted, meter(group).tally)
        all_reduce(gaussian(group.rank(), numel), parse("int4:block=128"), transport, options)
        away = [n for peer, n in counted.sent.items() if peer // 2 != group.rank() // 2]
        assert sum(counted.sent.values()) == transport.tally.wire_bytes
        # A chunk of each host's for the mate, in fp32.
        assert transport.tally.memory_bytes == 2 * numel // 4 * 4
        return sum(away)

    encoded = numel * 4.25 / 8
    for sent in run_threads(run, 4, options_of("aabb", segment_numel=1 << 20)):
        assert 0.5 * encoded <= sent <= 0.5 * encoded + 100


class _ByPeer(TorchTransport):
    def __init__(self, group_transport: TorchTransport) -> None:
        super().__init__(group_transport._group)
        self.sent: dict[int, int] = {}

    def send(self, buffer: Tensor, dst: int, tag: int = 0):  # type: ignore[no-untyped-def]
        self.sent[dst] = self.sent.get(dst, 0) + buffer.numel()
        return super().send(buffer, dst, tag)


@pytest.mark.parametrize("intra", ["none", "int8:block=32"])
def test_feedback_gives_back_what_every_level_lost(intra: str) -> None:
    """The sum over steps of results and residuals is the sum of inputs; rounds of the same input converge on it."""
    numel, steps, hosts = 640, 24, "aabbb"
    options = options_of(hosts, levels=(("intra", parse(intra)),), mean=True)
    codec = parse("int4:block=32")
    chunks = Chunks.of(numel, WORLD, codec.granule)

    def run(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        start, stop = chunks.bounds(group.rank())
        residuals = Residuals(torch.zeros(numel), torch.zeros(stop - start))
        total = torch.zeros(numel)
        for step in range(steps):
            x = gaussian(group.rank(), numel)
            all_reduce(x, codec, meter(group), replace(options, seed=step), residuals=residuals)
            total += x
        return total, residuals.sender, residuals.owner

    results = run_threads(run, WORLD)
    expected = steps * exact(inputs(WORLD, numel), mean=True)
    left = sum(sender.double() for _, sender, _ in results) / WORLD
    left += torch.cat([owner.double() for _, _, owner in results])
    for rank, (total, sender, _) in enumerate(results):
        assert same(total, results[0][0])
        # Nobody on the host of two is in rank 4's place on the host of three: it encodes nothing but inside.
        assert bool(sender.any()) == (intra != "none" or rank != 4), rank
    # Nothing is lost but by fp32's own rounding, of sums of a few units over the steps.
    torch.testing.assert_close(results[0][0].double() + left, expected, rtol=0, atol=steps * 4e-6)


def test_error_does_not_grow_with_ranks() -> None:
    """Relative errors of the ranks' encodings are independent: in levels those of hosts and of the owner."""

    def run(group: dist.ProcessGroup, algorithm: Algorithm, hosts: str) -> Tensor:
        x = gaussian(group.rank(), 4096)
        all_reduce(x, parse("int8:block=128"), meter(group), options_of(hosts, algorithm=algorithm))
        return x

    x = gaussian(0, 4096)
    once = float((decoded(parse("int8:block=128"), x, 0) - x).norm() / x.norm())
    for algorithm, encodings in (("hierarchical", 2), ("recursive_doubling", 1)):
        for world in (4, 16):
            result = run_threads(run, world, algorithm, "".join("abcdefgh"[r // 2] for r in range(world)))[0]
            true = exact(inputs(world, 4096), mean=False)
            error = float((result.double() - true).norm() / true.norm())
            assert error < 1.05 * encodings**0.5 * once, (algorithm, world, error, once)


def test_recursive_doubling_is_the_rank_order_sum_for_any_number_of_ranks() -> None:
    def run(group: dist.ProcessGroup, spec: str, mean: bool) -> Tensor:
        x = gaussian(group.rank(), 777)
        options = CallOptions(algorithm="recursive_doubling", mean=mean, seed=2)
        all_reduce(x, parse(spec), meter(group), options)
        return x

    for world in (1, 2, 3, 5, 6):
        for spec in ("none", "int4:block=32", "exponent"):
            sent = gathered(inputs(world, 777), parse(spec), CallOptions(seed=2))
            total = sent[0].clone()
            for x in sent[1:]:
                total += x
            for result in run_threads(run, world, spec, False):
                assert same(result, total), (world, spec)


def test_stateful_codecs_keep_their_streams_apart() -> None:
    """Codebooks of later calls: ends stay equal on every level, and the bits are those of the sum."""

    def run(group: dist.ProcessGroup) -> list[Tensor]:
        end = Endpoint(TorchTransport(group))
        results = []
        for step in range(3):
            x = gaussian(10 * step + group.rank(), 30000)
            message = Message("dp", "all_reduce", "gradient", "exponent", "float32", 120000)
            options = options_of("aabbb", levels=(("intra", parse("exponent")),), segment_numel=40000)
            end.run(message, 1.0, lambda t, x=x, o=options: all_reduce(x, parse("exponent"), t, o))
            results.append(x)
        assert end.streams.dump(), "it has states"
        return results

    results = run_threads(run, WORLD)
    for step in range(3):
        xs = [gaussian(10 * step + rank, 30000) for rank in range(WORLD)]
        expected = ((xs[0] + xs[1]) + ((xs[2] + xs[3]) + xs[4])).float()
        for rank in range(WORLD):
            torch.testing.assert_close(results[rank][step], expected, rtol=0, atol=0)


def test_it_says_what_it_needs() -> None:
    def run(group: dist.ProcessGroup) -> None:
        for topology, text in (
            (None, "needs to know which ranks share a host"),
            (Topology.of_hosts("ab"), "of 2 ranks"),
        ):
            options = CallOptions(algorithm="hierarchical", topology=topology)
            with pytest.raises(UnsupportedError, match=text):
                all_reduce(torch.ones(10), parse("none"), meter(group), options)

    run_threads(run, 3)

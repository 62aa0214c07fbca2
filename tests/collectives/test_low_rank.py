"""The low-rank all-reduce on real gloo groups: the paper's algorithm, its bits, its bytes, and what it stands."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.oracle import UNIT
from support import gaussian, meter, run_threads, same
from thinwire import CallOptions, parse
from thinwire.codecs import LowRank
from thinwire.collectives import Matrix, all_reduce, low_rank_all_reduce

pytestmark = pytest.mark.usefixtures("kernels")
MEAN = CallOptions(mean=True, segment_numel=512)
SHAPES = ((40, 70), (96, 33))
PLACES = (5, 5 + 40 * 70 + 3)
"""Where the matrices begin in the flat message; between them and around them are values that travel exactly."""
NUMEL = PLACES[1] + 96 * 33 + 11


def matrices(rank: int, seed: int = 0) -> list[Matrix]:
    places = zip(PLACES, SHAPES, strict=True)
    return [Matrix(begin, *shape, LowRank(rank).first_q(shape[1], seed + begin)) for begin, shape in places]


def exact_places() -> Tensor:
    mask = torch.ones(NUMEL, dtype=torch.bool)
    for m in matrices(1):
        mask[m.begin : m.end] = False
    return mask


@dataclass
class Paper:
    """Algorithms 1 and 2 of arXiv 1905.13727 for one matrix, in fp64, all workers in one place."""

    q: Tensor  # columns x rank
    errors: list[Tensor] = field(default_factory=list)
    condition: float = 1.0
    """Largest amplification so far of an error in P by making its columns orthonormal."""

    def step(self, gradients: list[Tensor]) -> Tensor:
        errors = self.errors or [torch.zeros_like(g) for g in gradients]
        deltas = [g + e for g, e in zip(gradients, errors, strict=True)]
        p = torch.stack([delta @ self.q for delta in deltas]).mean(0)
        singular = torch.linalg.svdvals(p / p.norm(dim=0))
        self.condition = max(self.condition, float(singular[0] / singular[-1]))
        basis = torch.linalg.qr(p).Q
        own = [delta.T @ basis for delta in deltas]
        self.q = torch.stack(own).mean(0)
        self.errors = [delta - basis @ q.T for delta, q in zip(deltas, own, strict=True)]
        return basis @ self.q.T


def gradients(world: int, step: int) -> list[Tensor]:
    """Every rank's message: a few directions that stay, and noise of each rank and step."""
    base = 3 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    for i, m in enumerate(matrices(1)):
        factors = (
            gaussian(50 + i, m.rows * 3).view(m.rows, 3),
            gaussian(60 + i, m.columns * 3).view(3, m.columns),
        )
        base[m.begin : m.end] = (factors[0] @ factors[1]).reshape(-1)
    return [base + gaussian(1000 * step + rank, NUMEL) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_is_the_papers_algorithm(world: int) -> None:
    steps, rank = 6, 4

    def run(group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        held, residual, results = matrices(rank), torch.zeros(NUMEL), []
        for step in range(steps):
            flat = gradients(world, step)[group.rank()]
            low_rank_all_reduce(flat, held, meter(group), MEAN, residual=residual)
            results.append((flat, residual.clone()))
        return results

    results = run_threads(run, world)
    papers = [Paper(m.q.T.double()) for m in matrices(rank)]
    for step in range(steps):
        outs = [results[r][step][0] for r in range(world)]
        assert all(same(outs[0], out) for out in outs[1:])
        given = gradients(world, step)
        mean = torch.stack(given).double().mean(0)
        exact = exact_places()
        # The mean of exact values: a sum of `world` and a division.
        bound = (world + 1) * UNIT * torch.stack(given).abs().sum(0)[exact]
        assert ((outs[0][exact] - mean[exact]).abs() <= bound).all()
        for m, paper in zip(matrices(rank), papers, strict=True):
            expected = paper.step([m.view(g).double() for g in given])
            # Sums of up to 96 products in fp32, and of `world`, each step on top of the ones before; the basis, and with it
            # the projection, differs by the error of P times the condition of P, on both sides.
            size = max(float((m.view(g) + e).norm()) for g, e in zip(given, paper.errors, strict=True))
            limit = (step + 1) * (96 + world) * UNIT * 2 * paper.condition * size
            assert (m.view(outs[0]) - expected).norm() <= limit, f"step {step}"
            for r in range(world):
                assert (m.view(results[r][step][1]) - paper.errors[r]).norm() <= limit, (
                    f"step {step} rank {r}"
                )
                assert not results[r][step][1][exact].any()


def test_everything_is_in_the_result_or_in_a_residual() -> None:
    world = 3

    def run(group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        held, residual, results = matrices(3), torch.zeros(NUMEL), []
        for step in range(4):
            flat = gradients(world, step)[group.rank()]
            low_rank_all_reduce(flat, held, meter(group), CallOptions(), residual=residual)
            results.append((flat, residual.clone()))
        return results

    results = run_threads(run, world)
    before = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(4):
        given = before + torch.stack(gradients(world, step)).double().sum(0)
        before = torch.stack([results[r][step][1] for r in range(world)]).double().sum(0)
        out = results[0][step][0].double()
        # Per value and rank: gradient + residual, three subtractions of products; the sum of Q and of three products.
        magnitude = 3 * (out.abs().max() + given.abs().max() + before.abs().max())
        assert (given - before - out).abs().max() <= (world * 8 + 8) * UNIT * 3 * magnitude


def test_sum_and_mean() -> None:
    """The sum of four is four times the mean, bit for bit: no rounding depends on a power of two."""

    def run(group: dist.ProcessGroup, options: CallOptions) -> Tensor:
        flat = gradients(4, 0)[group.rank()]
        low_rank_all_reduce(flat, matrices(4), meter(group), options)
        return flat

    assert same(run_threads(run, 4, CallOptions())[0], 4 * run_threads(run, 4, MEAN)[2])


def test_the_error_does_not_depend_on_the_number_of_ranks() -> None:
    """Ranks with the same gradient end with what one rank alone gets, bit for bit where the sums are exact."""

    def run(group: dist.ProcessGroup) -> list[Tensor]:
        held, residual, results = matrices(4), torch.zeros(NUMEL), []
        for step in range(3):
            flat = gradients(1, step)[0]
            low_rank_all_reduce(flat, held, meter(group), MEAN, residual=residual)
            results += [flat, residual.clone()]
        return results

    alone = run_threads(run, 1)[0]
    for world in (2, 4):
        assert all(map(same, alone, run_threads(run, world)[world - 1]))


@pytest.mark.parametrize("exponent", [-90, 90])
def test_the_magnitude_changes_no_bit(exponent: int) -> None:
    def run(group: dist.ProcessGroup, factor: float) -> list[Tensor]:
        held, residual, results = matrices(4), torch.zeros(NUMEL), []
        for step in range(3):
            flat = gradients(2, step)[group.rank()] * factor
            low_rank_all_reduce(flat, held, meter(group), MEAN, residual=residual)
            results += [flat / factor, residual / factor, *(m.q.clone() for m in held)]
        return results

    factor = 2.0**exponent
    for plain, scaled in zip(run_threads(run, 2, 1.0)[0], run_threads(run, 2, factor)[0], strict=True):
        assert same(plain, scaled)


@pytest.mark.parametrize("world", [1, 3])
def test_a_gradient_of_that_rank_comes_back(world: int) -> None:
    """Every rank's matrix has another row space, all have one column space of 4 dimensions: so has the mean."""

    def low(m: Matrix, rank: int) -> Tensor:
        left = gaussian(m.begin, m.rows * 4).view(m.rows, 4)
        return left @ gaussian(90 + rank, 4 * m.columns).view(4, m.columns)

    def run(group: dist.ProcessGroup) -> Tensor:
        held, residual = matrices(4), torch.zeros(NUMEL)
        for _ in range(2):  # the second step finds the residual of the first in its gradient
            flat = torch.zeros(NUMEL)
            for m in held:
                m.view(flat).copy_(low(m, group.rank()))
            low_rank_all_reduce(flat, held, meter(group), MEAN, residual=residual)
        return flat

    out = run_threads(run, world)[0]
    for m in matrices(4):
        owns = [low(m, rank).double() for rank in range(world)]
        mean = torch.stack(owns).mean(0)
        # M = P X with |X| <= |M| / s, s the smallest singular value of P: what P is off by, times X, is what its projection
        # loses of M. In the first step Q is m.q, with columns of length 1; a value of P is off by its 98 roundings.
        smallest = float(torch.linalg.svdvals(mean @ m.q.T.double())[-1])
        size = sum(float(own.norm()) for own in owns) / world
        off = (98 + world) * UNIT * size * math.sqrt(4)
        limit = off * float(mean.norm()) / smallest + (98 + world) * UNIT * size
        assert (m.view(out) - mean).norm() <= 2 * limit


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_by_all_and_stays_out_of_the_start(value: float) -> None:
    def run(group: dist.ProcessGroup) -> tuple[Tensor, list[Matrix], Tensor]:
        held, residual = matrices(4), torch.zeros(NUMEL)
        flat = gradients(3, 0)[group.rank()]
        if group.rank() == 1:
            held[0].view(flat)[20, 30] = value
            flat[2] = value
        low_rank_all_reduce(flat, held, meter(group), MEAN, residual=residual)
        again = gradients(3, 1)[group.rank()]
        low_rank_all_reduce(again, held, meter(group), MEAN)
        return flat, held, again

    for flat, held, again in run_threads(run, 3):
        assert held[0].view(flat).isnan().all()
        assert not flat[2].isfinite()
        flat[2] = 0
        flat[held[0].begin : held[0].end] = 0
        assert flat.isfinite().all()
        assert again.isfinite().all()
        assert all(m.q.isfinite().all() for m in held)


def test_zeros_give_zeros_and_leave_the_start() -> None:
    def run(group: dist.ProcessGroup) -> None:
        held, residual, flat = matrices(4), torch.zeros(NUMEL), torch.zeros(NUMEL)
        low_rank_all_reduce(flat, held, meter(group), MEAN, residual=residual)
        assert not flat.any()
        assert not residual.any()
        for m, first in zip(held, matrices(4), strict=True):
            assert same(m.q, first.q)

    run_threads(run, 2)


def test_directions_that_were_not_needed_are_there_later() -> None:
    """Steps of rank 1 first; then one of rank 4 needs as much as if it had come first."""

    def run(group: dist.ProcessGroup) -> None:
        held = matrices(4)
        for _ in range(3):
            flat = torch.zeros(NUMEL)
            for m in held:
                m.view(flat).copy_(torch.outer(gaussian(1, m.rows), gaussian(2, m.columns)))
            low_rank_all_reduce(flat, held, meter(group), MEAN)
        flat = torch.zeros(NUMEL)
        for m in held:
            m.view(flat).copy_(
                gaussian(3, m.rows * 4).view(m.rows, 4) @ gaussian(4, 4 * m.columns).view(4, m.columns)
            )
        expected = flat.clone()
        low_rank_all_reduce(flat, held, meter(group), MEAN)
        assert (flat - expected).norm() <= 1e-4 * expected.norm()

    run_threads(run, 1)


def test_parts_of_the_result_are_those_of_the_whole() -> None:
    bounds = [0, 3, 100, 104, PLACES[1] - 2, PLACES[1] + 500, NUMEL - 4, NUMEL]

    def run(group: dist.ProcessGroup) -> list[Tensor]:
        results = []
        for start, stop in [(0, NUMEL), *itertools.pairwise(bounds), (9, 9)]:
            flat, out = gradients(2, 0)[group.rank()], torch.full((stop - start,), torch.nan)
            residual = torch.zeros(NUMEL)
            low_rank_all_reduce(
                flat, matrices(4), meter(group), MEAN, residual=residual, out=out, begin=start
            )
            assert same(flat, gradients(2, 0)[group.rank()]), "the input is not changed"
            results.append(out)
        return results

    for whole, *parts, nothing in run_threads(run, 2):
        assert same(whole, torch.cat(parts))
        assert nothing.numel() == 0


def test_no_values_and_no_matrices() -> None:
    def run(group: dist.ProcessGroup) -> Tensor:
        low_rank_all_reduce(torch.empty(0), [], meter(group), MEAN)
        flat, plain = (gradients(3, 0)[group.rank()] for _ in range(2))
        low_rank_all_reduce(flat, [], meter(group), MEAN)
        all_reduce(plain, parse("none"), meter(group), MEAN)
        assert same(flat, plain)
        return flat

    run_threads(run, 3)


@pytest.mark.parametrize("world", [2, 3])
def test_the_bytes_are_those_of_two_exact_all_reduces(world: int) -> None:
    options = replace(MEAN, segment_numel=1 << 20)
    rounds = (
        4 * sum(rows for rows, _ in SHAPES) + int(exact_places().sum()),
        4 * sum(columns for _, columns in SHAPES),
    )

    def run(group: dist.ProcessGroup) -> tuple[int, int]:
        low, plain = meter(group), meter(group)
        low_rank_all_reduce(gradients(world, 0)[group.rank()], matrices(4), low, options)
        for numel in rounds:
            all_reduce(torch.zeros(numel), parse("none"), plain, options)
        return low.tally.wire_bytes, plain.tally.wire_bytes

    for low, plain in run_threads(run, world):
        assert low == plain
        headers = 4 * (world - 1) * 32  # at most: two rounds of two frames to each peer
        assert 0 <= low - 2 * (world - 1) / world * 4 * sum(rounds) <= headers + 2 * 4 * world * world

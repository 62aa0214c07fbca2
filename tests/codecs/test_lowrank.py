"""``lowrank``: its spec, and its arithmetic bit for bit against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from support import gaussian, same
from thinwire.codecs import LowRank, parse, parse_compressor, reference_lowrank
from thinwire.codecs.lowrank import expand, orthonormalize, project, project_back, renew, subtract
from thinwire.errors import SpecError, UnsupportedError

pytestmark = pytest.mark.usefixtures("kernels")
SHAPES = [(1, 1, 1), (1, 500, 1), (5, 63, 2), (7, 64, 3), (130, 65, 4), (66, 257, 7), (9, 40, 12)]


def test_specs_round_trip() -> None:
    assert parse_compressor("lowrank") == LowRank(4)
    for rank in (1, 4, 300):
        assert parse_compressor(str(LowRank(rank))) == LowRank(rank)
        assert parse_compressor(f"lowrank:{rank}") == LowRank(rank)
    assert parse_compressor("int8") == parse("int8")
    assert parse_compressor(LowRank(2)) == LowRank(2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lowrank:rank=0", r"'lowrank:rank=0': lowrank: rank is .* at least 1, found 0"),
        ("lowrank:rank=-3", r"found -3"),
        ("lowrank:rank=two", r"rank needs int, found 'two'"),
        ("lowrank:rnk=2", r"no parameter 'rnk'; did you mean 'rank'"),
        ("hadamard|lowrank", r"unknown codec 'lowrank'"),
    ],
)
def test_wrong_specs(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_compressor(spec)


@pytest.mark.parametrize("given", ["lowrank:rank=2", LowRank(2)])
def test_it_is_no_codec(given: str | LowRank) -> None:
    with pytest.raises(
        SpecError, match=r"lowrank:rank=2 is no codec.*GradientSync or thinwire\.compress_ddp"
    ):
        parse(given)


def test_what_is_a_matrix() -> None:
    four = LowRank(4)
    assert four.matrix((512, 512)) == (512, 512)
    assert four.matrix((8, 3, 5, 2)) == (8, 30)
    assert four.matrix((512,)) is None
    assert four.matrix(()) is None
    assert four.matrix((0, 9)) is None
    assert four.matrix((8, 8)) is None, "4 * 16 values are not fewer than 64"
    assert four.matrix((8, 9)) == (8, 9)
    assert LowRank(1).matrix((1, 500)) is None


def test_where_there_is_no_kernel() -> None:
    LowRank().check_device(torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="lowrank:rank=4 has no cuda kernel yet"):
        LowRank().check_device(torch.device("cuda"))


@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_the_kernels_give_the_bits_of_the_reference(rows: int, columns: int, rank: int) -> None:
    m = gaussian(1, rows * columns).view(rows, columns)
    start = LowRank(rank).first_q(columns, 7)
    p, q = torch.empty(rows, rank), torch.empty(rank, columns)
    project(m, start, p)
    assert same(p, torch.from_numpy(reference_lowrank.times_q(m.numpy(), start.numpy())))
    expected = reference_lowrank.orthonormalize(p.numpy())
    orthonormalize(p)
    assert same(p, torch.from_numpy(expected))
    project_back(m, p, q)
    assert same(q, torch.from_numpy(reference_lowrank.times_p(m.numpy(), p.numpy())))
    expected = torch.from_numpy(reference_lowrank.product(p.numpy(), q.numpy())).reshape(-1)
    for first, stop in ((0, m.numel()), (m.numel() // 3, m.numel() - 1), (m.numel(), m.numel())):
        out = torch.empty(max(stop - first, 0))
        expand(p, q, first, out)
        assert same(out, expected[first : first + out.numel()])
    left = m.clone()
    subtract(left, p, q)
    assert same(left, torch.from_numpy(reference_lowrank.subtract(m.numpy(), p.numpy(), q.numpy())))
    expected = torch.from_numpy(reference_lowrank.renew(q.numpy(), start.numpy()))
    assert same(renew(q, start.clone()), expected)


def orthonormal_columns(p: Tensor) -> int:
    """How many columns are not 0; those are orthonormal, up to the rounding of each value to fp32."""
    kept = p[:, p.any(0)].double()
    error = kept.T @ kept - torch.eye(kept.shape[1], dtype=torch.float64)
    # |a + da||b + db| with |da| <= 2^-24 |a|, and the products of the roundings.
    assert error.abs().max() <= 2.001 * 2.0**-24
    return kept.shape[1]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_columns_become_orthonormal(scale: float) -> None:
    p = gaussian(2, 200 * 6).view(200, 6) * scale
    basis = p.double() / scale
    orthonormalize(p)
    assert orthonormal_columns(p) == 6
    # The span is that of the columns given.
    back = p.double() @ (p.double().T @ basis)
    assert (back - basis).norm() <= 1e-6 * basis.norm()


def test_columns_that_are_nearly_parallel_stay_orthonormal() -> None:
    p = gaussian(3, 300).view(300, 1).repeat(1, 3) + 1e-4 * gaussian(4, 900).view(300, 3)
    orthonormalize(p)
    assert orthonormal_columns(p) == 3


def test_columns_without_anything_new_are_zero() -> None:
    a, b = gaussian(5, 100), gaussian(6, 100)
    p = torch.stack([a, 3 * a, torch.zeros(100), b, a - b], 1).contiguous()
    orthonormalize(p)
    assert p.any(0).tolist() == [True, False, False, True, False]
    assert orthonormal_columns(p) == 2
    nothing = torch.zeros(10, 3)
    orthonormalize(nothing)
    assert not nothing.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_not_finite_makes_all_nan(value: float) -> None:
    p = gaussian(7, 60).view(20, 3)
    p[13, 2] = value
    orthonormalize(p)
    assert p.isnan().all()
    assert np.isnan(reference_lowrank.orthonormalize(p.numpy())).all()


def test_a_start_that_cannot_be_renewed_stays() -> None:
    start = LowRank(4).first_q(50, 1)
    q = gaussian(8, 200).view(4, 50) * 1e-35
    q[1] = 0
    q[2, 7] = torch.nan
    q[3, 7] = torch.inf
    new = renew(q, start.clone())
    assert same(new[1:], start[1:])
    assert not same(new[0], start[0])
    assert float(new[0].double().norm()) == pytest.approx(1, abs=2.0**-24 * 2)


def test_the_first_q_depends_on_the_key_alone() -> None:
    q = LowRank(3).first_q(40, 12345)
    assert same(q, LowRank(3).first_q(40, 12345))
    assert not torch.equal(q, LowRank(3).first_q(40, 12346))
    mask, expected = (1 << 64) - 1, []
    for i in range(1, 3 * 40 + 1):
        z = 12345 + i * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        z ^= z >> 31
        expected.append(float((z >> 40 | 1) - 2**23))
    rows = torch.tensor(expected, dtype=torch.float64).view(3, 40)
    assert torch.allclose(q.double(), rows / rows.norm(dim=1, keepdim=True), rtol=2.0**-23, atol=0)

import math

import pytest
import report_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.lab.report import from_dict, paired_test, parity_of
from thinwire.lab.report.parity import paired_differences, t_cdf, t_quantile
from thinwire.lab.report.reader import ResultError
from thinwire.lab.report.schema import Parity

# Printed tables of Student's t, three decimals.
TABLE = [
    (0.95, 1, 6.314), (0.95, 2, 2.920), (0.95, 3, 2.353), (0.95, 4, 2.132), (0.95, 5, 2.015), (0.95, 9, 1.833),
    (0.95, 30, 1.697), (0.95, 120, 1.658), (0.975, 4, 2.776), (0.99, 10, 2.764), (0.995, 7, 3.499),
]  # fmt: skip


@pytest.mark.parametrize(("probability", "df", "t"), TABLE)
def test_quantile_is_the_tables(probability, df, t):
    assert t_quantile(probability, df) == pytest.approx(t, abs=5.1e-4)


def test_quantile_closed_forms():
    # One and two degrees of freedom have elementary quantiles.
    assert t_quantile(0.95, 1) == pytest.approx(math.tan(math.pi * 0.45), rel=1e-10)
    assert t_quantile(0.95, 2) == pytest.approx(0.9 * math.sqrt(2 / (1 - 0.81)), rel=1e-10)


@given(st.floats(0.5, 0.9999), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_quantile_inverts_the_distribution(probability, df):
    assert t_cdf(t_quantile(probability, df), df) == pytest.approx(probability, abs=1e-9)


def test_quantile_refuses_what_it_cannot_do():
    for probability, df in ((0.4, 3), (1.0, 3), (0.95, 0)):
        with pytest.raises(ValueError):
            t_quantile(probability, df)


def test_bound_by_hand():
    # mean 0.003, s = 0.001581139, bound = mean + 2.131847 * s / sqrt(5)
    test = paired_test("p", "none", [0.001, 0.002, 0.003, 0.004, 0.005])
    assert test.mean_difference == pytest.approx(0.003)
    assert test.upper_95 == pytest.approx(0.0045074, abs=1e-7)
    assert test.verdict == "passes"


def test_spread_can_fail_a_small_mean():
    test = paired_test("p", "none", [-0.02, 0.02, -0.02, 0.02, 0.002])
    assert test.mean_difference < 0.001
    assert test.verdict == "fails"


def test_equal_losses_pass_and_the_limit_itself_passes():
    assert paired_test("p", "none", [0.0] * 5).upper_95 == 0.0
    assert paired_test("p", "none", [0.25] * 5, limit=0.25).verdict == "passes"
    assert paired_test("p", "none", [0.25] * 5, limit=0.2499).verdict == "fails"


@pytest.mark.parametrize("n", range(5))
def test_fewer_than_five_seeds_are_not_a_test(n):
    test = paired_test("p", "none", [-1.0] * n)
    assert test.seeds == n
    assert test.verdict == "not tested"
    assert not test.passes


def test_a_diverged_seed_fails():
    # DeepSpeed 4886
    test = paired_test("p", "none", [0.0, 0.0, 0.0, 0.0, math.nan])
    assert test.upper_95 == math.inf
    assert test.verdict == "fails"


def test_a_claim_that_the_numbers_deny_is_refused():
    with pytest.raises(ResultError, match="passes is True"):
        Parity("p", "none", 4, 0.0, 0.0, 0.005, True)


def test_pairs_are_by_seed_and_repeats_are_averaged():
    runs = [report_sample.make_run("none", s, 20) for s in (0, 1)]
    runs += [report_sample.make_run("balanced", s, 20) for s in (1, 1, 2)]
    for run, loss in zip(runs, (3.0, 4.0, 4.1, 4.3, 9.0), strict=True):
        run["val_loss"] = loss
    assert paired_differences(from_dict(report_sample.make_result(runs)), "balanced") == {
        1: pytest.approx(0.2)
    }


def test_the_larger_test_is_taken():
    result = report_sample.crowded()
    result["parity"] = [
        {
            "policy": p, "baseline": "none", "seeds": n, "mean_difference": 0.1, "upper_95": 0.2, "limit": 0.005,
            "passes": False,
        }
        for p, n in (("auto", 7), ("balanced", 5))
    ]  # fmt: skip
    tests = parity_of(from_dict(result))
    assert tests["auto"].seeds == 7
    assert tests["balanced"].upper_95 < 0.005  # the runs say so themselves, over as many seeds
    assert "none" not in tests

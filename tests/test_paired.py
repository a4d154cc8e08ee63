"""Paired intervals: Student's quantiles from printed tables, his own example, coverage by chance, and verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddplab.paired import paired, student_t

# Two-sided quantiles as they are printed in any table of Student's distribution.
TABLE = {
    (0.95, 1): 12.706,
    (0.95, 2): 4.303,
    (0.95, 3): 3.182,
    (0.95, 4): 2.776,
    (0.95, 5): 2.571,
    (0.95, 9): 2.262,
    (0.95, 10): 2.228,
    (0.95, 30): 2.042,
    (0.95, 120): 1.980,
    (0.90, 4): 2.132,
    (0.99, 4): 4.604,
    (0.99, 9): 3.250,
}


@pytest.mark.parametrize(("confidence", "freedom"), TABLE)
def test_quantiles_are_those_of_printed_tables(confidence, freedom):
    assert round(student_t(confidence, freedom), 3) == TABLE[confidence, freedom]


@pytest.mark.parametrize("confidence", [0.01, 0.5, 0.95, 0.999999])
def test_quantiles_of_one_and_two_degrees_have_closed_forms(confidence):
    assert student_t(confidence, 1) == pytest.approx(math.tan(math.pi * confidence / 2), rel=1e-9)
    assert student_t(confidence, 2) == pytest.approx(confidence * math.sqrt(2 / (1 - confidence**2)), rel=1e-9)


# Student (1908) after Cushny and Peebles: additional hours of sleep from two drugs, ten patients.
ONE = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
TWO = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_students_own_example():
    """Known from every textbook: mean difference 1.58 hours, t = 4.0621, 95% interval 0.7001 to 2.4599."""
    found = paired(TWO, ONE, lower_is_better=False)
    assert (found.change, found.pairs) == (pytest.approx(1.58), 10)
    assert (found.low, found.high) == (pytest.approx(0.7001142, abs=1e-6), pytest.approx(2.4598858, abs=1e-6))
    assert found.verdict == "better by 0.7 to 2.5" and not found.no_difference


def test_sides_and_senses():
    assert paired(ONE, TWO, lower_is_better=False).verdict == "worse by 0.7 to 2.5"
    assert paired(ONE, TWO, lower_is_better=True).verdict == "better by 0.7 to 2.5"
    wide = paired(TWO, ONE, lower_is_better=False, confidence=0.999)
    assert wide.verdict == "no difference seen" and wide.no_difference and wide.low < 0 < wide.high


def test_a_ratio_is_a_difference_of_logarithms():
    """Multiplying both runs of a pair by the same number, as a harder seed would, changes nothing."""
    base = np.array([0.1, 0.2, 0.05, 1.0, 0.4])
    method = base * np.array([1.9, 2.1, 2.0, 1.8, 2.2])
    found = paired(method, base, lower_is_better=True, ratio=True)
    logs = np.log([1.9, 2.1, 2.0, 1.8, 2.2])
    half = 2.776445 * logs.std(ddof=1) / math.sqrt(5)
    assert found.change == pytest.approx(math.exp(logs.mean()))
    assert (found.low, found.high) == (
        pytest.approx(math.exp(logs.mean() - half), rel=1e-5),
        pytest.approx(math.exp(logs.mean() + half), rel=1e-5),
    )
    assert found.verdict == f"{found.low:.2f} to {found.high:.2f} times worse"
    scaled = paired(method * [1, 10, 100, 3, 7], base * [1, 10, 100, 3, 7], lower_is_better=True, ratio=True)
    assert scaled.low == pytest.approx(found.low) and scaled.high == pytest.approx(found.high)
    back = paired(base, method, lower_is_better=True, ratio=True)
    assert (back.low, back.high) == (pytest.approx(1 / found.high), pytest.approx(1 / found.low))
    assert back.verdict == found.verdict.replace("worse", "better")


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """3000 sets of 5 pairs with a common part 100 times as wide as the difference: 95%, within 4 standard errors."""
    draw = np.random.default_rng(1)
    common, noise = draw.normal(0, 100, (3000, 5)), draw.normal(0.3, 1, (3000, 5))
    found = [paired(c + d, c, lower_is_better=True) for c, d in zip(common, noise, strict=True)]
    covered = np.mean([f.low <= 0.3 <= f.high for f in found])
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 3000)


def test_equal_runs_and_constant_differences():
    same = paired([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], lower_is_better=True)
    assert (same.low, same.high, same.verdict) == (0.0, 0.0, "no difference seen")
    shifted = paired([1.1, 2.1, 3.1], [1.0, 2.0, 3.0], lower_is_better=True)
    assert shifted.verdict == "worse by 0.1 to 0.1" and shifted.low == pytest.approx(0.1)


def test_a_run_that_diverged_is_no_number():
    nan, inf = math.nan, math.inf
    found = paired([1.0, nan, inf], [1.0, 1.0, 1.0], lower_is_better=True)
    assert found.verdict == "diverged in 2 of 3" and math.isnan(found.low) and not found.no_difference
    assert paired([1.0, 1.0], [nan, 1.0], lower_is_better=True).verdict == "the baseline diverged in 1 of 2"
    both = paired([1.0, nan], [nan, 1.0], lower_is_better=True, ratio=True)
    assert both.verdict == "diverged in 1 of 2 and the baseline diverged in 1 of 2"


@pytest.mark.parametrize(
    ("method", "baseline", "options", "message"),
    [
        ([1, 2], [1], {}, "has 2, the baseline 1"),
        ([1], [1], {}, "no spread in 1"),
        ([], [], {}, "method is a list of numbers, one for each seed: there must be at least one"),
        ([1, 0], [1, 1], {"ratio": True}, "values above 0; the smallest is 0.0"),
        ([1, 2], [1, 1], {"confidence": 95}, "such as 0.95, not 95"),
        ([1, 2], [1, 1], {"confidence": 1.0}, "between 0 and 1"),
    ],
)
def test_what_makes_no_sense_is_refused(method, baseline, options, message):
    with pytest.raises(ValueError, match=message):
        paired(method, baseline, lower_is_better=True, **options)


def test_an_interval_that_no_float_holds_is_infinite():
    wide = paired([1, 10], [1, 1], lower_is_better=True, ratio=True, confidence=0.999)
    assert wide.low < 1e-300 and wide.high == math.inf and wide.verdict == "no difference seen"
    far = paired([1e-300, 1e-300], [1e300, 1e300], lower_is_better=True, ratio=True)
    assert far.verdict == "inf to inf times better"

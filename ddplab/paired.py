"""Did the method change anything? Paired runs over seeds, a confidence interval, and a verdict.

Two methods run from the same seeds: the same start, the same samples in the same order. What a lucky start gives, it
gives to both, and the difference within a pair is free of it. The interval is Student's, for few pairs and unknown
spread: mean +- t(n - 1) s / sqrt(n).

It says which differences agree with what was seen. An interval that contains "no difference" is no proof of equality:
its width says how large a difference could have been overlooked. And of twenty comparisons of equal methods one will,
on average, see a difference at 95%.

Source: Student, The probable error of a mean, Biometrika 6 (1908): its first illustration is this test on paired
differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from ddplab._arguments import flag, several, shown
from ddplab.transfers import count

LEAST_PAIRS = 2
_ROUNDING = 1e-12  # relative: a smaller spread is none


@dataclass(frozen=True)
class Paired:
    """What `paired` found.

    change, low, high: method minus baseline, or method over baseline if `ratio`, with its confidence interval; NaN
    where a run diverged.  pairs: how many.  verdict: "no difference seen", "better by a to b", "worse by a to b" (with
    `ratio`: "2 to 3 times better"), or which side "diverged in k of n".
    """

    change: float
    low: float
    high: float
    pairs: int
    ratio: bool
    verdict: str

    @property
    def no_difference(self) -> bool:
        """Does the interval contain "no difference", 0 or, for a ratio, 1? False where a run diverged."""
        return self.low <= float(self.ratio) <= self.high


def paired(
    method: Sequence[float],
    baseline: Sequence[float],
    *,
    lower_is_better: bool,
    ratio: bool = False,
    confidence: float = 0.95,
) -> Paired:
    """Compare two lists of final values, one for each seed and in the same order.

    ratio: compare the logarithms, for values above 0 whose spread grows with their size, such as a loss. The interval
    is then that of the quotient. A run that diverged (NaN or infinity) has no place on either scale: with one of them
    there is no interval, and the verdict says who diverged. Raises ValueError for lists of different lengths, fewer
    than 2 pairs, a ratio of values that are not above 0, or a confidence that is not between 0 and 1.
    """
    flag(lower_is_better, "lower_is_better"), flag(ratio, "ratio")
    ours, theirs = _values(method, "method"), _values(baseline, "baseline")
    n = len(ours)
    if n != len(theirs):
        raise ValueError(f"pairs need as many values of each: the method has {n}, the baseline {len(theirs)}")
    if n < LEAST_PAIRS:
        raise ValueError(f"an interval takes at least {LEAST_PAIRS} pairs; there is no spread in {n}")
    t = student_t(confidence, n - 1)
    lost = [sum(not math.isfinite(v) for v in side) for side in (ours, theirs)]
    if any(lost):
        names = ("diverged", "the baseline diverged")
        verdict = " and ".join(f"{name} in {k} of {n}" for name, k in zip(names, lost, strict=True) if k)
        return Paired(math.nan, math.nan, math.nan, n, ratio, verdict)
    if ratio:
        if min(*ours, *theirs) <= 0:
            raise ValueError(f"a ratio takes values above 0; the smallest is {min(*ours, *theirs)!r}")
        ours, theirs = [math.log(v) for v in ours], [math.log(v) for v in theirs]
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = math.fsum(differences) / n
    spread = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
    if spread <= _ROUNDING * max(map(abs, differences)):
        spread = 0.0
    half = t * spread / math.sqrt(n)
    low, high = mean - half, mean + half
    verdict = _verdict(low, high, lower_is_better, ratio)
    if ratio:
        mean, low, high = _exp(mean), _exp(low), _exp(high)
    return Paired(mean, low, high, n, ratio, verdict)


def _values(values: Sequence[float], what: str) -> list[float]:
    given = several(values, f"{what} is a list of numbers, one for each seed")
    for v in given:
        if not isinstance(v, Real) or isinstance(v, bool):
            raise TypeError(f"{what} is a list of numbers, one for each seed: {shown(v)} is none")
    return [float(v) for v in given]


def _verdict(low: float, high: float, lower_is_better: bool, ratio: bool) -> str:
    if low <= 0 <= high:
        return "no difference seen"
    word = "better" if (high < 0) == lower_is_better else "worse"
    near, far = sorted((abs(low), abs(high)))
    if ratio:
        return f"{_exp(near):.2f} to {_exp(far):.2f} times {word}"
    return f"{word} by {near:.2g} to {far:.2g}"


def _exp(value: float) -> float:
    """e to this power; infinity where no float holds it: an interval may be that wide."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def student_t(confidence: float, freedom: int) -> float:
    """The t such that |T| < t with probability `confidence`, for Student's T with `freedom` degrees of freedom.

    The probability has a closed form for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4); t is
    found by bisection. t(0.95, 4) = 2.776, where a normal distribution has 1.960: five seeds are few.
    """
    if not isinstance(confidence, Real) or isinstance(confidence, bool) or not 0 < confidence < 1:
        raise ValueError(f"confidence is between 0 and 1, such as 0.95, not {shown(confidence)}")
    freedom = count(freedom, "degrees of freedom", error=ValueError)
    low, high = 0.0, math.pi / 2  # of the angle atan(t / sqrt(freedom))
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _inside(angle: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine if freedom % 2 else 1.0), 0.0
    for k in range(freedom % 2, freedom - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total

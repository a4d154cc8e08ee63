"""Does a setting change a time? A verdict from repeated, interleaved measurements, without trust in the normal curve.

Times of a shared machine drift and have heavy tails: a mean and a standard deviation mislead. So each round measures
every setting once, in random order, and a setting is compared with the baseline of its own round, which shares its
weather. What is judged are the logarithms of these ratios, by Wilcoxon's signed-rank statistic: where a setting does
nothing, chance (the random order) makes each ratio as likely above 1 as below, whatever the noise looks like, and the
interval is exact. The estimate is the Hodges-Lehmann one, the median of all pairwise means, which outliers hardly move.
(Hodges and Lehmann: Estimates of location based on rank tests, 1963, doi:10.1214/aoms/1177704172.)
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

NO_EFFECT, HELPS, HURTS = "no effect", "helps", "hurts"


class Interval(NamedTuple):
    """A ratio of times: the estimate and the limits between which it lies with the confidence asked for."""

    ratio: float
    low: float
    high: float


def least_rounds(confidence: float, compared: int = 1) -> int:
    """Rounds below which no verdict other than "no effect" is possible, when `compared` settings are judged at once."""
    return math.ceil(math.log2(2 * compared / (1 - confidence)) - 1e-9)


def ratio_interval(baseline: Iterable[float], other: Iterable[float], confidence: float = 0.99) -> Interval:
    """How many times as long as `baseline` does `other` take? The i-th of both must come from the same round.

    Exact under the assumption that a ratio's logarithm is symmetric about its median; with too few rounds the limits
    are 0 and infinity. Raises ValueError for lists of different length, times that are not positive, a confidence
    outside (0, 1).
    """
    import numpy as np

    base, new = (np.asarray(list(times), float) for times in (baseline, other))
    if base.shape != new.shape or base.size == 0:
        raise ValueError(f"each round needs one time of both: there are {base.size} and {new.size}")
    if not (np.isfinite(base).all() and np.isfinite(new).all() and (base > 0).all() and (new > 0).all()):
        raise ValueError("times are positive numbers of seconds")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence lies between 0 and 1, not {confidence!r}")
    d = np.log(new / base)
    first, second = np.triu_indices(len(d))
    means = np.sort((d[first] + d[second]) / 2)
    dropped = _rank_limit(len(d), 1 - confidence)
    low, high = (means[dropped - 1], means[-dropped]) if dropped else (-math.inf, math.inf)
    return Interval(float(np.exp(np.median(means))), float(np.exp(low)), float(np.exp(high)))


def _rank_limit(n: int, alpha: float) -> int:
    """The k-th smallest and k-th largest pairwise mean are the limits; 0 where n is too small for any."""
    import numpy as np

    ways = np.zeros(n * (n + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, n + 1):  # each rank is in the sum or not, with equal chance
        ways[rank:] = ways[rank:] + ways[:-rank]
        ways /= 2
    return int(np.searchsorted(np.cumsum(ways), alpha / 2 * (1 + 1e-9), side="right"))


def judge(
    observations: pd.DataFrame, baseline: Hashable, confidence: float = 0.99, least_effect: float = 0.01
) -> pd.DataFrame:
    """A verdict on every setting against the baseline.

    observations: columns round, value, seconds; each round has each value once.
    baseline: the value that the others are compared with.
    confidence: that no verdict of the whole table is wrong; with several settings each gets its share (Bonferroni).
    least_effect: changes smaller than this part are "no effect" even when they are certain (0.01: 1%).

    Returns one row a value: value, time_ms (median), change_pct, low_pct, high_pct (limits of the change), verdict
    ("helps", "hurts", "no effect"; the baseline's own is "baseline"), rounds.
    Raises ValueError where the baseline or a measurement is missing.
    """
    import numpy as np
    import pandas as pd

    values = list(dict.fromkeys(observations["value"]))
    if baseline not in values:
        raise ValueError(f"the baseline {baseline!r} was not measured; measured were {values}")
    times = {value: _by_round(observations, value) for value in values}
    rounds = set(times[baseline])
    for value, seen in times.items():
        if set(seen) != rounds:
            raise ValueError(f"{value!r} was not measured in the same rounds as the baseline {baseline!r}")
    base = [times[baseline][r] for r in sorted(rounds)]
    share = 1 - (1 - confidence) / max(1, len(values) - 1)
    rows = []
    for value in values:
        own = [times[value][r] for r in sorted(rounds)]
        row = {"value": value, "time_ms": float(np.median(own)) * 1e3}
        if value == baseline:
            row |= {"change_pct": 0.0, "low_pct": 0.0, "high_pct": 0.0, "verdict": "baseline"}
        else:
            found = ratio_interval(base, own, share)
            row |= {f"{name}_pct": (x - 1) * 100 for name, x in zip(("change", "low", "high"), found, strict=True)}
            row["verdict"] = _verdict(found, least_effect)
        rows.append(row | {"rounds": len(rounds)})
    return pd.DataFrame(rows)


def _verdict(found: Interval, least_effect: float) -> str:
    if found.high < 1 and found.ratio <= 1 - least_effect:
        return HELPS
    if found.low > 1 and found.ratio >= 1 + least_effect:
        return HURTS
    return NO_EFFECT


def _by_round(observations: pd.DataFrame, value: Hashable) -> dict[int, float]:
    rows = observations[[v == value for v in observations["value"]]]
    seen = dict(zip(rows["round"], rows["seconds"], strict=True))
    if len(seen) != len(rows):
        raise ValueError(f"{value!r} was measured twice in one round")
    return seen

"""Who held up the others? From the times at which ranks entered the same collectives.

Clocks of different machines differ by a constant (and drift, which a flight recorder's few minutes do not show). So a
rank's offset is the median of its distance to the others, and only what goes beyond it counts: a rank that is late
now and then is found, one that is late everywhere by the same amount cannot be told from a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma, log
from statistics import median

from ddplab.remains.calls import Call, Group

LEAST_S = 0.05  # shorter waits are the scheduler's, not a fault
_SHARE = 0.2  # of the recorded time that the others must have lost
_OWN = 0.75  # of all waiting that must be this rank's
_CHANCE = 1e-3  # so seldom may it come last so often if all ranks were alike
_ONCE_S = 10.0  # a single wait of this length needs no second one


@dataclass(frozen=True)
class Late:
    """rank: who. times, seconds: how often the others waited for it, and how long in all. span_s: the time on record.

    call: the first late one of those, at the same place of the program, that cost most.
    """

    rank: int
    call: Call
    times: int
    seconds: float
    span_s: float


def latecomer(group: Group) -> Late | None:
    """The rank that held up the others for a good part of the time on record; None if none did, or nobody can tell."""
    rows = _common(group)
    if len(rows) < 4:
        return None
    offsets = _offsets(rows)
    waits: list[tuple[float, float, int, Call]] = []  # from, to, who came last, its call
    for row in rows[1:]:  # before the first, ranks start up
        arrived = sorted((call.created_ns - offsets[rank], rank) for rank, call in row.items())
        (since, _), (until, last) = arrived[-2:]
        if until - since >= LEAST_S * 1e9:
            waits.append((since, until, last, row[last]))
    merged = {rank: _merge([wait for wait in waits if wait[2] == rank]) for rank in rows[0]}
    sums = {rank: sum(until - since for since, until in spans) / 1e9 for rank, spans in merged.items()}
    rank = max(sums, key=lambda r: sums[r])
    span_s = (max(c.created_ns for c in rows[-1].values()) - min(c.created_ns for c in rows[0].values())) / 1e9
    if not sums[rank] or sums[rank] < _SHARE * span_s or sums[rank] < _OWN * sum(sums.values()):
        return None
    total, mine = sum(map(len, merged.values())), merged[rank]
    once = max(until - since for since, until in mine) >= _ONCE_S * 1e9
    if not once and _at_least(len(mine), total, 1 / len(merged)) > _CHANCE:
        return None
    by_kind: dict[tuple, list[tuple[float, Call]]] = {}  # where the program calls it, and with what
    for since, until, last, call in waits:
        if last == rank:
            by_kind.setdefault((call.signature, call.place), []).append((until - since, call))
    worst = max(by_kind.values(), key=lambda held: sum(wait for wait, _ in held))
    return Late(rank, worst[0][1], len(mine), sums[rank], span_s)


def _merge(waits: list[tuple[float, float, int, Call]]) -> list[tuple[float, float]]:
    """Waits as separate stretches of time: collectives that were under way together count once."""
    spans: list[tuple[float, float]] = []
    for since, until, *_ in sorted(waits, key=lambda wait: wait[:2]):
        if spans and since <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(until, spans[-1][1])
        else:
            spans.append((since, until))
    return spans


def _at_least(k: int, n: int, p: float) -> float:
    """The chance of k or more successes in n trials with probability p."""
    ways = (lgamma(n + 1) - lgamma(i + 1) - lgamma(n - i + 1) for i in range(k, n + 1))
    return sum(exp(way + i * log(p) + (n - i) * log(1 - p)) for i, way in enumerate(ways, k))


def _common(group: Group) -> list[dict[int, Call]]:
    """The calls that every member entered, with a time, in order."""
    everyone = set(group.ranks) | set(group.calls)
    numbers = sorted({seq for calls in group.calls.values() for seq in calls})
    rows = ({r: c for r, c in group.at(seq).items() if c.created_ns is not None} for seq in numbers)
    return [row for row in rows if set(row) == everyone and len(row) > 1]


def _offsets(rows: list[dict[int, Call]]) -> dict[int, float]:
    """Nanoseconds by which each rank's clock is ahead: the median of its distance to the row's median."""
    middles = [median(call.created_ns for call in row.values()) for row in rows]
    return {
        rank: median(row[rank].created_ns - middle for row, middle in zip(rows, middles, strict=True))
        for rank in rows[0]
    }

"""Who held up the others? From the times at which ranks entered the same collectives.

Clocks of different machines differ by a constant (and drift, which a flight recorder's few minutes do not show). So a
rank's offset is the median of its distance to the others, and only what goes beyond it counts: a rank that is late
now and then is found, one that is late everywhere by the same amount cannot be told from a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ddplab.remains.calls import Call, Group

LEAST_S = 0.05  # shorter waits are the scheduler's, not a fault
_SHARE = 0.2  # of the recorded time that the others must have lost
_OWN = 0.75  # of all waiting that must be this rank's
_TIMES = 3  # so often, or once for longer than _ONCE_S
_ONCE_S = 2.0


@dataclass(frozen=True)
class Late:
    """rank: who. call: the first of its calls that came late. times, seconds: how often, and how much in all."""

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
    waits: dict[int, list[tuple[float, float, Call]]] = {}  # by the rank that came last: from, to, its call
    for row in rows[1:]:  # before the first, ranks start up
        arrived = sorted((call.created_ns - offsets[rank], rank) for rank, call in row.items())
        (since, _), (until, last) = arrived[-2:]
        if until - since >= LEAST_S * 1e9:
            waits.setdefault(last, []).append((since, until, row[last]))
    if not waits:
        return None
    sums = {rank: _union_s(spans) for rank, spans in waits.items()}
    rank = max(sums, key=lambda r: sums[r])
    span_s = (max(c.created_ns for c in rows[-1].values()) - min(c.created_ns for c in rows[0].values())) / 1e9
    mine = waits[rank]
    often = len(mine) >= _TIMES or max(until - since for since, until, _ in mine) >= _ONCE_S * 1e9
    if not often or sums[rank] < _SHARE * span_s or sums[rank] < _OWN * sum(sums.values()):
        return None
    return Late(rank, mine[0][2], len(mine), sums[rank], span_s)


def _union_s(spans: list[tuple[float, float, Call]]) -> float:
    """Seconds in which somebody waited: collectives that are under way together count once."""
    total, reached = 0.0, float("-inf")
    for since, until, _ in sorted(spans, key=lambda span: span[:2]):
        total += max(0.0, until - max(since, reached))
        reached = max(reached, until)
    return total / 1e9


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

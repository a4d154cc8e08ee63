"""Sets of time as sorted, disjoint intervals: unions, so that nothing that runs at once is counted twice.

A set is a pair of int64 arrays (starts, ends), starts[i] < ends[i] < starts[i + 1]. All is integer nanoseconds: exact.
"""

from __future__ import annotations

import numpy as np

Intervals = tuple[np.ndarray, np.ndarray]
EMPTY: Intervals = (np.zeros(0, np.int64), np.zeros(0, np.int64))


def union(starts: np.ndarray, ends: np.ndarray) -> Intervals:
    """The time that any of the intervals covers; they may overlap, touch, stand in any order or be empty."""
    real = ends > starts
    if not real.all():
        starts, ends = starts[real], ends[real]
    if not len(starts):
        return EMPTY
    if (starts[1:] < starts[:-1]).any():
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    ends = np.maximum.accumulate(ends)
    apart = np.ones(len(starts) + 1, bool)  # from what comes before; masks take an eighth of the room of indices
    np.greater(starts[1:], ends[:-1], out=apart[1:-1])
    return starts[apart[:-1]], ends[apart[1:]]


def join(*sets: Intervals) -> Intervals:
    """The time that any of the sets covers."""
    return union(np.concatenate([s for s, _ in sets]), np.concatenate([e for _, e in sets]))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The time of `a` outside `b`."""
    if not len(a[0]) or not len(b[0]):
        return a
    low, high = min(a[0][0], b[0][0]), max(a[1][-1], b[1][-1])
    return intersect(a, (np.r_[low - 1, b[1]], np.r_[b[0], high + 1]))


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The time that both sets cover."""
    if not len(a[0]) or not len(b[0]):
        return EMPTY
    # Every interval of the intersection begins where one of either set begins, while the other set is inside one.
    starts = np.concatenate([_inside(a[0], b), _inside(b[0], a)])
    starts = np.unique(starts)
    ends = np.minimum(_end_after(starts, a), _end_after(starts, b))
    return starts, ends


def _inside(times: np.ndarray, of: Intervals) -> np.ndarray:
    """Those of the sorted times that the set covers: from a start on, until an end."""
    turns = np.zeros(len(times) + 1, np.int32)
    for at, by in ((of[0], 1), (of[1], -1)):
        np.add.at(turns, np.searchsorted(times, at), by)
    np.cumsum(turns, out=turns)
    return times[turns[:-1] > 0]


def _end_after(times: np.ndarray, of: Intervals) -> np.ndarray:
    return of[1][np.searchsorted(of[0], times, side="right") - 1]


def measure(a: Intervals) -> int:
    """Nanoseconds in the set."""
    return int((a[1] - a[0]).sum())


def within(a: Intervals, low: np.ndarray | int, high: np.ndarray | int) -> np.ndarray:
    """Nanoseconds of the set inside each window [low, high)."""
    starts, ends = a
    times = np.array([low, high], np.int64)
    if not len(starts):
        return times[0] * 0
    before = ends - starts
    np.cumsum(before, out=before)  # and each interval itself
    at = np.searchsorted(starts, times, side="right") - 1
    inside = np.maximum(at, 0)
    over = np.maximum(ends[inside] - times, 0)
    until_low, until_high = np.where(at >= 0, before[inside] - over, 0)
    return until_high - until_low

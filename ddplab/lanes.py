"""Two lanes side by side: backward hands buckets to communication while both go on. A fluid simulation.

Compute slows down while communication runs; transfers that run at once share the link. Between two events every speed
is constant, so the simulation jumps from event to event and is exact. `figures/overlap.js` holds the same in
JavaScript.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parcel:
    """A bucket on its way: gradients, bytes, and seconds of encoding, of transfer on an idle link, of decoding."""

    gradients: Sequence[Any]
    nbytes: int
    encode_s: float
    transfer_s: float
    decode_s: float


@dataclass
class Lanes:
    """When each bucket was ready, started and ended, and when backward's own work ended; seconds since it began."""

    ready: list[float]
    start: list[float]
    end: list[float]
    compute_end: float = 0.0


def run_lanes(
    gradients: Sequence[tuple[Any, float]],
    backward_s: float,
    parcels: Sequence[Parcel],
    copy_s_per_byte: float = 0.0,
    slowdown: float = 1.0,
    lanes: int = 1,
    contention: float = 1.0,
) -> Lanes:
    """Run one backward: (gradient, seconds since backward began) in the order of readiness; parcels in bucket order.

    Every gradient is copied into its bucket. A bucket that is complete leaves when all before it have left; encoding is
    work of the compute lane. At most `lanes` buckets are in transfer at once. While one bucket is encoded and another
    decoded, both go `contention` times slower: they want the same processors.
    """
    out = Lanes([0.0] * len(parcels), [0.0] * len(parcels), [0.0] * len(parcels))
    work = deque(_work(gradients, backward_s, parcels, copy_s_per_byte))
    waiting: deque[int] = deque()
    moving: list[list] = []  # [bucket, seconds of the idle link left, seconds of decoding left]
    now, left = 0.0, work[0][0]
    while work or waiting or moving:
        while waiting and len(moving) < lanes:
            b = waiting.popleft()
            out.start[b] = now
            moving.append([b, parcels[b].transfer_s, parcels[b].decode_s])
        sharing = sum(1 for m in moving if m[1] > 0)
        encoding = bool(work) and work[0][2] is not None
        pace = 1 / contention if encoding and sharing < len(moving) else 1.0
        speed = (1 / slowdown if moving else 1.0) * pace
        ends = [m[1] * sharing if m[1] > 0 else m[2] / pace for m in moving]
        step = min([*ends, *([left / speed] if work else [])])
        now += step
        for m, end in zip(moving, ends, strict=True):
            part = 1 if m[1] > 0 else 2
            m[part] = 0.0 if end == step else m[part] - step * (1 / sharing if part == 1 else pace)
        for m in [m for m in moving if m[1] <= 0 and m[2] <= 0]:
            moving.remove(m)
            out.end[m[0]] = now
        if work and left / speed == step:
            _, filled, leaving = work.popleft()
            if filled is not None:
                out.ready[filled] = now
            if leaving is not None:
                waiting.append(leaving)
            if not work:
                out.compute_end = now
            left = work[0][0] if work else 0.0
        elif work:
            left -= step * speed
    return out


def _work(gradients: Sequence[tuple[Any, float]], backward_s: float, parcels: Sequence[Parcel], copy: float):
    """Pieces of the compute lane: (seconds, bucket that is complete then or None, bucket that leaves then or None)."""
    bucket_of = {id(g): i for i, parcel in enumerate(parcels) for g in parcel.gradients}
    missing = [len(parcel.gradients) for parcel in parcels]
    turn, before = 0, 0.0
    for gradient, ready in gradients:
        bucket = bucket_of[id(gradient)]
        missing[bucket] -= 1
        yield ready - before + copy * gradient.nbytes, None if missing[bucket] else bucket, None
        before = ready
        while turn < len(parcels) and missing[turn] == 0:
            yield parcels[turn].encode_s, None, turn
            turn += 1
    yield backward_s - before, None, None

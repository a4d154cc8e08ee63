"""One rank's share of a schedule: which elements it sends and receives, in which order.

A schedule speaks of chunks, a network of messages. `rank_plan` cuts each chunk that will be summed into segments, so
that the sum of one segment runs while the next one is on the wire. Both ends of a transfer cut it alike and list it in
the order of the schedule, so messages match by order alone: NCCL ignores the tags of point-to-point messages.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ddplab.transfers import Schedule


@dataclass(frozen=True)
class Send:
    """Elements `lo` to `hi` go to rank `peer` of the group.

    `snapshot`: the same chunk also arrives in this step. What leaves is the value from before the step, so it is
    copied aside first.
    """

    peer: int
    lo: int
    hi: int
    snapshot: bool


@dataclass(frozen=True)
class Receive:
    """Elements `lo` to `hi` come from rank `peer`, to be combined with ours (`reduce`) or to replace them.

    A copy lands in the caller's tensor itself, so its receive must not be posted before step `earliest`: until then
    an older transfer of ours still reads or writes the same elements.
    """

    peer: int
    lo: int
    hi: int
    reduce: bool
    earliest: int


@dataclass
class Round:
    """The k-th segment of every transfer that this rank takes part in during one step."""

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """All rounds of one step. A rank starts its next step when all sends and receives of this one are over."""

    number: int
    rounds: list[Round]


@lru_cache(maxsize=64)  # a training loop asks for the same few plans again and again
def rank_plan(schedule: Schedule, rank: int, numel: int, segment: int) -> tuple[Step, ...]:
    """The steps in which `rank` sends or receives something.

    Args:
        schedule: any schedule; `rank` counts from 0 within its `ranks`.
        rank: whose share.
        numel: elements in the flat tensor.
        segment: most elements in one message that will be reduced, at least 1; all ranks must use the same. A chunk
            that is copied travels whole: there is no sum to hide.
    """
    bounds = schedule.bounds(numel)
    src, dst, chunk, reduce = schedule.src, schedule.dst, schedule.chunk, schedule.reduce
    rows_of: dict[int, list[int]] = defaultdict(list)
    for i in np.flatnonzero((src == rank) | (dst == rank)).tolist():
        rows_of[int(schedule.step[i])].append(i)

    def segments(c: int, reduce: bool) -> list[tuple[int, int]]:
        length = segment if reduce else max(1, bounds[c + 1] - bounds[c])
        return [(lo, min(lo + length, bounds[c + 1])) for lo in range(bounds[c], bounds[c + 1], length)]

    steps: list[Step] = []
    last_use: dict[int, int] = defaultdict(lambda: -1)  # chunk -> the last step in which this rank touched it
    for number in sorted(rows_of):
        rows = rows_of[number]
        sent = {int(chunk[i]) for i in rows if src[i] == rank}
        received = {int(chunk[i]) for i in rows if dst[i] == rank}
        rounds: dict[int, Round] = defaultdict(Round)
        for i in rows:
            c = int(chunk[i])
            for k, (lo, hi) in enumerate(segments(c, bool(reduce[i]))):
                if src[i] == rank:
                    rounds[k].sends.append(Send(int(dst[i]), lo, hi, c in received))
                else:
                    earliest = number if c in sent else last_use[c] + 1
                    rounds[k].receives.append(Receive(int(src[i]), lo, hi, bool(reduce[i]), earliest))
        last_use.update(dict.fromkeys(sent | received, number))
        if rounds:
            steps.append(Step(number, [rounds[k] for k in sorted(rounds)]))
    return tuple(steps)

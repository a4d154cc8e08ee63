"""Ranks that share the processors of one machine: each has a thread that computes and a thread that communicates.

`lanes.py` gives every lane a processor of its own. With more threads than processors a thread waits for its turn: also
one that only woke up to look at the clock. Here every thread of every rank is played, event by event, with the rule of
Linux' real-time scheduler (SCHED_RR): who wants a processor stands at the end of one queue; who has one keeps it until
he waits for something, or until his slice is over. Nothing in it is fitted.
"""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ddplab.lanes import Lanes

FAIR_SLICE_S = 0.003  # of an ordinary thread: Linux' base slice (kernel/sched/fair.c)
_RR_SLICE = Path("/proc/sys/kernel/sched_rr_timeslice_ms")


@dataclass(frozen=True)
class Job:
    """One bucket: its gradients and bytes, and seconds of processor and link on each rank.

    encode_s: in the compute thread.  work_s: in the lane, before, between and after the transfers, so one more than
    those.  transfer_s: of each collective, once all ranks are there.
    """

    gradients: Sequence[Any]
    nbytes: int
    encode_s: float
    work_s: tuple[float, ...]
    transfer_s: tuple[float, ...]


def here() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slice_s(realtime: bool) -> float:
    """How long a thread keeps a processor that others wait for: the kernel's setting, or its usual 100 ms."""
    if not realtime:
        return FAIR_SLICE_S
    try:
        return int(_RR_SLICE.read_text()) / 1e3
    except (OSError, ValueError):
        return 0.1


def run_ranks(
    gradients: Sequence[tuple[Any, float]],
    backward_s: float,
    jobs: Sequence[Job],
    copy_s_per_byte: float = 0.0,
    *,
    ranks: int = 4,
    processors: int | None = None,
    slice_s: float = 0.1,
) -> tuple[Lanes, float]:
    """One backward of all ranks: (lanes, seconds until every gradient is the mean), of the slowest rank.

    gradients: (gradient, seconds since backward began), in the order of readiness; between them the compute thread
    waits on the clock.  jobs: in bucket order.  copy_s_per_byte: processor seconds of copying a gradient into its
    bucket, and the result back.  processors: None means one for every thread.
    """
    world = _World(processors or 2 * ranks, slice_s)
    every = [_Rank(jobs) for _ in range(ranks)]
    for rank in every:
        world.start(_compute(world, rank, gradients, backward_s, copy_s_per_byte))
        world.start(_lane(world, rank, ranks))
    world.run()
    slowest = [list(map(max, zip(*column, strict=True))) for column in zip(*(r.times for r in every), strict=True)]
    return Lanes(*slowest, max(r.compute_end for r in every)), max(r.done for r in every)


class _Rank:
    """What one rank knows: when its buckets were ready, started and ended, and which of them were handed over."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.ready, self.start, self.end = ([0.0] * len(jobs) for _ in range(3))
        self.compute_end = self.done = 0.0

    @property
    def times(self) -> tuple[list[float], list[float], list[float]]:
        return self.ready, self.start, self.end


@dataclass
class _World:
    """The clock, the queue for the processors, and who waits for what. A thread is a generator that yields what it
    waits for: ("work", processor seconds), ("until", time), or ("signal", name, how many times it must be given)."""

    processors: int
    slice_s: float
    now: float = 0.0
    events: list = field(default_factory=list)
    queue: deque = field(default_factory=deque)  # threads that want a processor
    busy: int = 0
    left: dict = field(default_factory=dict)  # thread -> processor seconds that it still needs, rest of its slice
    given: dict = field(default_factory=dict)  # signal -> how often it was given
    waiting: dict = field(default_factory=dict)  # signal -> [(how often it must be given, thread)]
    order: Any = field(default_factory=count)

    def start(self, thread: Generator) -> None:
        self.left[thread] = [0.0, self.slice_s]
        self.at(0.0, thread, None)

    def at(self, time: float, thread: Generator, ran: float | None) -> None:
        """An event: `thread` wakes up (None), or it has run for so many seconds."""
        heapq.heappush(self.events, (time, next(self.order), thread, ran))

    def signal(self, name: Any) -> None:
        given = self.given[name] = self.given.get(name, 0) + 1
        for times, thread in [w for w in self.waiting.get(name, ()) if w[0] <= given]:
            self.waiting[name].remove((times, thread))
            self.at(self.now, thread, None)

    def run(self) -> None:
        while self.events:
            self.now, _, thread, ran = heapq.heappop(self.events)
            if ran is None or self.ran(thread, ran):
                self.go_on(thread)
            while self.queue and self.busy < self.processors:
                one = self.queue.popleft()
                self.busy += 1
                turn = min(self.left[one])
                self.at(self.now + turn, one, turn)

    def ran(self, thread: Generator, seconds: float) -> bool:
        """The turn is over: whether the work is, too. If not, the thread stands at the end of the queue."""
        self.busy -= 1
        work, turn = self.left[thread]
        done = seconds == work
        self.left[thread] = [0.0 if done else work - seconds, turn - seconds if turn > seconds else self.slice_s]
        if not done:
            self.queue.append(thread)
        return done

    def go_on(self, thread: Generator) -> None:
        """Run the thread until it waits."""
        for kind, what, *more in thread:
            if kind == "work" and what > 0:
                self.left[thread][0] = what
                self.queue.append(thread)
                return
            if kind == "until" and what > self.now:
                self.at(what, thread, None)
                return
            if kind == "signal" and self.given.get(what, 0) < more[0]:
                self.waiting.setdefault(what, []).append((more[0], thread))
                return


def _compute(
    world: _World, rank: _Rank, gradients: Sequence[tuple[Any, float]], backward_s: float, copy: float
) -> Generator:
    """Backward on the clock, copies and encoding on a processor; then the wait for the buckets, one by one."""
    bucket_of = {id(g): i for i, job in enumerate(rank.jobs) for g in job.gradients}
    missing = [len(job.gradients) for job in rank.jobs]
    turn, before = 0, 0.0
    for gradient, ready in gradients:
        yield "until", world.now + ready - before
        before = ready
        yield "work", copy * gradient.nbytes
        bucket = bucket_of[id(gradient)]
        missing[bucket] -= 1
        if not missing[bucket]:
            rank.ready[bucket] = world.now
        while turn < len(rank.jobs) and not missing[turn]:
            yield "work", rank.jobs[turn].encode_s
            world.signal((rank, "encoded", turn))
            turn += 1
    yield "until", world.now + backward_s - before
    rank.compute_end = world.now
    for i, job in enumerate(rank.jobs):
        yield "signal", (rank, "reduced", i), 1
        yield "work", copy * job.nbytes
    rank.done = world.now


def _lane(world: _World, rank: _Rank, ranks: int) -> Generator:
    """Bucket after bucket: work, transfer, work, transfer, ... A transfer begins when the last rank is there."""
    for i, job in enumerate(rank.jobs):
        yield "signal", (rank, "encoded", i), 1
        rank.start[i] = world.now
        for k, work in enumerate(job.work_s):
            yield "work", work
            if k < len(job.transfer_s):
                world.signal(("arrived", i, k))
                yield "signal", ("arrived", i, k), ranks
                yield "until", world.now + job.transfer_s[k]
        rank.end[i] = world.now
        world.signal((rank, "reduced", i))

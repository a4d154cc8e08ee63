"""Run a schedule on symbols instead of numbers: the proof behind `Schedule.verify` and the pictures behind `states`.

A buffer holds, for each chunk, a sum of contributions: D1+A1 is "rank 3's chunk 1 plus rank 0's chunk 1". Only *which*
ranks are in a sum matters, so a sum is a set of ranks, kept as bits. A second set holds the ranks that a sum counts
more than once: an all-reduce is right when at the end every first set is full and every second set is empty.

Within a step every rank sends what it held when the step began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ddplab.schedule import Schedule

Event = tuple[int, int, int]  # step, src, dst

_MAX_STATE_BYTES = 4 << 30
_SHOWN = 8  # contributions listed in one message


class ScheduleError(ValueError):
    """A schedule that is malformed, or that does not do what it claims. The message names rank, chunk and step."""


def label(rank: int, chunk: int, ranks: int = 26) -> str:
    """Name of one contribution as the article writes it: rank 0's first chunk is "A1" ("r27c1" beyond 26 ranks).

    `chunk` counts from 0 as everywhere in the API; the printed digit counts from 1.
    """
    return f"{chr(65 + rank)}{chunk + 1}" if ranks <= 26 else f"r{rank}c{chunk + 1}"


def _legend(schedule: Schedule) -> str:
    names = "A is GPU0" if schedule.ranks <= 26 else "r27c1 is chunk 1 of rank 27"
    return f"({names}; chunks and steps count from 1 in this message, from 0 in the API)"


def _names(schedule: Schedule, ranks: np.ndarray, chunk: int, joint: str = " and ") -> str:
    names = [label(int(rank), chunk, schedule.ranks) for rank in ranks]
    if len(names) > _SHOWN:
        names = [*names[:_SHOWN], f"{len(names) - _SHOWN} more"]
    if joint == "+" or len(names) < 2:
        return joint.join(names)
    return ", ".join(names[:-1]) + joint + names[-1]


def _members(bits: np.ndarray) -> np.ndarray:
    """Ranks in one set: the positions of the bits that are on."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


class SymbolicRun:
    """The buffers of all ranks while a schedule runs: `once` and `twice`, uint64 bits, shape (ranks, chunks, words)."""

    def __init__(self, schedule: Schedule):
        n, words = schedule.ranks, -(-schedule.ranks // 64)
        size = 2 * n * schedule.chunks * words * 8
        if size > _MAX_STATE_BYTES:
            raise ScheduleError(
                f"{schedule.name} on {n} ranks with {schedule.chunks} chunks needs {size / 2**30:.0f} GiB to run "
                "symbolically; verify a smaller one."
            )
        self.schedule = schedule
        own = np.zeros((n, words), dtype="<u8")
        own[np.arange(n), np.arange(n) // 64] = np.uint64(1) << (np.arange(n) % 64).astype(np.uint64)
        self.full = np.bitwise_or.reduce(own, axis=0)
        self.once = np.repeat(own[:, None, :], schedule.chunks, axis=1)
        self.twice = np.zeros_like(self.once)
        self.first_doubling: dict[int, Event] = {}  # by chunk
        self.losses: dict[int, list[tuple[Event, np.ndarray]]] = {}  # by chunk: copies that overwrote something

    def steps(self) -> Iterator[int]:
        """Run step after step; yields the number of steps done: 0, 1, ... `schedule.steps`."""
        sched = self.schedule
        edges = np.searchsorted(sched.step, np.arange(sched.steps + 1))
        yield 0
        for step in range(sched.steps):
            rows = slice(edges[step], edges[step + 1])
            src, dst, chunk, reduce = sched.src[rows], sched.dst[rows], sched.chunk[rows], sched.reduce[rows]
            sent_once, sent_twice = self.once[src, chunk], self.twice[src, chunk]  # copies: as the step began
            for turn in self._turns(step, dst, chunk, reduce):
                into = dst[turn], chunk[turn]
                once, twice, add = sent_once[turn], sent_twice[turn], reduce[turn, None]
                overlap = once & self.once[into]
                if (doubled := overlap.any(axis=1) & add[:, 0]).any():
                    for row in turn[doubled]:
                        self.first_doubling.setdefault(int(chunk[row]), (step, int(src[row]), int(dst[row])))
                self.twice[into] = np.where(add, twice | self.twice[into] | overlap, twice)
                lost = np.where(add, 0, self.once[into] & ~once)
                for row in np.flatnonzero(lost.any(axis=1)):
                    event = (step, int(src[turn[row]]), int(dst[turn[row]]))
                    self.losses.setdefault(int(chunk[turn[row]]), []).append((event, lost[row]))
                self.once[into] = np.where(add, once | self.once[into], once)
            yield step + 1

    def _turns(self, step: int, dst: np.ndarray, chunk: np.ndarray, reduce: np.ndarray) -> Iterator[np.ndarray]:
        """Rows of a step in groups that write each (rank, chunk) once; several reductions into one take turns."""
        cell = dst.astype(np.int64) * self.schedule.chunks + chunk
        order = np.argsort(cell, kind="stable")
        starts = np.flatnonzero(np.r_[True, np.diff(cell[order]) != 0]) if len(cell) else np.zeros(0, int)
        counts = np.diff(np.r_[starts, len(cell)])
        turn = np.empty(len(cell), int)
        turn[order] = np.arange(len(cell)) - np.repeat(starts, counts)
        crowded = np.repeat(counts, counts) > 1
        if (clash := crowded & ~reduce[order]).any():
            row = order[np.flatnonzero(clash)[0]]
            raise ScheduleError(
                f"{self.schedule.name}, step {step + 1}: {int((cell == cell[row]).sum())} transfers write chunk "
                f"{chunk[row] + 1} of GPU{dst[row]} and at least one is a copy, so the result depends on which "
                f"arrives last {_legend(self.schedule)}."
            )
        by_turn = np.argsort(turn, kind="stable")
        yield from np.split(by_turn, np.flatnonzero(np.diff(turn[by_turn])) + 1) if len(cell) else ()

    def complete(self) -> np.ndarray:
        """bool (ranks, chunks): which buffers hold every contribution exactly once."""
        return (self.once == self.full).all(axis=2) & ~self.twice.any(axis=2)

    def problem(self, rank: int, chunk: int) -> str:
        """What is wrong with one buffer: "GPU0, chunk 1: B1 and C1 are missing"."""
        sched, held = self.schedule, self.once[rank, chunk]
        missing, doubled = _members(self.full & ~held), _members(self.twice[rank, chunk])
        faults = []
        if len(missing):
            faults.append(f"{_names(sched, missing, chunk)} {'is' if len(missing) == 1 else 'are'} missing")
            for (step, src, dst), lost in self.losses.get(chunk, []):
                if len(gone := _members(lost & ~held)):
                    faults[0] += (
                        f" (in step {step + 1} the copy from GPU{src} to GPU{dst} overwrote "
                        f"{_names(sched, gone, chunk)})"
                    )
                    break
        if len(doubled):
            step, src, dst = self.first_doubling[chunk]
            faults.append(
                f"{_names(sched, doubled, chunk)} {'is' if len(doubled) == 1 else 'are'} counted more than once "
                f"(first in step {step + 1}, when GPU{src} sent to GPU{dst})"
            )
        return f"GPU{rank}, chunk {chunk + 1}: {' and '.join(faults)}; it holds {self._sum(rank, chunk)}"

    def _sum(self, rank: int, chunk: int) -> str:
        return _names(self.schedule, _members(self.once[rank, chunk]), chunk, joint="+")


def _owners(complete: np.ndarray) -> list[int | None | tuple[int, ...]]:
    held = [tuple(int(c) for c in np.flatnonzero(row)) for row in complete]
    return [None if not chunks else chunks[0] if len(chunks) == 1 else chunks for chunks in held]


def _claimed(owners: Sequence[int | None | Sequence[int]], schedule: Schedule) -> list[tuple[int, ...]]:
    if not hasattr(owners, "__len__") or len(owners) != schedule.ranks:
        raise ScheduleError(f"owners must be a list with one entry for each of {schedule.ranks} ranks, not {owners!r}.")
    claims = [() if o is None else tuple(o) if isinstance(o, (tuple, list)) else (o,) for o in owners]
    for rank, chunks in enumerate(claims):
        for chunk in chunks:
            if not isinstance(chunk, (int, np.integer)) or not 0 <= chunk < schedule.chunks:
                raise ScheduleError(
                    f"owners[{rank}] names chunk {chunk!r}; chunks here are 0 to {schedule.chunks - 1} (from 0)."
                )
    return claims


def verify(schedule: Schedule, owners: Sequence | None = None) -> list[int | None | tuple[int, ...]]:
    """See `Schedule.verify`."""
    claims = None if owners is None else _claimed(owners, schedule)
    run, held = SymbolicRun(schedule), []
    for done in run.steps():
        if done != schedule.reduce_steps:
            continue
        complete = run.complete()
        held = _owners(complete)
        when = f"{schedule.name}, after the reduce phase ({done} steps)"
        for rank, chunks in enumerate(claims or []):
            for chunk in chunks:
                if not complete[rank, chunk]:
                    raise ScheduleError(f"{when}: {run.problem(rank, chunk)} {_legend(schedule)}.")
            extra = sorted(set(np.flatnonzero(complete[rank]).tolist()) - set(chunks))
            if extra:
                raise ScheduleError(
                    f"{when}: GPU{rank} also holds chunk {extra[0] + 1} complete, which owners[{rank}] does not say "
                    f"{_legend(schedule)}."
                )
    wrong = np.argwhere(~run.complete())
    if len(wrong):
        more = f" {len(wrong) - 1} more (rank, chunk) pairs are wrong." if len(wrong) > 1 else ""
        raise ScheduleError(
            f"{schedule.name}, after all {schedule.steps} steps: {run.problem(*map(int, wrong[0]))} "
            f"{_legend(schedule)}.{more}"
        )
    return held


def states(schedule: Schedule) -> list[list[list[tuple[int, ...]]]]:
    """See `Schedule.states`."""
    run, history = SymbolicRun(schedule), []
    for _ in run.steps():
        history.append(
            [
                [
                    tuple(sorted([*_members(once).tolist(), *_members(twice).tolist()]))
                    for once, twice in zip(row_once, row_twice, strict=True)
                ]
                for row_once, row_twice in zip(run.once, run.twice, strict=True)
            ]
        )
    return history

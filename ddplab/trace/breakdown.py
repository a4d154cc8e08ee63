"""Where a rank's time went: compute, communication hidden and exposed, memory, idle; whole and step by step."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from ddplab.trace.columns import COMM, COMPUTE, MEMORY, RankTrace, Table
from ddplab.trace.intervals import EMPTY, Intervals, intersect, join, subtract, union, within

# The data loader names itself so (torch/utils/data/dataloader.py); the rest is what people call it.
_INPUT = re.compile(
    r"enumerate\(DataLoader\)|data_?load|get_?batch|next_?batch|load_?batch|copy_batch_to_gpu", re.IGNORECASE
)


@functools.lru_cache(maxsize=1 << 14)
def _loads(name: str) -> bool:
    """Whether a name is one of fetching input. The traces of a job's ranks share their names."""
    return bool(_INPUT.search(name))


PARTS = ("span_ns", "compute_only_ns", "overlapped_ns", "exposed_comm_ns", "memory_only_ns", "idle_ns")


@dataclass
class Busy:
    """When a rank computed, communicated, copied memory and fetched input, each as a set of time.

    On a GPU: kernels on any stream, and copies. On a CPU: the operators of the main thread, and what gloo's threads
    ran. Input: the data loader, and copies from the host (which on a GPU are memory too). `begin`, `end`: first start
    and last end of compute, communication and memory, int nanoseconds.
    """

    compute: Intervals
    comm: Intervals
    memory: Intervals
    all: Intervals  # any of these three
    input: Intervals
    begin: int
    end: int

    @cached_property
    def hidden(self) -> Intervals:
        """Communication while compute ran."""
        return intersect(self.comm, self.compute)

    def parts(self) -> dict[str, int]:
        """The five parts of all there is: they sum to `span_ns` exactly."""
        return {name: int(values[0]) for name, values in self.parts_of([self.begin], [self.end]).items()}

    def parts_of(self, begins: Sequence[int], ends: Sequence[int]) -> dict[str, np.ndarray]:
        """The five parts of each window [begin, end), one array a part."""
        low, high = np.asarray(begins, np.int64), np.asarray(ends, np.int64)
        compute, comm, hidden, busy = (within(a, low, high) for a in (self.compute, self.comm, self.hidden, self.all))
        parts = (compute - hidden, hidden, comm - hidden, busy - (compute + comm - hidden), high - low - busy)
        return dict(zip(PARTS, (high - low, *parts), strict=True))


def busy(trace: RankTrace) -> Busy:
    """The sets of time of one rank."""
    marks = trace.marks
    loading = np.array([i for i, name in enumerate(trace.names) if _loads(name)], np.int32)
    loads = marks.where(np.isin(marks.name, loading) & ~marks.gpu)
    copies = trace.gpu.where(np.isin(trace.gpu.name, trace.ids("Memcpy HtoD")))
    input = join(union(loads.start_ns, loads.end_ns), union(copies.start_ns, copies.end_ns))
    if len(trace.gpu):
        sets = [_of(trace.gpu, trace.gpu.kind == kind) for kind in (COMPUTE, COMM, MEMORY)]
        if not len(sets[1][0]):
            sets[1] = _of(marks, gloo(trace))
            every = join(*sets)
        else:
            every = _of(trace.gpu, slice(None))  # the same, without copies of a long trace
    else:
        enqueue = trace.ids("c10d::")
        rows = trace.cpu.where((trace.cpu.thread == main_thread(trace)) & ~np.isin(trace.cpu.name, enqueue))
        sets = [subtract(_of(rows, slice(None)), input), _of(marks, gloo(trace)), EMPTY]
        every = join(*sets)
    ends = [(int(s[0]), int(e[-1])) for s, e in sets if len(s)]
    begin, end = (min(b for b, _ in ends), max(e for _, e in ends)) if ends else (0, 0)
    return Busy(*sets, every, input, begin, end)


def gloo(trace: RankTrace) -> np.ndarray:
    """Rows of `trace.marks`: collectives that a CPU thread ran. `c10d::…` operators only enqueue them."""
    return np.isin(trace.marks.name, trace.ids("gloo:")) & ~trace.marks.gpu


def main_thread(trace: RankTrace) -> int:
    """The thread of the training loop: where the steps are annotated, else the one with most operators; -1 if none."""
    steps = np.isin(trace.marks.name, trace.ids("ProfilerStep#")) & ~trace.marks.gpu
    threads = trace.marks.thread[steps] if steps.any() else trace.cpu.thread
    return int(np.bincount(threads).argmax()) if len(threads) else -1


def steps(trace: RankTrace, busy: Busy) -> list[dict[str, int]]:
    """One row a ProfilerStep annotation, none dropped: its number and the parts of its window.

    A CPU runs ahead of its GPU. On a GPU the window of a step therefore begins with the first kernel that the step
    launched and lasts to the next step's; the last one ends with the last kernel. On a CPU it is the annotation.
    """
    found = list(trace.steps())
    if not found:
        return []
    numbers, starts, ends = (np.array(column) for column in zip(*found, strict=True))
    lows, highs = _windows(trace, busy, starts, ends)
    columns = {
        "step": numbers,
        "start_ns": lows,
        **busy.parts_of(lows, highs),
        "annotated_ns": ends - starts,
        "input_ns": within(busy.input, starts, ends),
    }
    return [
        dict(zip(columns, row, strict=True)) for row in zip(*(each.tolist() for each in columns.values()), strict=True)
    ]


def _windows(trace: RankTrace, busy: Busy, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    called = trace.gpu.launch_ns
    if called.max(initial=-1) < 0:
        return starts, ends
    order = np.argsort(called, kind="stable")  # what was not launched comes first
    launches = np.searchsorted(called, [starts, ends], sorter=order).T.tolist()
    begins = [
        trace.gpu.start_ns[order[low:high]].min() if high > low else start
        for (low, high), start in zip(launches, starts, strict=True)
    ]
    first = np.maximum.accumulate(begins)
    return first, np.maximum(np.r_[first[1:], busy.end], first)


def step_of(trace: RankTrace, steps: list[dict[str, int]], operations: pd.DataFrame) -> list[int | None]:
    """The step that each operation belongs to: the one that launched it; None before the first.

    Where the launch is not in the trace, the window that it began in. A CPU's operations begin where they are called.
    """
    launch, start = operations["launch_ns"].to_numpy(), operations["start_ns"].to_numpy()
    called = np.searchsorted(
        [start for _, start, _ in trace.steps()], np.where(launch >= 0, launch, start), side="right"
    )
    began = np.searchsorted([step["start_ns"] for step in steps], start, side="right")
    at = np.where((launch >= 0) | (trace.device == "cpu"), called, began)
    return [steps[i - 1]["step"] if i else None for i in at.tolist()]


def _of(table: Table, rows: np.ndarray | slice) -> Intervals:
    return union(table.start_ns[rows], table.end_ns[rows])

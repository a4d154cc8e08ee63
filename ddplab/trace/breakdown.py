"""Where a rank's time went: compute, communication hidden and exposed, memory, idle; whole and step by step."""

from __future__ import annotations

import re
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
    input: Intervals
    begin: int
    end: int

    @cached_property
    def hidden(self) -> Intervals:
        """Communication while compute ran."""
        return intersect(self.comm, self.compute)

    @cached_property
    def all(self) -> Intervals:
        return join(self.compute, self.comm, self.memory)

    def parts(self, begin: int | None = None, end: int | None = None) -> dict[str, int]:
        """The five parts of [begin, end), by default of all there is: they sum to `span_ns` exactly."""
        low, high = self.begin if begin is None else begin, self.end if end is None else end
        compute, comm, hidden, busy = (
            int(within(a, low, high)) for a in (self.compute, self.comm, self.hidden, self.all)
        )
        parts = (compute - hidden, hidden, comm - hidden, busy - (compute + comm - hidden), high - low - busy)
        return dict(zip(PARTS, (high - low, *parts), strict=True))


def busy(trace: RankTrace) -> Busy:
    """The sets of time of one rank."""
    marks = trace.marks
    loading = np.array([i for i, name in enumerate(trace.names) if _INPUT.search(name)], np.int32)
    loads = marks.where(np.isin(marks.name, loading) & ~marks.gpu)
    copies = trace.gpu.where(np.isin(trace.gpu.name, trace.ids("Memcpy HtoD")))
    input = join(union(loads.start_ns, loads.end_ns), union(copies.start_ns, copies.end_ns))
    if len(trace.gpu):
        sets = [_of(trace.gpu, trace.gpu.kind == kind) for kind in (COMPUTE, COMM, MEMORY)]
        if not len(sets[1][0]):
            sets[1] = _of(marks, gloo(trace))
    else:
        enqueue = trace.ids("c10d::")
        rows = trace.cpu.where((trace.cpu.thread == main_thread(trace)) & ~np.isin(trace.cpu.name, enqueue))
        sets = [subtract(_of(rows, slice(None)), input), _of(marks, gloo(trace)), EMPTY]
    ends = [(int(s[0]), int(e[-1])) for s, e in sets if len(s)]
    begin, end = (min(b for b, _ in ends), max(e for _, e in ends)) if ends else (0, 0)
    return Busy(*sets, input, begin, end)


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
    rows = []
    windows = _windows(trace, busy, found)
    for (number, start, end), (low, high) in zip(found, windows, strict=True):
        input = int(within(busy.input, start, end))
        rows.append(
            {"step": number, "start_ns": low, **busy.parts(low, high), "annotated_ns": end - start, "input_ns": input}
        )
    return rows


def _windows(trace: RankTrace, busy: Busy, found: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    launched = trace.gpu.where(trace.gpu.launch_ns >= 0) if len(trace.gpu) else None
    if not launched or not len(launched):
        return [(start, end) for _, start, end in found]
    begins = []
    for _, start, end in found:
        mine = (launched.launch_ns >= start) & (launched.launch_ns < end)
        first = int(launched.start_ns[mine].min()) if mine.any() else start
        begins.append(max([first, *begins[-1:]]))
    ends = begins[1:] + [max(busy.end, begins[-1])] if begins else []
    return [(low, max(low, high)) for low, high in zip(begins, ends, strict=True)]


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

"""Which annotation an event stands in: by its launch on the CPU, or on its own stream of the device's timeline."""

from __future__ import annotations

import numpy as np

from ddplab.trace.columns import COMM, MEMORY, RankTrace, Table


def around(trace: RankTrace, starts: np.ndarray, ends: np.ndarray, threads: np.ndarray, gpu: bool) -> np.ndarray:
    """For each span the row of `trace.marks` (of those that name a collective) it stands in on its thread, else -1."""
    marks = trace.marks
    candidates = np.flatnonzero((marks.message >= 0) & (marks.gpu == gpu))
    found = np.full(len(starts), -1)
    for thread in np.unique(marks.thread[candidates]):
        mine, here = candidates[marks.thread[candidates] == thread], np.flatnonzero(threads == thread)
        at = np.searchsorted(marks.start_ns[mine], starts[here], side="right") - 1
        inside = (at >= 0) & (ends[here] <= marks.end_ns[mine[np.maximum(at, 0)]])
        found[here[inside]] = mine[at[inside]]
    return found


def on_device(trace: RankTrace, rows: Table) -> np.ndarray:
    """The device's annotation around each row of `trace.gpu`, else -1."""
    return around(trace, rows.start_ns, rows.end_ns, rows.thread, gpu=True)


def at_launch(trace: RankTrace, rows: Table) -> np.ndarray:
    """The CPU's annotation in which each row of `trace.gpu` was launched, else -1."""
    return around(trace, rows.launch_ns, rows.launch_ns, rows.launch_thread, gpu=False)


def mark_copy_engines(trace: RankTrace) -> None:
    """Make COMM of copies that are a collective: from NCCL 2.28 on, copy engines can do it without a kernel.

    The profiler shows plain copies then, inside the nccl:… annotation of the device's timeline on their stream. Where a
    communication kernel runs inside it too, the copies only pack and unpack.
    """
    gpu = trace.gpu
    if not (gpu.kind == MEMORY).any() or not (trace.marks.gpu & (trace.marks.message >= 0)).any():
        return
    inside = on_device(trace, gpu)
    copies = (gpu.kind == MEMORY) & (inside >= 0) & ~np.isin(inside, inside[gpu.kind == COMM])
    gpu.kind[copies] = COMM
    gpu.message[copies] = trace.marks.message[inside[copies]]


def communication(trace: RankTrace) -> Table:
    """The operations of `trace.gpu` that communicate; the copies of one collective are one row."""
    rows = trace.gpu.where(trace.gpu.kind == COMM)
    copies = np.isin(rows.name, trace.ids("Memcpy"))
    if not copies.any():
        return rows
    which = np.where(copies, on_device(trace, rows), -1)
    first = np.flatnonzero((which < 0) | ~_seen_before(which))
    merged = rows.where(first)
    for i, mark in enumerate(which[first].tolist()):
        if mark >= 0:
            merged.end_ns[i] = rows.end_ns[which == mark].max()
    return merged


def _seen_before(values: np.ndarray) -> np.ndarray:
    seen = np.ones(len(values), bool)
    seen[np.unique(values, return_index=True)[1]] = False
    return seen

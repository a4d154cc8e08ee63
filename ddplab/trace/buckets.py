"""DDP's buckets in a trace: when each was ready, when it travelled, and what of it backward did not hide.

A bucket is a collective that was launched while autograd accumulated a gradient: there DDP's hook sits, and there it
hands a bucket over when its last gradient has arrived. Other collectives of a step, the broadcast of buffers, metrics,
batch norm, are launched elsewhere and are no buckets.

On a GPU the launch is early, since the CPU runs ahead. A bucket is ready when the kernels are through that backward had
launched before it. On a CPU the hand-over itself is that moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ddplab.steptimes import BucketTimes, Timeline
from ddplab.trace import kernels
from ddplab.trace.breakdown import gloo
from ddplab.trace.columns import COMM, COMPUTE, RankTrace, Table
from ddplab.trace.intervals import Intervals, union, within
from ddplab.trace.operations import operations

COLUMNS = {
    "rank": "Int64",
    "step": "Int64",  # number of the ProfilerStep; missing where steps are not annotated
    "iteration": "int64",  # backward passes with buckets, from 0 in this trace
    "bucket": "int64",  # from 0, as they were handed over
    "collective": "object",
    "message_bytes": "Int64",
    "ready_us": "float64",  # these and the next: since backward began
    "start_us": "float64",
    "end_us": "float64",
    "wait_us": "float64",  # ready to start: other buckets before it, or a busy CPU
    "exposed_us": "float64",  # of its time on the link, what lies after backward's own work
    "backward_us": "float64",  # how long backward itself worked, the same for all buckets of an iteration
    "begin_ns": "int64",  # when backward began, in the trace's clock
}


@dataclass(frozen=True)
class _Pass:
    """One backward pass: its window on the CPU, and when its work began and ended."""

    step: int | None
    begin: int
    end: int
    launched: tuple[int, int]
    work: tuple[np.ndarray, np.ndarray] | None  # on a GPU: when its kernels were launched, and by when all were done


def buckets(trace: RankTrace, ops: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row a bucket of each backward pass, columns as in COLUMNS; empty where the trace shows no DDP.

    ops: `operations(trace)`, if it is there already. Needs the CPU's events: a trace of the GPU alone knows no hooks.
    """
    ops = operations(trace) if ops is None else ops
    hooks = _union(trace, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad")
    launch = _launches(trace, ops)
    mine = np.flatnonzero((launch >= 0) & (within(hooks, launch, launch + 1) > 0))
    rows: list[dict] = []
    iteration = 0
    for one in _passes(trace):
        inside = mine[(launch[mine] >= one.launched[0]) & (launch[mine] <= one.launched[1])]
        if not len(inside):
            continue
        inside = inside[np.argsort(launch[inside], kind="stable")]
        for number, row in enumerate(inside):
            op = ops.iloc[row]
            start, end = int(op["start_ns"]), int(op["end_ns"])
            ready = min(_ready(one, int(launch[row])), start)
            rows.append(
                {
                    "rank": trace.rank,
                    "step": one.step,
                    "iteration": iteration,
                    "bucket": number,
                    "collective": op["collective"],
                    "message_bytes": op["message_bytes"],
                    "ready_us": (ready - one.begin) / 1e3,
                    "start_us": (start - one.begin) / 1e3,
                    "end_us": (end - one.begin) / 1e3,
                    "wait_us": (start - ready) / 1e3,
                    "exposed_us": max(0, end - max(start, one.end)) / 1e3,
                    "backward_us": (one.end - one.begin) / 1e3,
                    "begin_ns": one.begin,
                }
            )
        iteration += 1
    return pd.DataFrame({name: pd.Series([r[name] for r in rows], dtype=kind) for name, kind in COLUMNS.items()})


def timeline(table: pd.DataFrame, iteration: int = -1, rank: int | None = None) -> Timeline:
    """One backward pass of `buckets(trace)` as a `ddplab.Timeline`, to set beside a predicted one or to draw.

    iteration: as in the table, or counted from the end. rank: needed where the table holds several. ValueError if
    there is no such pass. forward_s and optimizer_s are 0: the table knows backward only.
    """
    ranks = [r for r in table["rank"].dropna().unique()]
    if rank is None and len(ranks) > 1:
        raise ValueError(f"the table holds the ranks {', '.join(map(str, sorted(ranks)))}: say which, as rank=")
    mine = table if rank is None else table[table["rank"] == rank]
    known = sorted(mine["iteration"].unique())
    if not -len(known) <= iteration < len(known):
        raise ValueError(f"there are {len(known)} backward passes with buckets, and no iteration {iteration}")
    mine = mine[mine["iteration"] == known[iteration]]
    times = tuple(
        BucketTimes(
            int(row.bucket), int(row.message_bytes or 0), *(t / 1e6 for t in (row.ready_us, row.start_us, row.end_us))
        )
        for row in mine.fillna({"message_bytes": 0}).itertuples()
    )
    backward = float(mine["backward_us"].iat[0]) / 1e6
    done = max(backward, *(b.end_s for b in times))
    return Timeline(
        times, 0.0, backward, done, 0.0, "measured", about={"rank": rank if rank is not None else ranks[:1]}
    )


def _passes(trace: RankTrace) -> list[_Pass]:
    """Backward passes: one after each forward of DDP, or one a step, or one; those with work of their own."""
    found = list(trace.steps())
    forwards = np.isin(trace.marks.name, trace.ids("DistributedDataParallel.forward")) & ~trace.marks.gpu
    cuts = sorted({*trace.marks.start_ns[forwards].tolist(), *(start for _, start, _ in found)})
    rows = trace.cpu.where(np.isin(trace.cpu.name, trace.ids("autograd::engine::evaluate_function")))
    edges = [0, *np.searchsorted(rows.start_ns, cuts).tolist(), len(rows)]
    order = _launch_order(trace)
    launched, ends, starts = (column[order] for column in (trace.gpu.launch_ns, trace.gpu.end_ns, trace.gpu.start_ns))
    passes = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        if low == high:
            continue
        first, last = int(rows.start_ns[low]), int(rows.end_ns[low:high].max())
        begin, end, work = first, last, None
        if len(trace.gpu):
            mine = slice(*np.searchsorted(launched, [first, last + 1]))
            if mine.start == mine.stop:
                continue
            work = launched[mine], np.maximum.accumulate(ends[mine])
            begin, end = int(starts[mine].min()), int(work[1][-1])
        step = next((number for number, start, stop in found if start <= first < stop), None)
        passes.append(_Pass(step, begin, end, (first, last), work))
    return passes


def _launch_order(trace: RankTrace) -> np.ndarray:
    """Rows of the compute kernels whose launch is known, as they were launched."""
    rows = np.flatnonzero((trace.gpu.kind == COMPUTE) & (trace.gpu.launch_ns >= 0))
    return rows[np.argsort(trace.gpu.launch_ns[rows], kind="stable")]


def _ready(one: _Pass, launch: int) -> int:
    """When the work was through that backward had launched before this bucket."""
    if one.work is None:
        return launch
    launched, done = one.work
    before = int(np.searchsorted(launched, launch, side="right"))
    return max(launch, int(done[before - 1])) if before else launch


def _launches(trace: RankTrace, ops: pd.DataFrame) -> np.ndarray:
    """When the CPU launched each operation; -1 where that is not in the trace.

    gloo's threads work off a queue: the operation that begins next is the one that was enqueued first.
    """
    if len(trace.gpu) and (trace.gpu.kind == COMM).any():
        return ops["launch_ns"].to_numpy(np.int64)
    found = np.full(len(ops), -1, np.int64)
    if not gloo(trace).any():
        return found
    calls: Table = trace.cpu.where(np.isin(trace.cpu.name, trace.ids("c10d::")))
    kinds = [kernels.collective(trace.names[i].removeprefix("c10d::")) for i in calls.name.tolist()]
    waiting = list(zip(calls.start_ns.tolist(), kinds, strict=True))
    for row, (start, kind) in enumerate(zip(ops["start_ns"].tolist(), ops["collective"].tolist(), strict=True)):
        fits = (i for i, (time, called) in enumerate(waiting) if time <= start and _same(called, kind))
        at = next(fits, None)
        if at is not None:
            found[row] = waiting.pop(at)[0]
    return found


def _same(called: str | None, ran: str) -> bool:
    return called == ran or (called == "reduce_scatter" and ran == "all_reduce")  # gloo runs one as the other


def _union(trace: RankTrace, prefix: str) -> Intervals:
    rows = trace.cpu.where(np.isin(trace.cpu.name, trace.ids(prefix)))
    return union(rows.start_ns, rows.end_ns)

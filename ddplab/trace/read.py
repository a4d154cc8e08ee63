"""One trace file to one `RankTrace`."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ddplab.trace.annotations import mark_copy_engines
from ddplab.trace.blocks import Blocks
from ddplab.trace.columns import RankTrace, Table
from ddplab.trace.errors import TraceError
from ddplab.trace.gather import Gather
from ddplab.trace.messages import natural


def read_trace(path: str | Path, *, comm: str | re.Pattern | None = None, partial: bool = False) -> RankTrace:
    """Read one Kineto trace, .json or .json.gz of any layout. See `ddplab.trace` for what comes out.

    comm: a regular expression, searched in kernel names: kernels of yours that communicate (DeepEP, nvshmem).
    partial: leave damaged places out, and say so in `.notes`; otherwise they raise.
    Events whose time or duration is missing, negative, infinite or no number are always left out, counted in `.notes`.
    TraceError: no trace, damaged text, or no events at all; it names the file, the line and the column.
    """
    comm = _pattern(comm)
    rows, blocks, collected = _gathered(path, comm, partial)
    if rows.coarse:  # microseconds since 1970 with decimals, as Kineto wrote them before baseTimeNanoseconds
        rows, blocks, collected = _gathered(path, comm, partial, exact=True)
    base = natural(blocks.head.base_ns) or 0
    gpu, marks = collected["gpu"].table(base), collected["marks"].table(base)
    _join_launches(gpu, collected.pop("launches").table(base))
    collected["cpu"].narrow()
    notes = list(blocks.notes)
    if rows.skipped:
        events = "1 event" if rows.skipped == 1 else f"{rows.skipped} events"
        notes.append(f"skipped {events}: the time or duration is missing, negative or no finite number")
    if not (len(gpu) or len(marks) or collected["cpu"].rows):
        raise TraceError(path, "; ".join(["no events: did the profiler's schedule reach an active step?", *notes]))
    info = blocks.head.distributed if isinstance(blocks.head.distributed, dict) else {}
    if not info:
        notes.append("no distributedInfo: rank and number of ranks are unknown")
    trace = RankTrace(
        path=str(path),
        rank=natural(info.get("rank")),
        world_size=natural(info.get("world_size")) or None,
        backend=info.get("backend") if isinstance(info.get("backend"), str) else None,
        info=info,
        gpu=gpu,
        marks=marks,
        operators=collected["cpu"],
        base_ns=base,
        names=list(rows.names),
        threads=[(str(pid), str(tid)) for pid, tid in rows.threads],
        messages=list(rows.messages),
        notes=notes,
    )
    mark_copy_engines(trace)
    return trace


def _gathered(path: str | Path, comm: re.Pattern | None, partial: bool, exact: bool = False) -> tuple:
    rows, blocks = Gather(comm, exact), Blocks(path, partial, exact)
    with _no_collection():
        for events in blocks:
            rows.add(events)
    return rows, blocks, rows.tables()


def _pattern(comm: str | re.Pattern | None) -> re.Pattern | None:
    try:
        return re.compile(comm) if isinstance(comm, str) else comm
    except re.error as error:
        raise ValueError(f"comm={comm!r} is no regular expression: {error}") from error


def _join_launches(gpu: Table, launches: Table) -> None:
    """Give each row of `gpu` the time and the thread of the runtime call with its correlation."""
    known = launches.correlation
    if (known[1:] < known[:-1]).any():
        launches = launches.where(np.argsort(known, kind="stable"))
        known = launches.correlation
    at = np.searchsorted(known, gpu.correlation).astype(np.int32)
    at[at == len(known)] = 0
    found = gpu.correlation >= 0
    found &= known[at] == gpu.correlation if len(known) else False
    for name, column in (("launch_ns", launches.start_ns), ("launch_thread", launches.thread)):
        gpu.columns[name] = np.full(len(gpu), -1, column.dtype)
        gpu.columns[name][found] = column[at[found]]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's cycle collector, which walks through millions of events for nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

"""What communicated on one rank: each operation, when it ran, and what is known of its message."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from ddplab.trace import kernels
from ddplab.trace.breakdown import gloo
from ddplab.trace.columns import COMM, Message, RankTrace

KEY = ["collective", "group", "group_size", "dtype", "message_bytes"]


def operations(trace: RankTrace) -> pd.DataFrame:
    """Every communication kernel (on a CPU: every gloo operation) of one rank, in time order.

    start_ns, end_ns, launch_ns (-1: unknown), name; collective ("unknown" if nothing tells it), group, group_size, dtype,
    message_bytes, ranks, seq (None where not told); source: where the message came from: "kernel" (its own arguments),
    "annotation" (the nccl:… that its launch stands in), "name".
    """
    if len(trace.gpu) and (trace.gpu.kind == COMM).any():
        rows = trace.gpu.where(trace.gpu.kind == COMM)
        around = _annotations(trace, rows.launch_ns, rows.launch_thread)
        launch = rows.launch_ns
    else:
        rows = trace.marks.where(gloo(trace))
        around, launch = np.full(len(rows), -1), np.full(len(rows), -1)
    known: dict[tuple[int, int], dict] = {}
    columns = []
    for own, outer in zip(rows.message.tolist(), around.tolist(), strict=True):
        if (own, outer) not in known:
            known[own, outer] = _described(trace, own, outer, on_gpu=bool(len(trace.gpu)))
        columns.append(known[own, outer])
    frame = pd.DataFrame(columns, columns=[*KEY, "ranks", "seq", "source"], dtype=object)
    frame.insert(0, "start_ns", rows.start_ns)
    frame.insert(1, "end_ns", rows.end_ns)
    frame.insert(2, "launch_ns", launch)
    frame.insert(3, "name", [trace.names[i] for i in rows.name.tolist()])
    return frame


def _annotations(trace: RankTrace, times: np.ndarray, threads: np.ndarray) -> np.ndarray:
    """For each launch the message of the distributed annotation around it on its thread, -1 if there is none."""
    found = np.full(len(times), -1)
    marks = trace.marks.where((trace.marks.message >= 0) & ~trace.marks.gpu)
    for thread in np.unique(threads[times >= 0]):
        mine, here = marks.where(marks.thread == thread), np.flatnonzero((threads == thread) & (times >= 0))
        if len(mine):
            at = np.searchsorted(mine.start_ns, times[here], side="right") - 1
            inside = (at >= 0) & (mine.end_ns[np.maximum(at, 0)] >= times[here])
            found[here[inside]] = mine.message[at[inside]]
    return found


def _described(trace: RankTrace, own: int, outer: int, on_gpu: bool) -> dict:
    message = trace.messages[own] if own >= 0 else Message()
    source = "kernel" if message.in_elements is not None and on_gpu else "name"
    if message.in_elements is None and outer >= 0:
        around, source = trace.messages[outer], "annotation"
        message = replace(
            around, **{k: v for k in ("group", "group_size", "ranks", "seq") if (v := getattr(message, k)) is not None}
        )
    elif not on_gpu and message.in_elements is not None:
        source = "annotation"
    group_size = message.group_size
    if group_size is None and message.in_elements is not None:
        group_size = trace.world_size  # without a process group's name: the whole job
    return {
        "collective": message.collective or "unknown",
        "group": message.group,
        "group_size": group_size,
        "dtype": message.dtype,
        "message_bytes": _message_bytes(message, group_size),
        "ranks": message.ranks,
        "seq": message.seq,
        "source": source,
    }


def _message_bytes(message: Message, group_size: int | None) -> int | None:
    """The message as nccl-tests counts it: the larger of what a rank gives and what it gets."""
    size = kernels.element_bytes(message.dtype)
    elements = message.in_elements
    if message.collective == "all_gather":
        if message.out_elements:
            elements = message.out_elements
        elif elements is not None:
            elements = elements * group_size if group_size else None
    elif not elements and message.out_elements:
        elements = message.out_elements  # the receiving side of a broadcast, scatter or recv
    return elements * size if elements is not None and size is not None else None

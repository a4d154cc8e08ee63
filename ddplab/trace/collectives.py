"""Collectives: what ran, how long, how fast; and, between ranks, waiting for the last one apart from the transfer.

A kernel of a collective begins when its own rank is ready and ends when all are through. Its shortest run over the ranks
is the transfer; what the others ran longer, they waited. So bandwidth counts the minimum over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ddplab.trace import kernels
from ddplab.trace.breakdown import gloo
from ddplab.trace.columns import COMM, Message, RankTrace

# Bytes over the busiest link per byte of the message, times n: nccl-tests' doc/PERFORMANCE.md.
_BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send": lambda n: 1.0,
    "recv": lambda n: 1.0,
}
_ALONE = ("send", "recv", "send_recv")  # point to point: no common end, so nothing to match
_KEY = ["collective", "group", "group_size", "dtype", "message_bytes"]


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
    frame = pd.DataFrame(columns, columns=[*_KEY, "ranks", "seq", "source"], dtype=object)
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


def matched(operations: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """(the operations with `number`, `transfer_ns`, `wait_ns`, `lag_ns`, `peers` added; notes).

    operations: those of all ranks, with a column `rank`. Ranks' operations belong together by their order within process
    group and collective. `peers`: ranks whose traces have it. Of operations that have no counterpart, all are 0.
    """
    frame, notes = operations.copy(), []
    order = ["rank", "collective", "group", "ranks"]
    named = frame[order].astype(object).where(frame[order].notna(), "")
    frame["number"] = named.groupby(order, sort=False).cumcount()
    key = named["collective"] + "\0" + named["group"] + "\0" + named["ranks"]
    frame["number"] = frame["number"].to_numpy()
    for name, rows in frame.groupby(key, sort=False):
        counts = rows.groupby("rank", sort=False).size()
        if len(counts) > 1 and counts.nunique() > 1:
            shift, note = _aligned(rows, name.split("\0")[0])
            notes.append(note)
            frame.loc[rows.index, "number"] += rows["rank"].map(shift).to_numpy()
    alone = frame["collective"].isin(_ALONE).to_numpy()
    frame["key"] = key.where(~alone, "")
    together = frame[~alone].groupby(["key", "number"], sort=False)
    duration = frame["end_ns"] - frame["start_ns"]
    frame["peers"] = together["rank"].transform("size").reindex(frame.index, fill_value=1)
    frame["transfer_ns"] = (
        duration[~alone].groupby([key[~alone], frame.loc[~alone, "number"]], sort=False).transform("min")
    )
    frame["transfer_ns"] = frame["transfer_ns"].fillna(duration).astype("int64")
    frame["wait_ns"] = duration - frame["transfer_ns"]
    frame["lag_ns"] = (
        (frame["start_ns"] - together["start_ns"].transform("min")).reindex(frame.index).fillna(0).astype("int64")
    )
    return frame, notes


def _aligned(rows: pd.DataFrame, collective: str) -> tuple[dict[int, int], str]:
    """Shifts of `number` by rank, where windows were cut differently: those that bring the ends of each together."""
    ranks = {rank: mine for rank, mine in rows.groupby("rank", sort=False)}
    longest = max(ranks, key=lambda rank: len(ranks[rank]))
    reference = ranks[longest]["end_ns"].to_numpy()
    shift = {}
    for rank, mine in ranks.items():
        ends = mine["end_ns"].to_numpy()
        options = range(len(reference) - len(ends) + 1)
        shift[rank] = min(options, key=lambda s: np.median(np.abs(reference[s : s + len(ends)] - ends)))
    counts = ", ".join(f"rank {rank}: {len(mine)}" for rank, mine in ranks.items())
    return shift, f"the ranks' windows hold different numbers of {collective} ({counts}): matched by when they end"


def bandwidth(operations: pd.DataFrame, ranks: Sequence[object]) -> pd.DataFrame:
    """The table of collectives: one row a collective, group, dtype and message size, the longest in total first.

    count: operations (what ran on 8 ranks counts once). ranks: of how many the trace is there. total_us: on the average
    rank, waiting included. median_us, p99_us: of one rank's run, waiting included. transfer_us: median of the shortest
    over the ranks. algbw_GBps = message / transfer; busbw_GBps: times nccl-tests' factor; None where the size is unknown.
    """
    rows = []
    labels = operations[_KEY].astype(object).where(operations[_KEY].notna(), None)
    keys = labels.assign(name=operations["name"].where(labels["collective"] == "unknown", ""))
    for _, group in operations.groupby([keys[c].map(repr) for c in keys], sort=False):
        first = labels.loc[group.index[0]]
        us = (group["end_ns"] - group["start_ns"]).to_numpy() / 1e3
        transfer = (
            float(np.median(group.drop_duplicates(["key", "number"])["transfer_ns"])) / 1e3
            if group["key"].iat[0]
            else float(np.median(us))
        )
        seen = group["rank"].nunique(dropna=False)
        algbw = first["message_bytes"] / transfer / 1e3 if first["message_bytes"] is not None and transfer else None
        factor = _BUS.get(first["collective"])
        n = first["group_size"]
        rows.append(
            {
                **first,
                "count": len(group.drop_duplicates(["key", "number"])) if group["key"].iat[0] else len(group),
                "ranks": seen,
                "total_us": us.sum() / seen,
                "median_us": float(np.median(us)),
                "p99_us": float(np.percentile(us, 99)),
                "transfer_us": transfer,
                "wait_us": float(group["wait_ns"].sum()) / 1e3 / seen,
                "algbw_GBps": algbw,
                "busbw_GBps": algbw * factor(n) if algbw is not None and factor and n else None,
                "source": group["source"].iat[0],
                "kernel": group["name"].iat[0],
            }
        )
    columns = [
        *_KEY,
        *"count ranks total_us median_us p99_us transfer_us wait_us algbw_GBps busbw_GBps source kernel".split(),
    ]
    table = pd.DataFrame(rows, columns=columns)
    return table.sort_values("total_us", ascending=False, kind="stable", ignore_index=True)

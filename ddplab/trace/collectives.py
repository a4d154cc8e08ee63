"""Collectives of all ranks: which belong together, how long the transfer took, how fast it was.

A kernel of a collective begins when its own rank is ready and ends when all are through. Its shortest run over the
ranks is the transfer; what the others ran longer, they waited. So bandwidth counts the minimum over ranks.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ddplab.trace.operations import KEY

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
COLUMNS = [
    *KEY,
    *("count", "ranks", "total_us", "median_us", "p99_us", "transfer_us", "wait_us", "algbw_GBps", "busbw_GBps"),
    *("source", "kernel"),
]
_ALONE = ("send", "recv", "send_recv")  # point to point: no common end, so nothing to match
_SHIFTS = 200  # ways to lay a shorter window on a longer one that are tried


def matched(operations: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """(the operations with `number`, `instance`, `peers`, `transfer_ns`, `wait_ns` added; notes).

    operations: those of all ranks, with a column `rank`. They belong together by their order within process group and
    collective: `number`, from 0. Rows of one `instance` (int) are one collective seen from its ranks; `peers`
    is how many. Point-to-point operations, and what no other trace has, are instances of their own, without waiting.
    """
    frame, notes = operations.copy(), []
    names = [frame[column].fillna("").astype(str) for column in ("collective", "group", "ranks")]
    key = names[0].str.cat(names[1:], sep="\0")
    number = key.groupby([key, frame["rank"]], sort=False, dropna=False).cumcount()
    for name, rows in frame.groupby(key, sort=False):
        counts = rows.groupby("rank", sort=False).size()
        if counts.nunique() > 1 and name.split("\0")[0] not in _ALONE:
            shift, note = _aligned(rows, name.split("\0")[0])
            notes.append(note)
            number[rows.index] += rows["rank"].map(shift)
    alone = frame["collective"].isin(_ALONE)
    key = key.where(~alone, key + "\0" + frame["rank"].astype(str))
    frame["number"] = number
    frame["instance"] = frame.groupby([key, number], sort=False).ngroup()
    together = frame.groupby("instance", sort=False)
    duration = frame["end_ns"] - frame["start_ns"]
    frame["peers"] = together["rank"].transform("size")
    frame["transfer_ns"] = duration.groupby(frame["instance"], sort=False).transform("min")
    frame["wait_ns"] = duration - frame["transfer_ns"]
    return frame, notes


def _aligned(rows: pd.DataFrame, collective: str) -> tuple[dict[object, int], str]:
    """Shifts of `number` by rank, where windows were cut differently: those that bring the ends of each together."""
    ranks = {rank: mine for rank, mine in rows.groupby("rank", sort=False)}
    longest = max(ranks, key=lambda rank: len(ranks[rank]))
    reference = ranks[longest]["end_ns"].to_numpy()
    shift = {}
    for rank, mine in ranks.items():
        ends = mine["end_ns"].to_numpy()
        most = len(reference) - len(ends)
        options = range(most + 1) if most < _SHIFTS else (0, most)
        shift[rank] = min(options, key=lambda s: np.median(np.abs(reference[s : s + len(ends)] - ends)))
    counts = ", ".join(f"rank {rank}: {len(mine)}" for rank, mine in ranks.items())
    return shift, f"the ranks' windows hold different numbers of {collective} ({counts}): matched by when they end"


def bandwidth(operations: pd.DataFrame) -> list[dict]:
    """The table of collectives: one row a collective, group, dtype and message size, the longest in total first.

    count: operations (what ran on 8 ranks counts once). ranks: of how many the trace is there. total_us: on the
    average rank, waiting included. median_us, p99_us: of one rank's run, waiting included. transfer_us: median of the
    shortest run over the ranks. wait_us: total on the average rank; None where no other rank's trace has it.
    algbw_GBps: message / transfer. busbw_GBps: that times nccl-tests' factor. None where the size is unknown.
    """
    labels = operations[KEY].astype(object)
    labels = labels.where(labels.notna(), None)
    unknown = labels["collective"] == "unknown"
    keys = [labels[column].map(repr) for column in KEY] + [operations["name"].where(unknown, "")]
    rows = []
    for _, mine in operations.groupby(keys, sort=False):
        first = labels.loc[mine.index[0]]
        size, n, factor = first["message_bytes"], first["group_size"], _BUS.get(first["collective"])
        once = mine.drop_duplicates("instance")
        us = (mine["end_ns"] - mine["start_ns"]).to_numpy() / 1e3
        transfer = float(np.median(once["transfer_ns"])) / 1e3
        ranks = mine["rank"].nunique(dropna=False)
        algbw = size / transfer / 1e3 if size is not None and transfer else None
        rows.append(
            {
                **first,
                "count": len(once),
                "ranks": ranks,
                "total_us": float(us.sum()) / ranks,
                "median_us": float(np.median(us)),
                "p99_us": float(np.percentile(us, 99)),
                "transfer_us": transfer,
                "wait_us": float(mine["wait_ns"].sum()) / 1e3 / ranks if mine["peers"].max() > 1 else None,
                "algbw_GBps": algbw,
                "busbw_GBps": algbw * factor(n) if algbw is not None and factor and n else None,
                "source": mine["source"].iat[0],
                "kernel": mine["name"].iat[0],
            }
        )
    return sorted(rows, key=lambda row: -row["total_us"])

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
_SAME_SIZE = ("all_reduce", "broadcast", "reduce", "reduce_scatter")  # on all ranks
_SHIFTS = 200  # ways to lay a shorter window on a longer one that are tried


def matched(operations: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """(the operations with `number`, `instance`, `peers`, `transfer_ns`, `wait_ns` added; notes).

    operations: those of all ranks, with a column `rank`. They belong together by their order within process group and
    collective: `number`, from 0. On gloo also within the size: its two threads work side by side, and on a busy machine
    the operation that was enqueued second can begin first, on one rank and not on another. Rows of one `instance` (int)
    are one collective seen from its ranks; `peers` is how many. Point-to-point operations, and what no other trace has,
    are instances of their own, without waiting.
    """
    start, end = operations["start_ns"].to_numpy(), operations["end_ns"].to_numpy()
    rows_of: dict[tuple, dict[object, list[int]]] = {}
    sizes = zip(*(operations[c].tolist() for c in ("name", "collective", "dtype", "message_bytes")), strict=True)
    size = [tuple(of) if name.startswith("gloo:") and kind in _SAME_SIZE else None for name, kind, *of in sizes]
    names = (operations[column].tolist() for column in ("collective", "group", "ranks"))
    names = (*names, size, operations["rank"].tolist())
    for i, (*key, rank) in enumerate(zip(*names, strict=True)):
        rows_of.setdefault(tuple(key), {}).setdefault(rank, []).append(i)
    number, instance, notes, known = np.zeros(len(start), np.int64), np.zeros(len(start), np.int64), [], 0
    for (collective, *_), ranks in rows_of.items():
        alone = collective in _ALONE
        shift = dict.fromkeys(ranks, 0)
        if not alone and len(set(map(len, ranks.values()))) > 1:
            shift, note = _aligned({rank: end[rows] for rank, rows in ranks.items()}, collective)
            notes.append(note)
        for rank, rows in ranks.items():
            number[rows] = np.arange(len(rows)) + shift[rank]
            instance[rows] = known + number[rows]
            known += len(rows) if alone else 0
        known += 0 if alone else max(map(len, ranks.values()))
    shortest = np.full(known, np.iinfo(np.int64).max)
    np.minimum.at(shortest, instance, end - start)
    peers = np.bincount(instance, minlength=known)[instance]
    transfer = shortest[instance]
    frame = operations.assign(
        number=number, instance=instance, peers=peers, transfer_ns=transfer, wait_ns=end - start - transfer
    )
    return frame, notes


def _aligned(ends: dict[object, np.ndarray], collective: str) -> tuple[dict[object, int], str]:
    """Shifts of `number` by rank, where windows were cut differently: those that bring the ends of each together."""
    longest = max(ends.values(), key=len)
    shift = {}
    for rank, mine in ends.items():
        most = len(longest) - len(mine)
        options = range(most + 1) if most < _SHIFTS else (0, most)
        shift[rank] = min(options, key=lambda s, mine=mine: np.median(np.abs(longest[s : s + len(mine)] - mine)))
    counts = ", ".join(f"rank {rank}: {len(mine)}" for rank, mine in ends.items())
    return shift, f"the ranks' windows hold different numbers of {collective} ({counts}): matched by when they end"


def bandwidth(operations: pd.DataFrame) -> list[dict]:
    """The table of collectives: one row a collective, group, dtype and message size, the longest in total first.

    count: operations (what ran on 8 ranks counts once). ranks: of how many the trace is there. total_us: on the
    average rank, waiting included. median_us, p99_us: of one rank's run, waiting included. transfer_us: median of the
    shortest run over the ranks. wait_us: total on the average rank; None where no other rank's trace has it.
    algbw_GBps: message / transfer. busbw_GBps: that times nccl-tests' factor. None where the size is unknown.
    """
    column = {name: operations[name].to_numpy() for name in operations}
    alike: dict[tuple, list[int]] = {}
    for i, key in enumerate(zip(*(column[name].tolist() for name in [*KEY, "name"]), strict=True)):
        alike.setdefault(key if key[0] == "unknown" else key[:-1], []).append(i)
    duration_us = (column["end_ns"] - column["start_ns"]) / 1e3
    rows = []
    for key, at in alike.items():
        first = dict(zip(KEY, key, strict=False))
        size, n, factor = first["message_bytes"], first["group_size"], _BUS.get(first["collective"])
        us, ranks = duration_us[at], len(set(column["rank"][at].tolist()))
        once = np.unique(column["instance"][at], return_index=True)[1]
        transfer = float(np.median(column["transfer_ns"][at][once])) / 1e3
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
                "wait_us": float(column["wait_ns"][at].sum()) / 1e3 / ranks if column["peers"][at].max() > 1 else None,
                "algbw_GBps": algbw,
                "busbw_GBps": algbw * factor(n) if algbw is not None and factor and n else None,
                "source": column["source"][at[0]],
                "kernel": column["name"][at[0]],
            }
        )
    return sorted(rows, key=lambda row: -row["total_us"])

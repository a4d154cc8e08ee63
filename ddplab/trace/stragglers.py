"""Who was late, by how much, why, and which collective waited for it. Needs the traces of two ranks or more."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ddplab.trace.breakdown import Busy
from ddplab.trace.intervals import within

HOLDUPS = ["step", "collective", "group", "number", "message_bytes", "last_rank", "late_us", "waited_us", "cause"]
BY_RANK = ["rank", "lag_us", "worst_us", "worst_step", "collectives", "held_up", "caused_us", "waited_us", "cause"]
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")  # all ranks end at once
_OFFSET_NS = 200_000  # below, different ends may be the network's doing, not the clocks'
_KEYS = ["step", "collective", "group", "number", "message_bytes"]
_EXPLAINED = 1000  # the latest arrivals whose cause is looked for; of more, the rest has none


def clock_offsets(operations: pd.DataFrame) -> dict[object, int]:
    """Nanoseconds by which each rank's clock is ahead of the median rank's, where that is beyond doubt; else empty.

    The ranks of an all-reduce leave it together. Where one rank leaves later than the others, by the same time again
    and again, its clock is what differs.
    """
    together = np.array([name in _TOGETHER for name in operations["collective"].tolist()], bool)
    shared = np.flatnonzero(together & (operations["peers"].to_numpy() > 1))
    if not len(shared):
        return {}
    end, instance = operations["end_ns"].to_numpy()[shared], operations["instance"].to_numpy()[shared]
    order = np.lexsort((end, instance))
    first = np.flatnonzero(np.diff(instance[order], prepend=-1))  # of each instance, in the order of its ends
    count = np.diff(first, append=len(order))
    low, high = (end[order[first + middle]] for middle in ((count - 1) // 2, count // 2))
    at = np.searchsorted(instance[order[first]], instance)
    ahead = end - low[at] - (high - low)[at] / 2  # of the median
    rank_of = operations["rank"].to_numpy()[shared]
    found = {}
    for rank in dict.fromkeys(rank_of.tolist()):
        values = ahead[rank_of == rank]
        offset = float(np.median(values))
        spread = float(np.median(np.abs(values - offset)))
        found[rank] = round(offset) if len(values) > 1 and spread < abs(offset) / 8 else 0
    return found if max(map(abs, found.values())) > _OFFSET_NS else {}


def lateness(operations: pd.DataFrame, offsets: Mapping[object, int]) -> pd.DataFrame:
    """`operations` with `lag_ns` (how long it began after the first rank) and `last` (for it the others waited)."""
    ahead = np.array([offsets.get(rank, 0) for rank in operations["rank"].tolist()], np.int64)
    start, instance = operations["start_ns"].to_numpy() - ahead, operations["instance"].to_numpy()
    first = np.full(instance.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, instance, start)
    order = np.lexsort((-np.arange(len(start)), start, instance))  # in each instance the latest is last
    last = np.zeros(len(start), bool)
    last[order[np.flatnonzero(np.diff(instance[order], append=-1))]] = True
    return operations.assign(lag_ns=start - first[instance], last=last & (operations["peers"].to_numpy() > 1))


def _shared(late: pd.DataFrame, names: list[str]) -> list[dict]:
    """The rows that have peers; `to_dict` takes ten times as long."""
    rows = np.flatnonzero(late["peers"].to_numpy() > 1)
    columns = (late[name].to_numpy()[rows].tolist() for name in names)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def holdups(late: pd.DataFrame, busy: Mapping[object, Busy], steps: Mapping[object, list]) -> list[dict]:
    """One row a matched collective, in time order: who came last, how late, how long the others waited in all, and why.

    cause: what the last rank did longer than the first to arrive, since they left an earlier collective together:
    "compute", "input" (the data loader, copies from the host) or "host" (neither: Python, launches, a lock, a sleep).
    """
    together: dict[int, list[dict]] = {}
    for row in _shared(late, ["instance", "rank", "lag_ns", "wait_ns", "start_ns", "end_ns", "last", *_KEYS]):
        together.setdefault(row["instance"], []).append(row)
    rows, instances = [], []
    for ranks in together.values():
        last = next(row for row in ranks if row["last"])
        first = min(ranks, key=lambda row: row["lag_ns"])
        instances.append(({row["rank"]: row for row in ranks}, last["rank"], first["rank"]))
        rows.append(
            {
                **{key: last[key] for key in _KEYS},
                "last_rank": last["rank"],
                "late_us": last["lag_ns"] / 1e3,
                "waited_us": sum(row["wait_ns"] for row in ranks) / 1e3,
                "cause": None,
            }
        )
    for i in sorted(range(len(rows)), key=lambda i: -rows[i]["late_us"])[:_EXPLAINED]:
        times, last, first = instances[i]
        if last != first:
            began = _together_until(instances, i, last, first, times)
            rows[i]["cause"] = _cause(times, last, first, began, busy, steps)
    return rows


def _together_until(instances: list, i: int, last: object, first: object, times: dict) -> dict[object, int]:
    """When each of the two left the latest collective that both had left before this one began."""
    for before, _, _ in reversed(instances[max(0, i - 64) : i]):
        if all(rank in before and before[rank]["end_ns"] <= times[rank]["start_ns"] for rank in (last, first)):
            return {rank: before[rank]["end_ns"] for rank in (last, first)}
    return {}


def _cause(times: dict, last: object, first: object, began: dict, busy: Mapping, steps: Mapping) -> str:
    spent = {}
    for rank in (last, first):
        high = times[rank]["start_ns"]
        low = began.get(rank)
        if low is None:  # since the step began, or the trace
            low = max([s["start_ns"] for s in steps.get(rank, ()) if s["start_ns"] <= high], default=busy[rank].begin)
            low = min(low, high)
        on = busy[rank]
        compute, input, comm = (int(within(a, low, high)) for a in (on.compute, on.input, on.comm))
        spent[rank] = {"compute": compute, "input": input, "host": max(high - low - compute - input - comm, 0)}
    return max(spent[last], key=lambda what: spent[last][what] - spent[first][what])


def by_rank(late: pd.DataFrame, held: pd.DataFrame, by_step: bool = False) -> list[dict]:
    """One row a rank (and step): how late it was in all, and what it held up; the latest first.

    lag_us: behind the first to arrive, summed over the matched collectives. held_up: collectives that waited for it.
    caused_us: how long the others waited in those, summed over the ranks. waited_us: how long it waited itself.
    cause: of most of the time by which it was last; None if it never was.
    """
    keys = ("step", "rank") if by_step else ("rank",)
    mine: dict[tuple, list[dict]] = {}
    for row in _shared(late, ["rank", "step", "lag_ns", "wait_ns"]):
        mine.setdefault(tuple(row[key] for key in keys), []).append(row)
    guilty: dict[tuple, list[dict]] = {}
    for row in held.to_dict("records"):
        guilty.setdefault((row["step"], row["last_rank"]) if by_step else (row["last_rank"],), []).append(row)
    rows = []
    for key, operations in mine.items():
        caused = guilty.get(key, [])
        worst = max(operations, key=lambda row: row["lag_ns"])
        why: dict[str, float] = {}
        for row in caused:
            if row["cause"]:
                why[row["cause"]] = why.get(row["cause"], 0.0) + row["late_us"]
        rows.append(
            {
                **dict(zip(keys, key, strict=True)),
                "lag_us": sum(row["lag_ns"] for row in operations) / 1e3,
                "worst_us": worst["lag_ns"] / 1e3,
                "worst_step": worst["step"],
                "collectives": len(operations),
                "held_up": len(caused),
                "caused_us": sum(row["waited_us"] for row in caused),
                "waited_us": sum(row["wait_ns"] for row in operations) / 1e3,
                "cause": max(why, key=why.get) if why else None,
            }
        )
    return rows if by_step else sorted(rows, key=lambda row: -row["lag_us"])

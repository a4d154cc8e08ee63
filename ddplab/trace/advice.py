"""What to do about a trace, each piece with the numbers that it rests on. A healthy trace gets none.

Each rule looks for one fault and keeps quiet about anything else: a bucket size that cannot work, overlap that is lost
for another reason, many small messages, a trace that begins in DDP's first iteration or while the ranks still start
up, and collectives whose time is waiting, not transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

MIB = 2**20
# Where a rule begins to speak. Wide of what a healthy job shows: DDP's defaults make buckets of 1 and about 25 MiB,
# and a step has a handful of other collectives.
MANY_BUCKETS, SMALL_BUCKET = 8, 1 * MIB
ONE_BUCKET = 4 * MIB
LATE = 0.9  # of backward
SMALL_MESSAGE, MANY_MESSAGES = 64 * 1024, 16
STARTUP_US, STARTUP_TIMES = 10_000.0, 5
WAITING, WORTH = 0.5, 0.05  # of the time in collectives; of the steps


@dataclass(frozen=True)
class Advice:
    """One piece of advice. kind: its rule. says: what was seen. do: what to change. numbers: by name, with units.

    cost_us: what is at stake in a step of one rank, to order by; an upper bound, not a promise.
    """

    kind: str
    says: str
    do: str
    cost_us: float
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.says} {self.do}"


def advise(buckets: pd.DataFrame, operations: pd.DataFrame, steps: pd.DataFrame) -> list[Advice]:
    """Advice on one job, the most expensive first; an empty list for a healthy one.

    buckets, operations, steps: those of all ranks, as a `TraceReport` has them.
    """
    passes, met = _passes(buckets), _met(operations)
    steady, startup = _steady(passes), list(_startup(met))
    found = [
        *_small_buckets(steady),
        *_nothing_hidden(steady),
        *_first_iteration(passes),
        *_small_messages(operations, steps),
        *startup,
        *_waiting(met.iloc[len(startup) :], steps),
    ]
    return sorted(found, key=lambda a: -a.cost_us)


def _passes(buckets: pd.DataFrame) -> pd.DataFrame:
    """One row a rank and backward pass: count, bytes, median_bytes, exposed_us, backward_us, first_ready_us, ..."""
    columns = ["rank", "iteration"]
    grouped = buckets.groupby(columns, dropna=False)
    duration = buckets["end_us"] - buckets["start_us"]
    return pd.DataFrame(
        {
            "count": grouped.size(),
            "bytes": grouped["message_bytes"].sum(min_count=1),
            "median_bytes": grouped["message_bytes"].median(),
            "exposed_us": grouped["end_us"].max() - grouped["backward_us"].first(),
            "backward_us": grouped["backward_us"].first(),
            "first_ready_us": grouped["ready_us"].min(),
            "each_us": duration.groupby([buckets[c] for c in columns], dropna=False).median(),
            "moving_us": duration.groupby([buckets[c] for c in columns], dropna=False).sum(),
        }
    ).reset_index()


def _steady(passes: pd.DataFrame) -> pd.DataFrame:
    """Without the first pass of each rank where the later ones have other buckets: that is DDP's iteration 0."""
    return passes.drop(index=_initial(passes).index)


def _initial(passes: pd.DataFrame) -> pd.DataFrame:
    """First passes with one bucket that holds what later passes have in several."""
    found = []
    for _, mine in passes.groupby("rank", dropna=False):
        first, later = mine.iloc[0], mine.iloc[1:]
        if len(later) and first["count"] == 1 and (later["count"] > 1).all():
            same = pd.isna(first["bytes"]) or (abs(later["bytes"] / first["bytes"] - 1) < 0.01).all()
            found += [mine.index[0]] if same else []
    return passes.loc[found]


def _typical(steady: pd.DataFrame, bad: pd.Series, by: str) -> pd.Series | None:
    """The pass in the middle of those with a fault, None unless most passes have it."""
    found = steady[bad]
    return _middle(found, by) if len(found) * 2 > len(steady) else None


def _small_buckets(steady: pd.DataFrame) -> Iterator[Advice]:
    bad = (steady["count"] >= MANY_BUCKETS) & (steady["median_bytes"] < SMALL_BUCKET)
    if (one := _typical(steady, bad, "moving_us")) is None:
        return
    yield Advice(
        "small_buckets",
        f"Backward hands over {one['count']:.0f} buckets with a median of {_size(one['median_bytes'])}; each takes "
        f"{one['each_us']:.0f} us, {one['moving_us'] / 1e3:.1f} ms in all.",
        "Raise bucket_cap_mb (25 MiB is the default): every bucket pays the latency of an all-reduce.",
        float(one["moving_us"]),
        {
            "buckets": int(one["count"]),
            "median_bytes": int(one["median_bytes"]),
            "each_us": float(one["each_us"]),
            "moving_ms": float(one["moving_us"]) / 1e3,
        },
    )


def _nothing_hidden(steady: pd.DataFrame) -> Iterator[Advice]:
    """Buckets that are ready when backward is over: because there is one only, or for another reason."""
    late = (steady["first_ready_us"] >= LATE * steady["backward_us"]) & (
        steady["exposed_us"] > 0.1 * steady["backward_us"]
    )
    alone = late & (steady["count"] == 1) & (steady["bytes"] >= ONE_BUCKET)
    if (one := _typical(steady, alone, "exposed_us")) is not None:
        yield Advice(
            "one_bucket",
            f"All gradients are in one bucket of {_size(one['bytes'])}, ready when backward is over: "
            f"{one['exposed_us'] / 1e3:.1f} ms are exposed after {one['backward_us'] / 1e3:.1f} ms of backward.",
            "Lower bucket_cap_mb; a parameter that is larger than the cap stays in one bucket.",
            float(one["exposed_us"]),
            {"bytes": int(one["bytes"]), **_milliseconds(one, "exposed", "backward")},
        )
    if (one := _typical(steady, late & (steady["count"] >= 2), "exposed_us")) is not None:
        yield Advice(
            "overlap_lost",
            f"The first of {one['count']:.0f} buckets is ready {one['first_ready_us'] / 1e3:.1f} ms into a backward of "
            f"{one['backward_us'] / 1e3:.1f} ms, so nothing overlaps: {one['exposed_us'] / 1e3:.1f} ms are exposed.",
            "Something holds all gradients back to the end: a backward compiled into one graph, a hook that collects "
            "them, a first layer with nearly all the work.",
            float(one["exposed_us"]),
            {"buckets": int(one["count"]), **_milliseconds(one, "first_ready", "backward", "exposed")},
        )


def _milliseconds(one: pd.Series, *names: str) -> dict[str, float]:
    return {f"{name}_ms": float(one[f"{name}_us"]) / 1e3 for name in names}


def _first_iteration(passes: pd.DataFrame) -> Iterator[Advice]:
    first = _initial(passes)
    if not len(first):
        return
    one = _middle(first, "exposed_us")
    later = passes[(passes["rank"] == one["rank"]) | pd.isna(one["rank"])].iloc[1:]
    yield Advice(
        "first_iteration",
        f"The trace begins with DDP's first iteration: one bucket of {_size(one['bytes'])} where later ones have "
        f"{later['count'].median():.0f}, and {one['exposed_us'] / 1e3:.1f} ms exposed instead of "
        f"{later['exposed_us'].median() / 1e3:.1f}.",
        "Leave the first two iterations out of every number: dl.capture skips them.",
        max(0.0, float(one["exposed_us"] - later["exposed_us"].median())),
        {"buckets_later": int(later["count"].median()), "exposed_ms": float(one["exposed_us"]) / 1e3},
    )


def _small_messages(operations: pd.DataFrame, steps: pd.DataFrame) -> Iterator[Advice]:
    small = operations[(operations["message_bytes"].fillna(0).astype("int64") - 1).between(0, SMALL_MESSAGE - 1)]
    if not len(small) or not len(steps):
        return
    each = small.assign(us=(small["end_ns"] - small["start_ns"]) / 1e3).groupby(["rank", "step"])["us"]
    spans = steps.set_index(["rank", "step"])["span_ns"] / 1e3
    table = (
        pd.DataFrame({"count": each.size(), "each": each.median(), "total": each.sum()}).reindex(spans.index).fillna(0)
    )
    count, one, total = (float(table[name].median()) for name in ("count", "each", "total"))
    span = float(spans.median())
    if count < MANY_MESSAGES or total < 0.02 * span:
        return
    yield Advice(
        "small_messages",
        f"A step has {count:.0f} collectives of at most {_size(SMALL_MESSAGE)}; each takes {one:.0f} us, together "
        f"{total / 1e3:.2f} ms of a step of {span / 1e3:.1f} ms.",
        "Put them into one: small messages cost latency, not bytes. Stack metrics and reduce them every few steps; "
        "gradients belong into buckets.",
        total,
        {"messages": int(count), "each_us": one, "total_ms": total / 1e3, "step_ms": span / 1e3},
    )


def _startup(met: pd.DataFrame) -> Iterator[Advice]:
    """The first collective of the trace waits far longer than the others do: the ranks had not met yet."""
    if len(met) < 4:
        return
    first, later = met.iloc[0], float(met["wait_us"].iloc[1:].max())
    if first["wait_us"] < STARTUP_US or first["wait_us"] < STARTUP_TIMES * later:
        return
    yield Advice(
        "unsynchronised_start",
        f"{first['late']} came {first['wait_us'] / 1e3:.1f} ms late to the first collective ({first['collective']}); "
        f"no later one waits more than {later / 1e3:.2f} ms. The ranks had not started together.",
        "Do not count the first step of this trace, or let the ranks meet (dist.barrier()) before the loop begins.",
        float(first["wait_us"]),
        {"first_wait_ms": float(first["wait_us"]) / 1e3, "later_wait_ms": later / 1e3, "late": first["late"]},
    )


def _waiting(met: pd.DataFrame, steps: pd.DataFrame) -> Iterator[Advice]:
    """Most of the time in collectives is waiting for a late rank."""
    if len(met) < 3:
        return
    waited, moved = float(met["mean_wait_us"].sum()), float(met["transfer_us"].sum())
    span = float(steps.groupby("rank", dropna=False)["span_ns"].sum().median()) / 1e3 if len(steps) else 0.0
    if waited < WAITING * (waited + moved) or waited < WORTH * span:
        return
    late = met.groupby("late")["wait_us"].sum().idxmax()
    last_in = int((met["late"] == late).sum())
    yield Advice(
        "waiting",
        f"Of the {(waited + moved) / 1e3:.1f} ms that a rank spends in collectives, {waited / 1e3:.1f} are waiting for "
        f"the last one to arrive; {late} was last in {last_in} of {len(met)}.",
        "The network is not the cause. Look at what that rank does before: its input, its share of the work, its clock "
        "rate.",
        waited,
        {
            "waiting_ms": waited / 1e3,
            "transfer_ms": moved / 1e3,
            "late": late,
            "last_in": last_in,
            "collectives": len(met),
        },
    )


def _met(operations: pd.DataFrame) -> pd.DataFrame:
    """One row a collective that several ranks' traces have, in time order: wait_us (longest), mean_wait_us, late."""
    several = operations[operations["peers"] > 1]
    each = several.groupby("instance", sort=False)
    last = several.loc[each["lag_ns"].idxmax()]
    found = pd.DataFrame(
        {
            "collective": last["collective"].to_numpy(),
            "start_ns": each["start_ns"].min().to_numpy(),
            "wait_us": each["wait_ns"].max().to_numpy() / 1e3,
            "mean_wait_us": each["wait_ns"].mean().to_numpy() / 1e3,
            "transfer_us": last["transfer_ns"].to_numpy() / 1e3,
            "late": [f"rank {rank}" for rank in last["rank"]],
        }
    )
    return found.sort_values("start_ns", ignore_index=True)


def _middle(rows: pd.DataFrame, by: str) -> pd.Series:
    """The row in the middle when sorted: numbers that belong together, not medians of each."""
    return rows.sort_values(by).iloc[len(rows) // 2]


def _size(nbytes: Any) -> str:
    if pd.isna(nbytes):
        return "unknown size"
    return (
        f"{nbytes / MIB:.1f} MiB"
        if nbytes >= MIB
        else f"{nbytes / 1024:.0f} KiB"
        if nbytes >= 1024
        else f"{nbytes:.0f} B"
    )

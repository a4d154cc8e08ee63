"""The report on a run: what the traces of its ranks say, as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ddplab._files import Draft, made_folder
from ddplab.trace import breakdown, buckets, collectives, stragglers
from ddplab.trace.advice import Advice, advise
from ddplab.trace.columns import RankTrace
from ddplab.trace.operations import operations

TABLES = ("breakdown", "overlap", "steps", "collectives", "stragglers", "lateness", "holdups", "waits", "buckets")


class TraceReport:
    """What `analyze_trace` found. Every table is a pandas.DataFrame with units in its column names; unknown is None.

    breakdown    a row a rank: five parts that sum to `span_ns` exactly
    overlap      a row a rank: communication, how much of it compute hid; `overlap_pct` is None without communication
    steps        a row a rank and ProfilerStep: the five parts, `exposed_pct` of the step, time spent on input
    collectives  a row a collective, group, dtype and size: times, and bandwidth by the minimum over ranks
    stragglers   a row a rank, the latest first: how late in all, what it held up, and why; empty with one rank
    lateness     the same by step
    holdups      a row a matched collective: who came last, how late, how long the others waited, why
    waits        a row a matched collective and rank: waiting split from transfer
    buckets      a row a rank, backward pass and bucket of DDP: ready, start, end, what backward did not hide
    advice       what to do, with the numbers behind it (`Advice`); empty for a healthy run
    notes        what was lost, guessed or left out, in words
    traces       the ranks' events (`RankTrace`); `busy`, their sets of time; `operations`, each communication kernel
    """

    def __init__(self, traces: Sequence[RankTrace], notes: Sequence[str] = ()):
        self.traces = list(traces)
        self.ranks = [trace.rank for trace in self.traces]
        self.notes = list(notes)
        for trace in self.traces:
            self.notes += [f"{trace.path}: {note}" for note in trace.notes]
        self.busy = [breakdown.busy(trace) for trace in self.traces]
        self._steps = [breakdown.steps(trace, on) for trace, on in zip(self.traces, self.busy, strict=True)]
        found = [operations(trace) for trace in self.traces]
        ranks, numbers = [], []
        for trace, steps, frame in zip(self.traces, self._steps, found, strict=True):
            ranks += [trace.rank] * len(frame)
            numbers += breakdown.step_of(trace, steps, frame)
        every = pd.concat(found, ignore_index=True)
        every.insert(0, "rank", pd.Series(ranks, dtype=object))
        every.insert(1, "step", pd.Series(numbers, dtype=object))
        every, notes = collectives.matched(every)
        self.notes += notes
        offsets = stragglers.clock_offsets(every)
        if offsets:
            apart = ", ".join(f"rank {rank} {ns / 1e6:+.3f} ms" for rank, ns in offsets.items() if ns)
            self.notes.append(f"the ranks' clocks differ ({apart}): set by the ends of their collectives")
        self.operations = stragglers.lateness(every, offsets)

    @cached_property
    def breakdown(self) -> pd.DataFrame:
        rows = [
            {"rank": trace.rank, "device": trace.device, **on.parts(), "file": trace.path}
            for trace, on in zip(self.traces, self.busy, strict=True)
        ]
        return _frame(rows, ["rank", "device", *breakdown.PARTS, "file"])

    @cached_property
    def overlap(self) -> pd.DataFrame:
        rows = []
        for row in self.breakdown.to_dict("records"):
            hidden, exposed = row["overlapped_ns"], row["exposed_comm_ns"]
            comm = hidden + exposed
            rows.append(
                {
                    "rank": row["rank"],
                    "comm_ns": comm,
                    "overlapped_ns": hidden,
                    "exposed_comm_ns": exposed,
                    "overlap_pct": 100 * hidden / comm if comm else None,
                }
            )
        return _frame(rows, ["rank", "comm_ns", "overlapped_ns", "exposed_comm_ns", "overlap_pct"])

    @cached_property
    def steps(self) -> pd.DataFrame:
        rows = []
        for trace, steps in zip(self.traces, self._steps, strict=True):
            for step in steps:
                span, exposed = step["span_ns"], step["exposed_comm_ns"]
                rows.append({"rank": trace.rank, **step, "exposed_pct": 100 * exposed / span if span else None})
        names = ["rank", "step", "start_ns", *breakdown.PARTS, "annotated_ns", "input_ns", "exposed_pct"]
        return _frame(rows, names)

    @cached_property
    def collectives(self) -> pd.DataFrame:
        return _frame(collectives.bandwidth(self.operations), collectives.COLUMNS)

    @cached_property
    def waits(self) -> pd.DataFrame:
        shared = self.operations[self.operations["peers"] > 1].sort_values(["instance", "start_ns"], kind="stable")
        names = ["step", "collective", "group", "number", "message_bytes", "rank"]
        frame = shared[names].astype(object).where(shared[names].notna(), None)
        for name in ("lag_ns", "transfer_ns", "wait_ns"):
            frame[name.replace("_ns", "_us")] = shared[name] / 1e3
        return frame.assign(last=shared["last"]).reset_index(drop=True)

    @cached_property
    def holdups(self) -> pd.DataFrame:
        busy = dict(zip(self.ranks, self.busy, strict=True))
        steps = dict(zip(self.ranks, self._steps, strict=True))
        return _frame(stragglers.holdups(self.operations, busy, steps), stragglers.HOLDUPS)

    @cached_property
    def stragglers(self) -> pd.DataFrame:
        return _frame(stragglers.by_rank(self.operations, self.holdups), stragglers.BY_RANK)

    @cached_property
    def lateness(self) -> pd.DataFrame:
        rows = stragglers.by_rank(self.operations, self.holdups, by_step=True)
        return _frame(rows, ["step", *(name for name in stragglers.BY_RANK if name != "worst_step")])

    @cached_property
    def buckets(self) -> pd.DataFrame:
        every = [buckets.buckets(trace, self._operations_of(trace)) for trace in self.traces]
        return pd.concat(every, ignore_index=True)

    @cached_property
    def advice(self) -> list[Advice]:
        return advise(self.buckets, self.operations, self.steps)

    def _operations_of(self, trace: RankTrace) -> pd.DataFrame:
        rows = self.operations["rank"].isna() if trace.rank is None else self.operations["rank"] == trace.rank
        return self.operations[rows].sort_values("start_ns", kind="stable", ignore_index=True)

    def to_html(self, title: str = "Trace report") -> str:
        """The report as one self-contained page: tables, lanes, advice. `ddplab.trace.page.write_page` writes it."""
        from ddplab.trace.page import page

        return page(self, title)

    def to_dict(self) -> dict[str, Any]:
        """All tables as lists of plain rows, and the notes."""
        tables = {name: getattr(self, name).to_dict("records") for name in TABLES}
        advice = [asdict(piece) for piece in self.advice]
        return {"ranks": self.ranks, **tables, "advice": advice, "notes": self.notes}

    def to_json(self) -> str:
        """`to_dict` as JSON text; what is not known is null."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, default=lambda value: value.item())

    def to_csv(self, folder: str | Path) -> list[Path]:
        """Write each table to `folder`/<name>.csv and return the paths; all of them are written, or none.

        The folder is made if need be. OSError in words where one cannot be written.
        """
        with made_folder(folder) as place, ExitStack() as stack:
            paths = [place / f"{name}.csv" for name in TABLES]
            drafts = [stack.enter_context(Draft(path)) for path in paths]
            for name, draft in zip(TABLES, drafts, strict=True):
                draft.write(getattr(self, name).to_csv(index=False))
        return paths

    def __str__(self) -> str:
        from ddplab.trace.text import text

        return text(self)

    def __repr__(self) -> str:
        return f"TraceReport of {len(self.traces)} ranks: print it, or see .{' .'.join(TABLES)}"


def _frame(rows: list[dict], columns: Sequence[str]) -> pd.DataFrame:
    """A table in which an unknown value is None, never NaN."""
    table = {}
    for name in columns:
        values = [row[name] for row in rows]
        missing = any(value is None for value in values)
        table[name] = pd.Series(values, dtype=object if missing or not rows else None)
    return pd.DataFrame(table)

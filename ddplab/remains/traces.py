"""Profiler traces among the remains: in a job that only crawls, they show who came last, and what for.

A trace is recognised by its content, as every file is. It says nothing of a hang: the profiler writes when its window
closes, and in a job that hangs it never does.
"""

from __future__ import annotations

import gzip
import re
import zlib
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING

from ddplab.remains.diverge import Finding

if TYPE_CHECKING:
    from ddplab.trace import TraceReport

# An object with a list of events, or the bare list.
_KINETO = re.compile(rb'"(traceEvents|schemaVersion|distributedInfo)"\s*:|\A\s*\[\s*\{[^\[\]]*"ph"\s*:')
_HEAD = 4096
_SHARE = 0.2  # of the traced time that the others must have lost on average
_OWN = 0.75  # of all waiting that must be for this rank
_CHANCE = 1e-2  # so seldom may any rank come last so often if all were alike


def is_trace(path: Path) -> bool:
    """Does the file begin as the profiler's traces do? Packed ones too. False where it cannot be read."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            return bool(_KINETO.search(file.read(_HEAD)))
    except (OSError, EOFError, zlib.error):
        return False


@dataclass
class Traces:
    """What the traces say. finding: the rank for which the others waited, or None. notes: what was guessed, or odd.

    ranks: of how many ranks there is a trace that could be read.
    """

    finding: Finding | None = None
    ranks: int = 0
    notes: tuple[str, ...] = ()


def read_traces(paths: list[Path], lost: list[str]) -> Traces:
    """Did the others wait for one rank a good part of the traced time? Files that cannot be read go to `lost`."""
    from ddplab.trace import TraceError, TraceReport, read_trace  # numpy, which a job without traces need not load
    from ddplab.trace.errors import REMEDY
    from ddplab.trace.select import one_per_rank

    traces = []
    for path in paths:
        try:
            traces.append(read_trace(path))
        except TraceError as error:
            lost.append(str(error).replace(REMEDY, "; `ddplab trace --partial` reads what is whole"))
    if not traces:
        return Traces()
    traces, notes = one_per_rank(traces)
    report = TraceReport(traces, notes)
    return Traces(straggler(report), len(traces), tuple(report.notes))


def straggler(report: TraceReport) -> Finding | None:
    """The rank for which the others waited a good part of the traced time, or None."""
    table = report.stragglers
    if table.empty or not table.caused_us.sum():
        return None
    worst = table.loc[table.caused_us.idxmax()]
    ranks, span_us = len(table), float(report.breakdown.span_ns.max()) / 1e3
    share = worst.caused_us / (ranks - 1) / span_us
    often, times = int(worst.held_up), int(table.held_up.sum())
    if share < _SHARE or worst.caused_us < _OWN * table.caused_us.sum() or _chance(often, times, ranks) > _CHANCE:
        return None
    rank = int(worst["rank"])
    held = report.holdups[report.holdups.last_rank == worst["rank"]]
    most = held.loc[held.waited_us.idxmax()]
    step = "" if most.step is None or most.step != most.step else f" in step {int(most.step)}"
    lines = (
        f"traces of {ranks} ranks: rank {rank} was the last to come to {often} of {times} collectives, and the others "
        f"lost {share:.0%} of the {span_us / 1e3:.1f} ms by it",
        f"most of it at {most.collective}{step}",
    )
    if isinstance(worst.cause, str) and worst.cause:
        lines += (f"what made it late: {worst.cause}; `ddplab trace` shows the whole report",)
    return Finding("slow_rank", (rank,), None, lines)


def _chance(often: int, times: int, ranks: int) -> float:
    """At most so probable: of `ranks` that are alike, any comes last `often` or more of `times` times."""
    one = sum(comb(times, k) * (1 / ranks) ** k * (1 - 1 / ranks) ** (times - k) for k in range(often, times + 1))
    return ranks * one

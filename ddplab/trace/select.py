"""Which trace is which rank: numbers for those that do not say, one file for each, and whether all are of one run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ddplab.trace.columns import RankTrace

_NAMED = re.compile(r"(?:rank|worker)[-_.]?(\d+)", re.IGNORECASE)


def one_per_rank(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], list[str]]:
    """(traces in rank order, notes). A single trace may leave its rank open; several are numbered."""
    notes = []
    if len(traces) > 1 and any(trace.rank is None for trace in traces):
        notes.append(_number(traces))
    by_rank: dict[int | None, RankTrace] = {}
    for trace in traces:
        if trace.rank in by_rank:
            notes.append(
                f"rank {trace.rank} is in two files: {by_rank[trace.rank].path} is left out, {trace.path} counts"
            )
        by_rank[trace.rank] = trace
    kept = [by_rank[rank] for rank in sorted(by_rank, key=lambda rank: -1 if rank is None else rank)]
    sizes = {trace.world_size for trace in kept} - {None}
    size = max(sizes, default=len(kept))
    if len(sizes) > 1:
        notes.append(f"the traces are of jobs of {', '.join(map(str, sorted(sizes)))} ranks: not of one run")
    elif len(kept) < size:
        notes.append(f"traces of {len(kept)} of {size} ranks: waiting for the others cannot be told from transfer")
    return kept, notes


def _number(traces: Sequence[RankTrace]) -> str:
    """Give every trace a rank: what it says, else its file's name, else the next free number."""
    unknown = [trace for trace in traces if trace.rank is None]
    named = [_NAMED.search(Path(trace.path).name) for trace in unknown]
    if all(named):
        for trace, found in zip(unknown, named, strict=True):
            trace.rank = int(found[1])
        return "ranks taken from the files' names: the traces do not tell"
    taken = {trace.rank for trace in traces}
    free = (number for number in range(len(traces) + len(taken)) if number not in taken)
    for trace in unknown:
        trace.rank = next(free)
    return "ranks numbered in the order of the files: the traces do not tell"

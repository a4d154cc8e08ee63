"""The flight recorders of a job, one dump a rank, as plain rows: `ddplab.flight` without its tables.

A table of 27 columns costs more than all the rest for a small dump, and nothing here works by column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddplab._flightrows import row, whole
from ddplab.flight import FlightError, _groups, _last_ns, _rank_of, read_dump


@dataclass
class Recorder:
    """One rank's recorder. rows: as in `ddplab._flightrows`, with pg_id. groups: (desc, global ranks) by name."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    last_ns: int = -1


def read_recorders(paths: Iterable[Path], lost: list[str]) -> dict[int, Recorder]:
    """By rank; of two dumps of one rank the later. What cannot be read is added to `lost`, a sentence each."""
    found: dict[int, Recorder] = {}
    for path in paths:
        try:
            dump = read_dump(path)
        except FlightError as problem:
            lost.append(str(problem))
            continue
        rank = _rank_of(path, dump)
        if rank is None:
            lost.append(f"{path.name}: which rank is it? There is no number in the file's name")
            continue
        one = Recorder(path, groups=_groups(dump), last_ns=_last_ns(dump))
        bad = 0
        for entry in dump.get("entries") or []:
            try:
                one.rows.append({**row(entry, one.groups), "pg_id": whole(entry.get("pg_id"))})
            except (TypeError, ValueError, OverflowError):
                bad += 1
        if bad:
            lost.append(f"{path.name}: {bad} entries make no sense and were left out")
        if rank in found:
            older, newer = sorted((found[rank], one), key=lambda recorder: recorder.last_ns)
            lost.append(f"rank {rank} has two dumps; {newer.path.name} is the later, {older.path.name} is left out")
            one = newer
        found[rank] = one
    return found

"""The flight recorders of a job, one dump a rank, as plain rows: `ddplab.flight` without its tables.

A table of 27 columns costs more than all the rest for a small dump, and nothing here works by column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddplab.flight import entry_rows, groups_of, latest_dumps


@dataclass
class Recorder:
    """One rank's recorder. rows: as in `ddplab._flightrows`, with pg_id. groups: (desc, global ranks) by name."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)


def read_recorders(paths: Iterable[Path], lost: list[str]) -> dict[int, Recorder]:
    """By rank; of two dumps of one rank the later. What cannot be read is added to `lost`, a sentence each."""
    found: dict[int, Recorder] = {}
    for rank, (path, dump) in latest_dumps(paths, lost).items():
        if rank is None:
            lost.append(f"{path.name}: which rank is it? There is no number in the file's name")
            continue
        groups = groups_of(dump)
        found[rank] = Recorder(entry_rows(path, dump, groups, lost), groups)
    return found

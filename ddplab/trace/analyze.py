"""From trace files to a report."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ddplab.trace.errors import NotATrace, TraceError
from ddplab.trace.find import find_traces
from ddplab.trace.read import read_trace
from ddplab.trace.select import one_per_rank

if TYPE_CHECKING:
    from ddplab.trace.report import TraceReport


def analyze_trace(
    paths: str | Path | Iterable[str | Path],
    *,
    comm: str | re.Pattern | None = None,
    partial: bool = False,
) -> TraceReport:
    """Read the profiler traces of one run, of one rank or of many, and report where the time went.

    paths: files (.json, .json.gz), folders that hold them, or a list of these. One file is one rank.
    comm: a regular expression, searched in kernel names: kernels of yours that communicate (DeepEP, nvshmem, oneCCL).
    partial: read what is whole of a file that is damaged or ends early, and say in `.notes` what was lost.
    TraceError names the file, line and column of what cannot be read.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    paths = list(paths)
    files, notes = find_traces(paths)
    traces = []
    for file, named in files.items():
        try:
            traces.append(read_trace(file, comm=comm, partial=partial))
        except NotATrace as error:
            if named or len(files) == 1:
                raise
            notes.append(f"left out: {error}")
    if not traces:
        raise TraceError(paths[0], f'no trace among {len(files)} JSON files: none has a list "traceEvents"')
    traces, more = one_per_rank(traces)
    from ddplab.trace.report import TraceReport  # with pandas, into the room that reading has left

    return TraceReport(traces, notes + more)

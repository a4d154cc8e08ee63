"""Read profiler traces (Kineto's Chrome traces) of one or many ranks and say where the time went.

`analyze_trace(paths)` gives a `TraceReport`. Below it, `read_trace(path)` gives one rank's events as numpy columns, a
`RankTrace`, that everything else works on. All times are int64 nanoseconds since the epoch (of the recording's own
clock where the file has no `baseTimeNanoseconds`); a trace's microseconds are converted without rounding. Rows of each
table are sorted by `start_ns`.

    table   rows                                      columns beside start_ns, end_ns (int64)
    gpu     kernels, memory copies and sets           kind int8: COMPUTE, COMM or MEMORY; name, thread int32;
                                                      launch_ns int64, launch_thread int32: the runtime call that
                                                      started it (-1: not in the trace); message int32 (-1: none);
                                                      correlation int64 (-1: none)
    cpu     operators (aten::…, autograd::…, c10d::…) name, thread int32
    marks   annotations: ProfilerStep#…, nccl:…,      name, thread int32; gpu bool (drawn on the device's timeline,
            gloo:…, record_function, data loader      describes kernels again); message int32 (-1: none)

`name` indexes `trace.names` (text), `thread` indexes `trace.threads` ((pid, tid) as text), `message` indexes
`trace.messages` (`Message`: collective, elements, dtype, group). On a GPU, `thread` of a kernel tells its stream.
Synchronisation events, flows and Python frames are not kept.
"""

from __future__ import annotations

import importlib
from typing import Any

# public name -> the module of this folder that defines it; loaded on first use, so that a rank that only records
# a trace does not load what reads one
_HOME = {
    **dict.fromkeys(("COMM", "COMPUTE", "MEMORY", "Message", "RankTrace", "Table"), "columns"),
    "TraceReport": "report",
    "analyze_trace": "analyze",
    "TraceError": "errors",
    "read_trace": "read",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ddplab.trace' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddplab.trace.{_HOME[name]}"), name)

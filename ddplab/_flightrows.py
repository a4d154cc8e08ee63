"""One entry of torch's flight recorder as one row of a table.

Two facts decide how to read the state. NCCL's entries carry events, so "scheduled", "started" and "completed" mean
what they say, and an entry that is retired without being completed has timed out. gloo's carry none: its state is
"scheduled" for ever, and "retired" is the only sign that the call is over.
"""

from __future__ import annotations

import math
import re
from typing import Any

# column -> dtype
COLUMNS = {
    "record": "Int64",  # number of the entry in this rank's recorder
    "group": "object",  # name of the process group
    "group_desc": "object",
    "ranks": "object",  # its global ranks, where the dump knows them, else None
    "seq": "Int64",  # the group's sequence number: of collectives, or of point-to-point calls
    "op": "Int64",  # counts calls inside a coalesced group, too
    "p2p": "bool",
    "backend": "object",  # "nccl", "gloo", ...
    "collective": "object",  # "all_reduce", "broadcast", "send", ...
    "src": "Int64",  # of send and recv, ranks in the group
    "dst": "Int64",
    "in_sizes": "object",  # tuple of shapes
    "in_dtypes": "object",  # tuple of names, as torch's ScalarType: "Float", "Half", ...
    "out_sizes": "object",
    "out_dtypes": "object",
    "in_bytes": "Int64",
    "out_bytes": "Int64",
    "state": "object",  # as torch says
    "done": "bool",  # it is over, as far as this backend can tell
    "retired": "bool",
    "created_ns": "Int64",  # since 1970: the call was enqueued
    "started_ns": "Int64",  # the watchdog noticed that it had started, NCCL only
    "completed_ns": "Int64",
    "duration_ms": "float64",  # NCCL with TORCH_NCCL_ENABLE_TIMING=1, else NaN
    "timeout_ms": "Int64",
    "thread": "object",
    "frames": "object",  # tuple of "function at file:line", innermost first; empty in torch's own JSON
}

_BYTES = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Short": 2, "Int": 4, "Long": 8, "Bool": 1,
    "UInt16": 2, "UInt32": 4, "UInt64": 8, "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1, "Float8_e8m0fnu": 1,
}  # fmt: skip
_NAME = re.compile(r"(?:(\w+):)?(\w+)(?:\s+(\d{1,9})\s*(->|<-)\s*(\d{1,9}))?")
_MOST = 4096  # tensors of one call, and frames of one stack


def row(entry: Any, groups: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """The row of one entry. groups: (desc, ranks) by group name. TypeError or ValueError if it makes no sense."""
    name = entry["profiling_name"] if isinstance(entry, dict) and "profiling_name" in entry else None
    match = _NAME.match(name) if isinstance(name, str) else None
    if not match:
        raise ValueError("an entry needs a profiling_name")
    backend, collective, first, arrow, second = match.groups()
    here, there = (int(first), int(second)) if arrow else (None, None)
    group, desc = _group(entry.get("process_group"))
    p2p = bool(entry.get("is_p2p", collective in ("send", "recv")))
    seq = entry.get("p2p_seq_id") if p2p else entry.get("collective_seq_id", entry.get("seq_id"))
    sides = {}
    for side, key in (("in", "input"), ("out", "output")):
        sizes, dtypes = _shapes(entry.get(f"{key}_sizes")), _names(entry.get(f"{key}_dtypes"))
        sides |= {f"{side}_sizes": sizes, f"{side}_dtypes": dtypes, f"{side}_bytes": _nbytes(sizes, dtypes)}
    state, retired = text(entry.get("state"), 40) or "unknown", entry.get("retired") is True
    return {
        "record": whole(entry.get("record_id")),
        "group": group,
        "group_desc": desc,
        "ranks": groups[group][1] if group in groups else None,
        "seq": whole(seq),
        "op": whole(entry.get("op_id")),
        "p2p": p2p,
        "backend": backend or "",
        "collective": collective,
        "src": here if arrow == "->" else there,
        "dst": there if arrow == "->" else here,
        **sides,
        "state": state,
        "done": state == "completed" or (retired and backend == "gloo"),
        "retired": retired,
        "created_ns": whole(entry.get("time_created_ns")),
        "started_ns": whole(entry.get("time_discovered_started_ns")) or None,  # JSON writes 0 for "not yet"
        "completed_ns": whole(entry.get("time_discovered_completed_ns")) or None,
        "duration_ms": _float(entry.get("duration_ms")),
        "timeout_ms": whole(entry.get("timeout_ms")),
        "thread": text(entry.get("thread_name"), 40),
        "frames": _frames(entry.get("frames")),
    }


def _group(value: Any) -> tuple[str, str]:
    parts = list(value)[:2] if isinstance(value, (list, tuple)) else [value]
    name, desc = (text(part) for part in (*parts, None, None)[:2])
    return name, desc


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes in a list of lists; a single flat shape, as early versions wrote, counts as one."""
    if not isinstance(value, (list, tuple)):
        return ()
    if value and all(_is_size(n) for n in value):
        value = [value]
    return tuple(
        tuple(int(n) for n in one[:64] if _is_size(n)) for one in value[:_MOST] if isinstance(one, (list, tuple))
    )


def _is_size(n: Any) -> bool:
    return isinstance(n, int) and 0 <= n < 2**50


def _names(value: Any) -> tuple[str, ...]:
    return tuple(text(n, 40) for n in value[:_MOST] if isinstance(n, str)) if isinstance(value, (list, tuple)) else ()


def _nbytes(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> int | None:
    """Bytes of all tensors; None where a dtype is not known. One dtype for several tensors holds for all."""
    if len(dtypes) == 1:
        dtypes = dtypes * len(shapes)
    if len(dtypes) != len(shapes) or any(name not in _BYTES for name in dtypes):
        return None if shapes else 0
    total = sum(math.prod(shape) * _BYTES[name] for shape, name in zip(shapes, dtypes, strict=True))
    return total if total < 2**62 else None


def _frames(value: Any) -> tuple[str, ...]:
    found = []
    for frame in value[:_MOST] if isinstance(value, (list, tuple)) else ():
        if isinstance(frame, dict):
            found.append(f"{text(frame.get('name'))} at {text(frame.get('filename'), 400)}:{whole(frame.get('line'))}")
    return tuple(found)


def text(value: Any, most: int = 200) -> str:
    """Text and small numbers as they are; anything else, which a broken dump may hold, as nothing."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18:
        value = str(value)
    return value[:most] if isinstance(value, str) else ""


def whole(value: Any) -> int | None:
    """A number of 64 bits, also where JSON has it as text; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else math.nan

"""NCCL Inspector's logs: every collective of a running job with its size, its time and its bandwidth.

The Inspector is a profiler plugin of NCCL (2.28 on): NCCL_PROFILER_PLUGIN=…/libnccl-profiler-inspector.so with
NCCL_INSPECTOR_ENABLE=1 writes <host>-pid<pid>.log below NCCL_INSPECTOR_DUMP_DIR, one JSON object a line. Formats 4.0
(each line carries rank and communicator) to 4.4 (a `dump_stats` line carries them for the lines that follow) are read;
fields as in plugins/profiler/inspector/inspector_json.cc of NCCL.

    log = read_inspector("nccl-inspector-1234/")
    log.table                            # one row an operation and rank
    log.collectives                      # one row a kind, size and group, bandwidth by the minimum over ranks
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplab._files import named_files, open_to_read, words

if TYPE_CHECKING:
    import pandas as pd

# column of the table -> dtype
COLUMNS = {
    "comm": "object",  # NCCL's hash of the communicator
    "comm_name": "object",  # torch: the process group; "" where NCCL was told none
    "rank": "Int64",  # in this communicator
    "ranks": "Int64",
    "nodes": "Int64",
    "host": "object",
    "pid": "Int64",
    "collective": "object",  # "all_reduce", "reduce_scatter", "send", ...
    "seq": "Int64",  # NCCL counts each kind of operation of a communicator by itself
    "peer": "Int64",  # of send and recv
    "message_B": "Int64",  # of one rank: for all_gather what it sends, for reduce_scatter what it gets
    "time_us": "float64",
    "timing": "object",  # "kernel_gpu", "kernel_cpu" or "collective_cpu": who held the clock
    "algorithm": "object",  # from format 4.1 on, else ""
    "protocol": "object",
    "algbw_GBps": "float64",
    "busbw_GBps": "float64",
    "written_us": "Int64",  # since 1970: the batch with this record was written
}
_SUFFIXES = re.compile(r"\.(log|jsonl|json)(\.gz)?$")
_RECORDS = ("coll_perf", "p2p_perf", "dump_stats", "proxy_trace")


class InspectorError(ValueError):
    """No log could be read; the message names the file and says why."""


@dataclass(frozen=True)
class InspectorLog:
    """table: one row an operation and rank, columns as in COLUMNS.  notes: what was lost, a sentence each."""

    table: pd.DataFrame
    notes: tuple[str, ...]

    @property
    def collectives(self) -> pd.DataFrame:
        """One row a kind of operation, size and group, the one that took longest in all first.

        collective, message_B, ranks, nodes, count (operations, not rows), time_us and busbw_GBps (median over
        operations of the fastest rank's: a rank that came early also counts its waiting), wait_us (median of what the
        slowest rank took longer), late_rank (the rank that was the fastest most often: the others waited for it; None
        where only one rank has logs), total_ms (of the fastest rank).
        """
        import pandas as pd

        columns = ["collective", "message_B", "ranks", "nodes", "count", "time_us", "busbw_GBps", "wait_us"]
        rows = []
        table = self.table[self.table.time_us > 0]
        for key, same in table.groupby(["collective", "message_B", "ranks", "nodes"], dropna=False, sort=False):
            each = same.groupby(["comm", "comm_name", "seq", "peer"], dropna=False, sort=False)
            fastest = same.loc[each.time_us.idxmin()]
            spread = each.time_us.agg("max") - each.time_us.agg("min")
            late = fastest["rank"].mode() if same["rank"].nunique() > 1 else []
            numbers = (len(fastest), fastest.time_us.median(), fastest.busbw_GBps.median(), spread.median())
            total = fastest.time_us.sum() / 1e3
            rows.append((*key, *numbers, int(late[0]) if len(late) else None, total))
        found = pd.DataFrame(rows, columns=[*columns, "late_rank", "total_ms"])
        return found.astype({"late_rank": "Int64"}).sort_values("total_ms", ascending=False, ignore_index=True)


def read_inspector(paths: str | Path | Iterable[str | Path]) -> InspectorLog:
    """Read logs of NCCL Inspector: files, or a folder with all of a job's.

    .log, .json and .jsonl, gzipped or not; in a folder other files are left alone. Lines that are torn or make no
    sense are counted in `notes`, with the first place. InspectorError if no line could be read, FileNotFoundError for
    a path that does not exist. The Inspector's Prometheus files are another format and are not read.
    """
    import pandas as pd

    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    notes: list[str] = []
    logs = named_files(
        paths, lambda p: bool(_SUFFIXES.search(p.name)) and is_inspector(p), "log of NCCL Inspector", InspectorError
    )
    for path in logs:
        read = _Reader(path)
        try:
            for row in read.rows():
                for name, value in row.items():
                    columns[name].append(value)
        except (OSError, EOFError, zlib.error) as problem:
            said = words(problem) if isinstance(problem, OSError) else str(problem)
            notes.append(f"{path}: {said}" + ("; what stands before that was read" if read.count else ""))
        notes += read.notes()
    if not columns["rank"]:
        raise InspectorError("; ".join(notes) or f"{paths}: no operation in the log of NCCL Inspector")
    table = pd.DataFrame({name: pd.Series(columns[name], dtype=dtype) for name, dtype in COLUMNS.items()})
    return InspectorLog(table, tuple(notes))


def is_inspector(path: str | Path) -> bool:
    """Does the file begin like a log of NCCL Inspector?"""
    try:
        with _open(Path(path)) as file:
            head = file.readline(4096).lstrip()
    except (OSError, EOFError, zlib.error):
        return False
    return head.startswith(b"{") and any(f'"{key}"'.encode() in head for key in (*_RECORDS, "header"))


class _Reader:
    """The rows of one file, and what was not readable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = self.bad = self.dropped = 0
        self.first_bad = ""

    def rows(self) -> Iterator[dict[str, Any]]:
        header: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        with _open(self.path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError("no JSON object")
                    header, metadata = _dict(record, "header") or header, _dict(record, "metadata") or metadata
                    row = self._row(record, header, metadata)
                except (ValueError, RecursionError) as problem:
                    self.bad += 1
                    self.first_bad = self.first_bad or f"line {number}: {_why(problem, line)}"
                    continue
                if row is not None:
                    self.count += 1
                    yield row

    def _row(self, record: dict[str, Any], header: dict[str, Any], about: dict[str, Any]) -> dict[str, Any] | None:
        """The operation in a record; None for lines that hold none."""
        for kind in ("coll", "p2p"):
            body = _dict(record, f"{kind}_perf")
            if body is None:
                continue
            name, size, time = body.get(kind), body.get(f"{kind}_msg_size_bytes"), body.get(f"{kind}_exec_time_us")
            if not isinstance(name, str) or not _is_count(size) or not _is_number(time):
                raise ValueError(f"{kind}_perf without {kind}, {kind}_msg_size_bytes and {kind}_exec_time_us")
            source = {**record, **header}
            comm_name = _text(source.get("comm_name"))
            return {
                "comm": _text(source.get("id")),
                "comm_name": "" if comm_name == "unknown" else comm_name,
                "rank": _count(source.get("rank")),
                "ranks": _count(source.get("n_ranks")),
                "nodes": _count(source.get("nnodes")),
                "host": _text({**record, **about}.get("hostname")),
                "pid": _count({**record, **about}.get("pid")),
                "collective": _snake(name),
                "seq": _count(body.get(f"{kind}_sn")),
                "peer": _count(body.get(f"{kind}_peer")),
                "message_B": size,
                "time_us": float(time),
                "timing": _text(body.get(f"{kind}_timing_source")),
                "algorithm": _text(body.get(f"{kind}_algo")),
                "protocol": _text(body.get(f"{kind}_proto")),
                "algbw_GBps": _rate(body.get(f"{kind}_algobw_gbs")),
                "busbw_GBps": _rate(body.get(f"{kind}_busbw_gbs")),
                "written_us": _count(about.get("dump_timestamp_us")),
            }
        stats = _dict(record, "dump_stats")
        if stats is not None:
            self.dropped += sum(_count(stats.get(f"{k}_dropped_since_last_dump")) or 0 for k in ("coll", "p2p"))
        elif not any(key in record for key in (*_RECORDS, "header")):
            raise ValueError("no record of NCCL Inspector")
        return None

    def notes(self) -> list[str]:
        found = []
        if self.bad:
            found.append(f"{self.path}: {self.bad} lines could not be read, the first is {self.first_bad}")
        if not self.count:
            found.append(f"{self.path}: no operation in it")
        if self.dropped:
            found.append(
                f"{self.path}: NCCL overwrote {self.dropped} operations before they were written; a larger "
                "NCCL_INSPECTOR_DUMP_COLL_RING_SIZE, or more frequent dumps, keeps them"
            )
        return found


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    with open_to_read(path) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        yield gzip.open(file) if packed else file


def _why(problem: Exception, line: bytes) -> str:
    if isinstance(problem, json.JSONDecodeError):
        cut = problem.pos >= len(line.rstrip()) - 1
        return "it ends early; was the job killed?" if cut else f"column {problem.colno}: {problem.msg}"
    return "nested too deeply" if isinstance(problem, RecursionError) else str(problem)[:120]


def _snake(name: str) -> str:
    """ "AllReduce" -> "all_reduce", "AlltoAll" -> "all_to_all", as torch writes them."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name[:60].replace("AlltoAll", "AllToAll")).lower()


def _dict(record: dict[str, Any], key: str) -> dict[str, Any] | None:
    value = record.get(key)
    return value if isinstance(value, dict) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18


def _is_count(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int)


def _count(value: Any) -> int | None:
    return value if _is_count(value) else None


def _rate(value: Any) -> float:
    """GB/s; NaN for the text "nan", and for the 0 that NCCL writes for kinds whose traffic it does not know."""
    return float(value) if _is_number(value) and value > 0 else math.nan


def _text(value: Any) -> str:
    return value[:200] if isinstance(value, str) else ""

"""One trace file to one `RankTrace`: events to columns, block by block."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ddplab.trace import kernels
from ddplab.trace.blocks import Blocks
from ddplab.trace.columns import COMM, COMPUTE, MEMORY, Growing, Message, RankTrace, Table
from ddplab.trace.errors import TraceError
from ddplab.trace.events import Args, Event

_MOST_US = 2.0**62 / 1000  # beyond, nanoseconds leave int64: such a time is nonsense
_NO_MESSAGE = Message()
_DISTRIBUTED_MARK = re.compile(r"(nccl|gloo|mpi|ucc|xccl|hccl):", re.IGNORECASE)


class _Index(dict):
    """Numbers things in the order of their first appearance: `index[thing]`."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class _Reader:
    """Collects the rows of one file."""

    def __init__(self, comm: re.Pattern | None):
        self.comm = comm
        self.names, self.threads, self.messages = _Index(), _Index(), _Index()
        self.tables = {name: Growing(name) for name in ("gpu", "cpu", "marks", "launches")}
        self.skipped = 0
        self.kinds: dict[int, int] = {}  # a kernel's name -> COMM or COMPUTE
        self.sinks: dict[str, list[Event]] = {}
        self.groups = {}  # what becomes of a category -> the events of this block
        for kind, categories in {
            "kernel": kernels.KERNEL_CATEGORIES,
            "memory": kernels.MEMORY_CATEGORIES,
            "cpu": kernels.CPU_CATEGORIES,
            "marks": kernels.MARK_CATEGORIES,
            "gpu_marks": kernels.GPU_MARK_CATEGORIES,
            "launches": kernels.RUNTIME_CATEGORIES,
        }.items():
            self.groups[kind] = []
            self.sinks |= dict.fromkeys(categories, self.groups[kind])

    def add(self, events: list[Event]) -> None:
        """The rows of one block."""
        put = {category: rows.append for category, rows in self.sinks.items()}.get
        for event in events:
            keep = put(event.cat)
            if keep is not None:
                keep(event)
        for kind, rows in self.groups.items():
            if rows:
                getattr(self, "_" + kind)(rows)
                rows.clear()

    def _times(self, rows: list[Event]) -> tuple[list[Event], dict[str, np.ndarray]]:
        """The rows whose times are times, with the columns that all tables have."""
        start_us = np.array([event.ts for event in rows])
        for_us = np.array([event.dur for event in rows])
        good = (np.abs(start_us) < _MOST_US) & (for_us >= 0) & (start_us + for_us < _MOST_US)  # false for NaN
        if not good.all():
            self.skipped += int((~good).sum())
            rows = [event for event, keep in zip(rows, good, strict=True) if keep]
            start_us, for_us = start_us[good], for_us[good]
        start = nanoseconds(start_us)
        return rows, {
            "start_ns": start,
            "end_ns": start + nanoseconds(for_us),
            "thread": [self.threads[event.pid, event.tid] for event in rows],
        }

    def _kernel(self, rows: list[Event]) -> None:
        rows, columns = self._times([event for event in rows if event.name not in kernels.SYNCHRONISATION])
        names = [self.names[event.name] for event in rows]
        self.kinds.update(
            {n: self._kind(event.name) for n, event in zip(names, rows, strict=True) if n not in self.kinds}
        )
        self._gpu(rows, columns, names, [self.kinds[n] for n in names])

    def _memory(self, rows: list[Event]) -> None:
        rows, columns = self._times(rows)
        # A copy that names its collective is one that the copy engines run (NCCL 2.28 on).
        kinds = [COMM if event.args and event.args.collective else MEMORY for event in rows]
        self._gpu(rows, columns, [self.names[event.name] for event in rows], kinds)

    def _gpu(self, rows: list[Event], columns: dict, names: list[int], kinds: list[int]) -> None:
        self.tables["gpu"].add(
            **columns,
            kind=kinds,
            name=names,
            correlation=[_int(event.args.correlation) if event.args else -1 for event in rows],
            message=[self._message(event) if kind == COMM else -1 for event, kind in zip(rows, kinds, strict=True)],
        )

    def _kind(self, name: str) -> int:
        own = self.comm is not None and self.comm.search(name)
        return COMM if own or kernels.COMMUNICATION.match(name) else COMPUTE

    def _cpu(self, rows: list[Event]) -> None:
        rows, columns = self._times(rows)
        self.tables["cpu"].add(**columns, name=[self.names[event.name] for event in rows])

    def _marks(self, rows: list[Event], gpu: bool = False) -> None:
        rows, columns = self._times(rows)
        self.tables["marks"].add(
            **columns,
            name=[self.names[event.name] for event in rows],
            gpu=np.full(len(rows), gpu),
            message=[self._message(event) if _DISTRIBUTED_MARK.match(event.name) else -1 for event in rows],
        )

    def _gpu_marks(self, rows: list[Event]) -> None:
        self._marks(rows, gpu=True)

    def _launches(self, rows: list[Event]) -> None:
        rows, columns = self._times([event for event in rows if event.args and event.args.correlation is not None])
        del columns["end_ns"]
        self.tables["launches"].add(**columns, correlation=[_int(event.args.correlation) for event in rows])

    def _message(self, event: Event) -> int:
        message = message_of(event.name, event.args)
        return -1 if message == _NO_MESSAGE else self.messages[message]


def read_trace(path: str | Path, *, comm: str | re.Pattern | None = None, partial: bool = False) -> RankTrace:
    """Read one Kineto trace, .json or .json.gz of any layout. See `ddplab.trace` for what comes out.

    comm: a regular expression, searched in kernel names: kernels of yours that communicate (DeepEP, nvshmem).
    partial: leave damaged places out, and say so in `.notes`; otherwise they raise.
    Events whose time or duration is missing, negative, infinite or no number are always left out, counted in `.notes`.
    TraceError: no trace, damaged text, or no events at all; it names the file, the line and the column.
    """
    pattern = re.compile(comm) if isinstance(comm, str) else comm
    reader, blocks = _Reader(pattern), Blocks(path, partial)
    with _no_collection():
        for events in blocks:
            reader.add(events)
    base = blocks.head.base_ns
    base = base if isinstance(base, int) and 0 <= base < 2**62 else 0
    tables = {name: growing.table(base) for name, growing in reader.tables.items()}
    _join_launches(tables["gpu"], tables.pop("launches"))
    notes = list(blocks.notes)
    if reader.skipped:
        events = "1 event" if reader.skipped == 1 else f"{reader.skipped} events"
        notes.append(f"skipped {events}: the time or duration is missing, negative or no finite number")
    if not any(map(len, tables.values())):
        raise TraceError(path, "; ".join(["no events: did the profiler's schedule reach an active step?", *notes]))
    info = blocks.head.distributed if isinstance(blocks.head.distributed, dict) else {}
    if not info:
        notes.append("no distributedInfo: rank and number of ranks are unknown")
    return RankTrace(
        path=str(path),
        rank=_natural(info.get("rank")),
        world_size=_natural(info.get("world_size")),
        backend=info.get("backend") if isinstance(info.get("backend"), str) else None,
        info=info,
        **tables,
        names=list(reader.names),
        threads=[(str(pid), str(tid)) for pid, tid in reader.threads],
        messages=list(reader.messages),
        notes=notes,
    )


def _join_launches(gpu: Table, launches: Table) -> None:
    """Give each row of `gpu` the time and the thread of the runtime call with its correlation."""
    order = np.argsort(launches.correlation, kind="stable")
    known = launches.correlation[order]
    at = np.minimum(np.searchsorted(known, gpu.correlation), max(len(known) - 1, 0))
    found = (gpu.correlation >= 0) & (known[at] == gpu.correlation) if len(known) else np.zeros(len(gpu), bool)
    rows = order[at] if len(known) else at
    for name, column in (("launch_ns", launches.start_ns), ("launch_thread", launches.thread)):
        gpu.columns[name] = np.full(len(gpu), -1, column.dtype)
        gpu.columns[name][found] = column[rows[found]]


def nanoseconds(us: np.ndarray) -> np.ndarray:
    """Microseconds with a fraction to int64 nanoseconds; whole and fraction apart, else 16 digits are not enough."""
    whole = np.floor(us)
    return whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)


def message_of(name: str, args: Args | None) -> Message:
    """What an event's arguments and name say of its collective."""
    if args is None:
        return Message(collective=kernels.collective(name))
    dims, types = _decoded(args.dims), _decoded(args.types)
    elements, kind = args.in_elements, args.dtype
    if elements is None and dims:
        elements = _elements(dims[0])
        kind = types[0] if types and isinstance(types[0], str) else None
    return Message(
        collective=kernels.collective(args.collective or name),
        in_elements=_natural(elements),
        out_elements=_natural(args.out_elements),
        dtype=kernels.dtype(kind),
        group_size=_natural(args.group_size),
        group=args.group,
        ranks=args.ranks,
        seq=_natural(args.seq),
    )


def _elements(shape: Any) -> int | None:
    """Elements of the first argument: a tensor's shape, or the shapes of a list of tensors."""
    if not isinstance(shape, list):
        return None
    if any(isinstance(part, list) for part in shape):
        parts = [_elements(part) for part in shape]
        return sum(part for part in parts if part is not None)
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        return None
    count = 1
    for n in shape:
        count *= n
    return count


def _decoded(raw: msgspec.Raw) -> list:
    try:
        found = msgspec.json.decode(raw) if len(bytes(raw)) else []
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _natural(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else None


def _int(value: int | None) -> int:
    return value if value is not None and 0 <= value < 2**62 else -1


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's cycle collector, which walks through millions of events for nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

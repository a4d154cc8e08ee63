"""Events to columns: names, threads and messages become numbers, text is kept once.

The inner loops run over millions of events. So each block's events only lengthen Python lists, and numpy takes over
once a list is long: its calls cost as much as a hundred list items.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

from ddplab.trace import kernels
from ddplab.trace.columns import COMM, COMPUTE, MEMORY, Growing
from ddplab.trace.events import Args, Event
from ddplab.trace.messages import NONE, message_of

_LONG = 1 << 12  # rows that wait as Python objects
_MOST_US = 2.0**62 / 1000  # beyond, nanoseconds leave int64: such a time is nonsense
_COARSE_US = 2.0**43  # from here on neighbouring doubles are more than a nanosecond apart
_NO_ARGS = Args()


@functools.lru_cache(maxsize=1 << 14)
def _kind(name: str) -> tuple[bool, bool, bool, bool]:
    """Does a name wait, communicate, mark, launch? The traces of a job's ranks share their names."""
    waits = name in kernels.SYNCHRONISATION
    comm = not waits and bool(kernels.COMMUNICATION.match(name))
    return waits, comm, bool(kernels.MARK.match(name)), bool(kernels.LAUNCH.search(name))


class Names(dict):
    """Numbers names in the order of their first appearance, and says what kind of name each is."""

    def __init__(self, comm: re.Pattern | None):
        super().__init__()
        self.comm, self.waits, self.marks, self.launches = set(), set(), set(), set()
        self._own = comm

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        waits, comm, marks, launches = _kind(name)
        if waits:
            self.waits.add(number)
        elif comm or (self._own is not None and self._own.search(name)):
            self.comm.add(number)
        if marks:
            self.marks.add(number)
        if launches:
            self.launches.add(number)
        return number


class Threads(dict):
    """Numbers the threads of one process; all processes share the numbers."""

    def __init__(self, pid: Any, every: list[tuple[Any, Any]]):
        super().__init__()
        self.pid, self.every = pid, every

    def __missing__(self, tid: Any) -> int:
        self[tid] = number = len(self.every)
        self.every.append((self.pid, tid))
        return number


class Gather:
    """Collects the rows of one file: `add` each block's events, then take `tables()`."""

    def __init__(self, comm: re.Pattern | None, exact: bool = False):
        self.exact, self.coarse = exact, False  # coarse: times that should have been read exactly
        self.names = Names(comm)
        self.threads: list[tuple[Any, Any]] = []
        self.messages: dict[Any, int] = {}
        self.skipped = 0
        self._processes: dict[Any, Threads] = {}
        self._tables = {name: Growing(name) for name in ("gpu", "cpu", "marks", "launches")}
        self._lists: dict[str, dict[str, list]] = {name: {} for name in self._tables}
        self._sinks = {
            **dict.fromkeys(kernels.KERNEL_CATEGORIES, self._kernels),
            **dict.fromkeys(kernels.MEMORY_CATEGORIES, self._copies),
            **dict.fromkeys(kernels.CPU_CATEGORIES, self._operators),
            **dict.fromkeys(kernels.MARK_CATEGORIES, self._marks),
            **dict.fromkeys(kernels.GPU_MARK_CATEGORIES, self._gpu_marks),
            **dict.fromkeys(kernels.RUNTIME_CATEGORIES, self._launches),
        }

    def add(self, events: list[Event]) -> None:
        """The rows of one block."""
        categories, names = [event.cat for event in events], self.names
        present = set(categories)
        for category in present & self._sinks.keys():  # few: the profiler writes events of a kind together
            if len(present) == 1:
                rows = events
            else:
                rows = [event for event, its in zip(events, categories, strict=True) if its == category]
            self._sinks[category](rows, [names[event.name] for event in rows])
        for name, lists in self._lists.items():
            if lists and len(lists["ts"]) > _LONG:
                self._flush(name)

    def tables(self) -> dict[str, Growing]:
        """What was collected for the tables of `ddplab.trace`, and for `launches`."""
        for name, lists in self._lists.items():
            if lists:
                self._flush(name)
        return self._tables

    def _kernels(self, rows: list[Event], ids: list[int]) -> None:
        comm, waits = self.names.comm, self.names.waits
        kinds, messages = [COMPUTE] * len(rows), [-1] * len(rows)
        if not waits.isdisjoint(ids):
            rows, ids = _without(rows, ids, waits)
        if not comm.isdisjoint(ids):
            for i, (event, number) in enumerate(zip(rows, ids, strict=True)):
                if number in comm:
                    kinds[i], messages[i] = COMM, self._message(event)
        self._gpu(rows, ids, kinds[: len(rows)], messages[: len(rows)])

    def _copies(self, rows: list[Event], ids: list[int]) -> None:
        self._gpu(rows, ids, [MEMORY] * len(rows), [-1] * len(rows))

    def _gpu(self, rows: list[Event], ids: list[int], kinds: list[int], messages: list[int]) -> None:
        correlations = [(event.args or _NO_ARGS).correlation for event in rows]
        self._lengthen("gpu", rows, ids, kind=kinds, message=messages, correlation=correlations)

    def _operators(self, rows: list[Event], ids: list[int]) -> None:
        marks = self.names.marks
        if not marks.isdisjoint(ids):  # in 2021 annotations were operators too
            self._marks(*_without(rows, ids, set(ids) - marks))
            rows, ids = _without(rows, ids, marks)
        self._lengthen("cpu", rows, ids)

    def _marks(self, rows: list[Event], ids: list[int], gpu: bool = False) -> None:
        distributed = kernels.DISTRIBUTED_MARK.match
        messages = [self._message(event) if distributed(event.name) else -1 for event in rows]
        self._lengthen("marks", rows, ids, gpu=[gpu] * len(rows), message=messages)

    def _gpu_marks(self, rows: list[Event], ids: list[int]) -> None:
        self._marks(rows, ids, gpu=True)

    def _launches(self, rows: list[Event], ids: list[int]) -> None:
        launches = self.names.launches
        rows = [event for event, number in zip(rows, ids, strict=True) if number in launches]
        self._lengthen("launches", rows, [], correlation=[(event.args or _NO_ARGS).correlation for event in rows])

    def _lengthen(self, table: str, rows: list[Event], ids: list[int], **more: list) -> None:
        pids = {event.pid for event in rows}
        if len(pids) == 1:
            [pid] = pids
            known = self._of_process(pid)
            threads = [known[event.tid] for event in rows]
        else:
            threads = [self._of_process(event.pid)[event.tid] for event in rows]
        columns = {"ts": [event.ts for event in rows], "dur": [event.dur for event in rows], "thread": threads, **more}
        if ids:
            columns["name"] = ids
        lists = self._lists[table]
        for name, values in columns.items():
            if name in lists:
                lists[name] += values
            else:
                lists[name] = values

    def _of_process(self, pid: Any) -> Threads:
        if pid not in self._processes:
            self._processes[pid] = Threads(pid, self.threads)
        return self._processes[pid]

    def _flush(self, table: str) -> None:
        """From lists to columns; rows whose times are no times are counted and left out."""
        lists, self._lists[table] = self._lists[table], {}
        times = lists.pop("ts")
        start_us, for_us = np.array(times, float), np.array(lists.pop("dur"), float)
        good = (np.abs(start_us) < _MOST_US) & (for_us >= 0) & (start_us + for_us < _MOST_US)  # false for NaN
        columns = {name: _column(values) for name, values in lists.items()}
        if not good.all():
            self.skipped += int((~good).sum())
            start_us, for_us = start_us[good], for_us[good]
            columns = {name: column[good] for name, column in columns.items()}
        if self.exact:
            start = np.array([int(round(ts * 1000)) for ts, keep in zip(times, good, strict=True) if keep], np.int64)
        else:
            start = nanoseconds(start_us)
            self.coarse |= bool((np.abs(start_us[start_us % 1 != 0]) >= _COARSE_US).any())
        self._tables[table].add(start_ns=start, end_ns=start + nanoseconds(for_us), **columns)

    def _message(self, event: Event) -> int:
        message = message_of(event)
        return -1 if message == NONE else self.messages.setdefault(message, len(self.messages))


def nanoseconds(us: np.ndarray) -> np.ndarray:
    """Microseconds with a fraction to int64 nanoseconds; whole and fraction apart, else 16 digits are not enough."""
    whole = np.floor(us)
    return whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)


def _column(values: list) -> np.ndarray:
    try:
        return np.array(values, np.int64)
    except OverflowError:  # a correlation that is none
        return np.array([value if abs(value) < 2**63 else -1 for value in values], np.int64)


def _without(rows: list[Event], ids: list[int], unwanted: set[int]) -> tuple[list[Event], list[int]]:
    kept = [(event, number) for event, number in zip(rows, ids, strict=True) if number not in unwanted]
    return [event for event, _ in kept], [number for _, number in kept]

"""Events to columns, block by block: names, threads and messages become numbers, text is kept once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ddplab.trace import kernels
from ddplab.trace.columns import COMM, COMPUTE, MEMORY, Growing
from ddplab.trace.events import Event
from ddplab.trace.messages import NONE, message_of

_MOST_US = 2.0**62 / 1000  # beyond, nanoseconds leave int64: such a time is nonsense


class Numbers(dict):
    """Numbers things in the order of their first appearance: `numbers[thing]`."""

    def __missing__(self, thing: Any) -> int:
        self[thing] = number = len(self)
        return number


class Verdicts(dict):
    """What a function says of a text, asked once a text."""

    def __init__(self, judge: Callable[[str], Any]):
        super().__init__()
        self.judge = judge

    def __missing__(self, text: str) -> Any:
        self[text] = verdict = self.judge(text)
        return verdict


class Gather:
    """Collects the rows of one file: `add` each block's events, then take `tables`."""

    def __init__(self, comm: re.Pattern | None):
        self.names, self.threads, self.messages = Numbers(), Numbers(), Numbers()
        self.tables = {name: Growing(name) for name in ("gpu", "cpu", "marks", "launches")}
        self.skipped = 0
        self._kinds = Verdicts(
            lambda name: (
                None
                if name in kernels.SYNCHRONISATION
                else COMM
                if kernels.COMMUNICATION.match(name) or (comm is not None and comm.search(name))
                else COMPUTE
            )
        )
        self._is_mark = Verdicts(lambda name: kernels.MARK.match(name) is not None)
        self._of_category = {}  # category -> events of this block
        self._sinks = []
        for sink, categories in (
            (self._kernels, kernels.KERNEL_CATEGORIES),
            (self._copies, kernels.MEMORY_CATEGORIES),
            (self._operators, kernels.CPU_CATEGORIES),
            (self._marks, kernels.MARK_CATEGORIES),
            (self._gpu_marks, kernels.GPU_MARK_CATEGORIES),
            (self._launches, kernels.RUNTIME_CATEGORIES),
        ):
            rows: list[Event] = []
            self._sinks.append((sink, rows))
            self._of_category |= dict.fromkeys(categories, rows)

    def add(self, events: list[Event]) -> None:
        """The rows of one block."""
        put = {category: rows.append for category, rows in self._of_category.items()}.get
        for event in events:
            keep = put(event.cat)
            if keep is not None:
                keep(event)
        for sink, rows in self._sinks:
            if rows:
                sink(rows)
                rows.clear()

    def _kernels(self, rows: list[Event]) -> None:
        kinds = self._kinds
        rows, columns = self._timed([event for event in rows if kinds[event.name] is not None])
        self._gpu(rows, columns, [kinds[event.name] for event in rows])

    def _copies(self, rows: list[Event]) -> None:
        rows, columns = self._timed(rows)
        self._gpu(rows, columns, [MEMORY] * len(rows))

    def _gpu(self, rows: list[Event], columns: dict, kinds: list[int]) -> None:
        self.tables["gpu"].add(
            **columns,
            kind=kinds,
            correlation=[_correlation(event) for event in rows],
            message=[self._message(event) if kind == COMM else -1 for event, kind in zip(rows, kinds, strict=True)],
        )

    def _operators(self, rows: list[Event]) -> None:
        is_mark = self._is_mark
        marks = [event for event in rows if is_mark[event.name]]
        if marks:  # 2021: annotations were operators too
            rows = [event for event in rows if not is_mark[event.name]]
            self._marks(marks)
        self.tables["cpu"].add(**self._timed(rows)[1])

    def _marks(self, rows: list[Event], gpu: bool = False) -> None:
        rows, columns = self._timed(rows)
        distributed = kernels.DISTRIBUTED_MARK.match
        self.tables["marks"].add(
            **columns,
            gpu=np.full(len(rows), gpu),
            message=[self._message(event) if distributed(event.name) else -1 for event in rows],
        )

    def _gpu_marks(self, rows: list[Event]) -> None:
        self._marks(rows, gpu=True)

    def _launches(self, rows: list[Event]) -> None:
        rows, columns = self._timed([event for event in rows if event.args and event.args.correlation is not None])
        self.tables["launches"].add(**columns, correlation=[_correlation(event) for event in rows])

    def _timed(self, rows: list[Event]) -> tuple[list[Event], dict[str, Any]]:
        """The rows whose times are times, with the columns that all tables have."""
        start_us = np.array([event.ts for event in rows])
        for_us = np.array([event.dur for event in rows])
        good = (np.abs(start_us) < _MOST_US) & (for_us >= 0) & (start_us + for_us < _MOST_US)  # false for NaN
        if not good.all():
            self.skipped += int((~good).sum())
            rows = [event for event, keep in zip(rows, good, strict=True) if keep]
            start_us, for_us = start_us[good], for_us[good]
        start = nanoseconds(start_us)
        names, threads = self.names, self.threads
        return rows, {
            "start_ns": start,
            "end_ns": start + nanoseconds(for_us),
            "name": [names[event.name] for event in rows],
            "thread": [threads[event.pid, event.tid] for event in rows],
        }

    def _message(self, event: Event) -> int:
        message = message_of(event)
        return -1 if message == NONE else self.messages[message]


def nanoseconds(us: np.ndarray) -> np.ndarray:
    """Microseconds with a fraction to int64 nanoseconds; whole and fraction apart, else 16 digits are not enough."""
    whole = np.floor(us)
    return whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)


def _correlation(event: Event) -> int:
    value = event.args.correlation if event.args else None
    return value if value is not None and 0 <= value < 2**62 else -1

"""Events as numpy columns: what a trace file becomes. See `ddplab.trace` for the layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

COMPUTE, COMM, MEMORY = 0, 1, 2  # Table `gpu`, column `kind`

_LAYOUT = {
    "gpu": {
        "start_ns": "int64",
        "end_ns": "int64",
        "kind": "int8",
        "name": "int32",
        "thread": "int32",
        "correlation": "int64",
        "message": "int32",
    },
    "cpu": {"start_ns": "int64", "end_ns": "int64", "name": "int32", "thread": "int32"},
    "marks": {
        "start_ns": "int64",
        "end_ns": "int64",
        "name": "int32",
        "thread": "int32",
        "gpu": "bool",
        "message": "int32",
    },
    "launches": {"start_ns": "int64", "thread": "int32", "correlation": "int64"},
}


class Table:
    """Equally long numpy columns, each an attribute: `table.start_ns`. Rows are in the order of `start_ns`."""

    def __init__(self, columns: dict[str, np.ndarray]):
        self.columns = columns

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.__dict__["columns"][name]
        except KeyError:
            raise AttributeError(f"this table has the columns {', '.join(self.__dict__.get('columns', ()))}") from None

    def __len__(self) -> int:
        return len(self.columns["start_ns"])

    def where(self, rows: np.ndarray) -> Table:
        """The rows that a boolean mask or an index array selects."""
        return Table({name: column[rows] for name, column in self.columns.items()})

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self.columns)})"


class Growing:
    """A table that grows in place: realloc moves pages, so that no column is ever there twice while it grows."""

    def __init__(self, name: str):
        self._layout = _LAYOUT[name]
        self.columns = {column: np.empty(0, dtype) for column, dtype in self._layout.items()}
        self.rows = 0
        self._first: np.ndarray | None = None  # the first start, where times are kept as differences

    def add(self, **columns: np.ndarray) -> None:
        """More rows: a value for each column of the layout; further columns are ignored."""
        end = self.rows + len(columns["start_ns"])
        for name, column in self.columns.items():
            if len(column) < end:
                column.resize(max(end, len(column) * 33 // 32), refcheck=False)
            column[self.rows : end] = columns[name]
        self.rows = end

    def narrow(self) -> None:
        """Take half the room until `table` is asked for: small numbers of names and threads, differences of times."""
        for name, dtype in self._layout.items():
            column = self.columns[name]
            if dtype == "int32" and column[: self.rows].max(initial=0) < 1 << 15:
                self.columns[name] = column[: self.rows].astype(np.int16)
        starts, ends = (self.columns[name][: self.rows] for name in ("start_ns", "end_ns"))
        since, lasting = np.diff(starts, prepend=starts[:1]), ends - starts
        if all(-1 << 31 <= each.min(initial=0) and each.max(initial=0) < 1 << 31 for each in (since, lasting)):
            self._first = starts[:1].copy()
            self.columns |= {"start_ns": since.astype(np.int32), "end_ns": lasting.astype(np.int32)}

    def table(self, base_ns: int = 0) -> Table:
        """All rows in time order; `base_ns` is added to the times. The table takes over what was collected."""
        for name, dtype in self._layout.items():
            self.columns[name] = self.columns[name].astype(dtype, copy=False)
        if self._first is not None:
            starts = self.columns["start_ns"]
            np.cumsum(starts, out=starts)
            starts += self._first
            self.columns["end_ns"] += starts
        for name, column in self.columns.items():
            column.resize(self.rows, refcheck=False)
            if name.endswith("_ns"):
                column += base_ns
        starts = self.columns["start_ns"]
        if (starts[1:] < starts[:-1]).any():
            order = np.argsort(starts, kind="stable").astype(np.int32)
            for name in self.columns:
                self.columns[name] = self.columns[name][order]
        return Table(self.columns)


@dataclass(frozen=True, slots=True)
class Message:
    """What an event says of its collective; None where it does not say.

    collective: torch's snake_case name, as all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv.
    in_elements, out_elements: of this rank's input and output. dtype: torch's name, as float32, bfloat16.
    group: the process group's name; ranks: its members as the trace writes them; seq: number of the operation in it.
    """

    collective: str | None = None
    in_elements: int | None = None
    out_elements: int | None = None
    dtype: str | None = None
    group_size: int | None = None
    group: str | None = None
    ranks: str | None = None
    seq: int | None = None


@dataclass
class RankTrace:
    """One trace file: the events of one rank. The layout of the three tables is told in `ddplab.trace`."""

    path: str
    rank: int | None
    world_size: int | None
    backend: str | None
    info: dict[str, Any]
    gpu: Table
    marks: Table
    operators: Growing  # what `cpu` is made of
    base_ns: int
    names: list[str]
    threads: list[tuple[str, str]]
    messages: list[Message]
    notes: list[str] = field(default_factory=list)

    @cached_property
    def cpu(self) -> Table:
        """The operators. A GPU's report does without them, and they are most of a trace: sorted on first use."""
        return self.operators.table(self.base_ns)

    @property
    def device(self) -> str:
        """ "gpu" where kernels ran on one, else "cpu"."""
        return "gpu" if len(self.gpu) else "cpu"

    @property
    def label(self) -> str:
        """How messages call this rank."""
        return f"rank {self.rank}" if self.rank is not None else self.path

    def steps(self) -> Iterator[tuple[int, int, int]]:
        """(number, start_ns, end_ns) of each ProfilerStep annotation of the CPU, in time order."""
        named = {i: name for i, name in enumerate(self.names) if name.startswith("ProfilerStep#")}
        for i in np.flatnonzero(np.isin(self.marks.name, list(named)) & ~self.marks.gpu):
            number = named[int(self.marks.name[i])].removeprefix("ProfilerStep#")
            if number.isdecimal() and len(number) < 19:
                yield int(number), int(self.marks.start_ns[i]), int(self.marks.end_ns[i])

    def ids(self, prefix: str) -> np.ndarray:
        """Indices into `names` of the names that start with `prefix`."""
        return np.array([i for i, name in enumerate(self.names) if name.startswith(prefix)], dtype=np.int32)

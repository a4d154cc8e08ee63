"""The list itself: `Transfer`, one row, and `Schedule`, the columns, with what can be asked of them.

Ranks, chunks and steps count from 0. Within a step every rank sends what it held when the step began, and the next step
begins when its sends and receives are over.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ddplab import symbolic
from ddplab._arguments import shown
from ddplab.symbolic import ScheduleError


class Transfer(NamedTuple):
    """One row of a schedule."""

    step: int
    src: int
    dst: int
    chunk: int
    reduce: bool


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """An all-reduce as five columns of equal length, one row a transfer, ordered by step.

    name: what to call it in tables and errors.  ranks, chunks: at least 1; the buffer is cut into `chunks` parts.
    step, src, dst, chunk: int32 columns.  reduce: bool column, True adds at the destination, False overwrites.
    Raises ScheduleError naming the first malformed row: rank, chunk or step out of range, a rank that sends to itself.
    """

    name: str
    ranks: int
    chunks: int
    step: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    chunk: np.ndarray
    reduce: np.ndarray

    def __post_init__(self) -> None:
        for field in ("ranks", "chunks"):
            object.__setattr__(self, field, count(getattr(self, field), f"A schedule's {field}"))
        names = ("step", "src", "dst", "chunk", "reduce")
        columns = [np.asarray(getattr(self, name)) for name in names]
        if any(c.ndim != 1 for c in columns) or len({len(c) for c in columns}) != 1:
            lengths = ", ".join(f"{name} {c.shape}" for name, c in zip(names, columns, strict=True))
            raise ScheduleError(f"The columns of a schedule must be one-dimensional and equally long: {lengths}.")
        for name, column in zip(names, columns, strict=True):
            if len(column) and column.dtype.kind not in "iub":
                raise ScheduleError(f"Column {name} must hold integers, not {column.dtype}.")
        limits = (np.iinfo(np.int32).max, self.ranks, self.ranks, self.chunks, 2)
        for name, column, limit in zip(names, columns, limits, strict=True):
            if len(column) and (column.min() < 0 or column.max() >= limit):
                row = int(np.flatnonzero((column < 0) | (column >= limit))[0])
                self._refuse(row, columns[0], f"{name} {column[row]} is out of range: it must be 0 to {limit - 1}")
        columns = [c.astype(bool if n == "reduce" else np.int32) for n, c in zip(names, columns, strict=True)]
        if (selfish := columns[1] == columns[2]).any():
            row = int(np.flatnonzero(selfish)[0])
            self._refuse(row, columns[0], f"rank {columns[1][row]} sends to itself")
        if (np.diff(columns[0]) < 0).any():
            order = np.argsort(columns[0], kind="stable")
            columns = [c[order] for c in columns]
        for name, column in zip(names, columns, strict=True):
            column.setflags(write=False)
            object.__setattr__(self, name, column)

    def _refuse(self, row: int, step: np.ndarray, what: str) -> None:
        raise ScheduleError(f"{self.name}, transfer {row} (step {step[row]}): {what} (all counted from 0).")

    @classmethod
    def from_rows(cls, name: str, ranks: int, chunks: int, rows: Iterable[Sequence[int]]) -> Schedule:
        """A schedule from (step, src, dst, chunk, reduce) rows, e.g. `Transfer`s, in any order of steps."""
        rows = list(rows)
        for i, row in enumerate(rows):
            if not isinstance(row, (tuple, list, np.ndarray)) or len(row) != 5:
                raise ScheduleError(f"{name}, transfer {i}: needs (step, src, dst, chunk, reduce), got {row!r}.")
        return cls(name, ranks, chunks, *(zip(*rows, strict=True) if rows else [()] * 5))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The rows, ordered by step."""
        columns = (self.step, self.src, self.dst, self.chunk, self.reduce)
        return tuple(map(Transfer, *(c.tolist() for c in columns)))

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int(self.step[-1]) + 1 if len(self.step) else 0

    @property
    def reduce_steps(self) -> int:
        """Number of steps up to and including the last one that reduces."""
        return int(self.step[self.reduce][-1]) + 1 if self.reduce.any() else 0

    def bounds(self, numel: int) -> list[int]:
        """Where a buffer of `numel` elements is cut: chunk c is [bounds[c], bounds[c + 1]); some may be empty."""
        return [numel * i // self.chunks for i in range(self.chunks + 1)]

    def verify(self, owners: Sequence[int | None | Sequence[int]] | None = None) -> list[int | None | tuple[int, ...]]:
        """Prove, symbolically, that every rank ends with every chunk summed over all ranks, each rank once.

        Returns who owns what after the reduce phase (after `reduce_steps` steps): owners[rank] is the chunk that the
        rank then holds fully reduced, None if none, a tuple if several. Given `owners`, checks that claim too.
        Raises ScheduleError naming rank, chunk and the contributions that are missing (and the copy that overwrote
        them) or counted twice, or two writes, one of them a copy, into the same chunk of a rank in one step.
        """
        return symbolic.verify(self, owners)

    def states(self) -> list[list[list[tuple[int, ...]]]]:
        """states[t][rank][chunk]: the ranks whose contributions that buffer holds after t steps, sorted.

        t runs from 0 to `steps`. A rank that is counted more than once stands there twice. For figures: a schedule
        that does not sum right has states too. Raises ScheduleError for two writes as `verify` does.
        """
        return symbolic.states(self)

    def figure(self, **options: Any) -> Any:
        """A stepper that the reader drives, live and on a static page; options: `step`, `nbytes`, `caption`."""
        from ddplab.figures import figure_of

        return figure_of(self, **options)

    def _key(self) -> tuple:
        return (self.name, self.ranks, self.chunks, *(getattr(self, c).tobytes() for c in Transfer._fields))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._key() == other._key()

    @cached_property
    def _hash(self) -> int:
        return hash(self._key())

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name}: {self.ranks} ranks, {self.chunks} chunks, {self.steps} steps of which "
            f"{self.reduce_steps} reduce, {len(self.step)} transfers)"
        )


def count(value: Any, what: str, least: int = 1, error: type[ValueError] = ScheduleError) -> int:
    """`value` as an int of at least `least`; otherwise an error whose sentence begins with `what`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, (bool, np.bool_)):
        raise error(f"{what} must be a whole number of at least {least}, not {shown(value)}.")
    return number


def number(value: Any, what: str, least: float = 0.0, most: float = math.inf, above: bool = False) -> float:
    """`value` as a finite float from `least` (left out with `above`) to `most`; otherwise a ValueError."""
    real = isinstance(value, Real) and not isinstance(value, (bool, np.bool_))
    if not (real and _finite(value) and least <= value <= most and not (above and value == least)):
        span = f"from {least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
        if above and most < math.inf:
            span = f"above {least:g} and at most {most:g}"
        kind = "a positive number" if above and not least and most == math.inf else f"a number, {span}"
        raise ValueError(f"{what} is {kind}, not {shown(value)}")
    return float(value)


def _finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def whole(value: Any) -> Any:
    """A float without a fraction as an int, such as 1e6 or a cell of a table; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value

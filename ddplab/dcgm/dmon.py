"""Reading the text of `dcgmi dmon`, in the four layouts it has had.

DCGM up to 2.3 aligns right and lets wide values push the rest of the line aside: its rows are split at blanks, where a
missing value is `N/A`. From 2.4 on columns stand where the heading stands, values may hold blanks, and from 4.0 on a
cell may be empty: those rows are cut at the heading's columns, and splitting them would move every later value one
column to the left. The heading comes again every 14 samples.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplab.dcgm.errors import DcgmError, error_from, gpu_failure
from ddplab.dcgm.fields import dcgm_field

if TYPE_CHECKING:
    import pandas as pd

_KINDS = "vGPU|GPU-CI|GPU-I|GPU|Switch|SW|LINK|CPU Core|CPU|CX|UNKNOWN"
_ENTITY = re.compile(rf"((?:GPU|SW) \d{{1,6}} LINK|{_KINDS}) (\d{{1,20}})(?=\s|$)")
_ENDED = "dmon was stopped"
_TROUBLE = re.compile(
    r"Error\b|Unable to\b|No data returned|.*\bResult: |.*connection is not valid|.*Host engine", re.IGNORECASE
)
_MOST_OF_A_LINE = 1000  # is looked at for words; an endless line must not cost endless time
Value = float | int | str | None


@dataclass(frozen=True)
class Row:
    """One line of values: what it is about, and one value for each heading."""

    entity: str
    id: int
    values: tuple[Value, ...]


class DmonReader:
    """Reads dmon line by line, as it arrives: `feed(line)` gives a Row, or None for headings and empty lines.

    `names` are the headings, `units` those that DCGM printed. Raises DcgmError for DCGM's own error lines and
    ValueError, with the line, for a line that is no dmon output.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.units: list[str] = []
        self.number = 0
        self._starts: list[int] | None = None  # where columns start; None in the old layout

    def feed(self, line: str) -> Row | None:
        """Read one line without its end."""
        self.number += 1
        line = line.rstrip("\r\n").expandtabs(8)
        bare = line.strip()
        if bare in ("", "^C") or bare.startswith(_ENDED):
            return None
        if bare.startswith("#"):
            return self._heading(line)
        if self.names and not self.units and re.match(r"\s*I[Dd](\s|$)", line):
            return self._unit_line(line)
        if match := _ENTITY.match(line.lstrip()):
            if not self.names:
                raise ValueError(f"line {self.number}: values without a heading (#Entity ...): cut off above?")
            return Row(match[1], int(match[2]), self._values(line, match))
        if failure := gpu_failure(line):
            raise failure
        if _is_trouble(line):
            raise error_from(line)
        raise ValueError(f"line {self.number} is no output of `dcgmi dmon`: {line.strip()[:80]!r}")

    def _heading(self, line: str) -> None:
        words = [(m.start(), m[0]) for m in re.finditer(r"\S+", line)]
        old = words[0][1] == "#"
        if old:
            words = words[1:]
        if not words or words[0][1].lstrip("#") != "Entity":
            raise ValueError(f"line {self.number} is no heading of `dcgmi dmon`: {line.strip()[:80]!r}")
        names = [word for _, word in words[1:]]
        if not names:
            raise ValueError(f"line {self.number}: the heading names no field; dmon needs -e with at least one id")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"line {self.number}: the heading names {twice} twice")
        if self.names and names != self.names:
            raise ValueError(
                f"line {self.number}: the heading changes from {' '.join(self.names)} to {' '.join(names)}: these are "
                "two runs of dmon; read them one by one"
            )
        self.names, self.units = names, []
        self._starts = None if old else [start for start, _ in words[1:]]

    def _unit_line(self, line: str) -> None:
        if self._starts is None:  # right-aligned, all blank or one word: only the known fields tell which
            fields = [dcgm_field(name) for name in self.names]
            printed = [f.unit if f and f.unit in ("W", "C", "KB/s", "MB/s") else "" for f in fields]
            self.units = printed
        else:
            self.units = [cell.strip() for cell in self._cells(line)]

    def _cells(self, line: str) -> list[str]:
        starts = self._starts or []
        return [line[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]

    def _values(self, line: str, match: re.Match) -> tuple[Value, ...]:
        if self._starts is None:
            cells = line.lstrip()[match.end() :].split()
            if len(cells) != len(self.names):
                raise ValueError(
                    f"line {self.number} has {len(cells)} values under {len(self.names)} headings: "
                    f"{line.strip()[:80]!r}; was it cut off or wrapped?"
                )
        else:
            indent = len(line) - len(line.lstrip())
            if indent + match.end() > self._starts[0]:
                raise ValueError(f"line {self.number}: {match[0]!r} reaches into the first column; was it edited?")
            beside = line[indent + match.end() : self._starts[0]].strip()
            if beside or any(start < len(line) and line[start - 1] != " " for start in self._starts if start):
                raise ValueError(
                    f"line {self.number}: the values do not stand below their headings: {line.strip()[:80]!r}; "
                    "keep the blanks when you copy (they are part of the format)"
                )
            cells = self._cells(line)
        return tuple(self._value(cell.strip(), name) for cell, name in zip(cells, self.names, strict=True))

    def _value(self, cell: str, name: str) -> Value:
        if cell in ("", "N/A"):
            return None
        field = dcgm_field(name)
        if re.fullmatch(r"-?\d{1,20}", cell) and (field is None or field.unit != "text"):
            return int(cell)
        if re.fullmatch(r"-?\d{1,300}\.\d{1,30}", cell):
            return float(cell)
        if field is not None and field.unit != "text":
            raise ValueError(f"line {self.number}: {cell[:40]!r} under {name} is not a number")
        return cell[:200]


def samples(rows: Iterable[Row]) -> Iterator[tuple[int, Row]]:
    """(number of the sample, row): a new sample begins where an entity comes again, whatever the order of entities."""
    number, seen = 0, set()
    for row in rows:
        if (row.entity, row.id) in seen:
            number, seen = number + 1, set()
        seen.add((row.entity, row.id))
        yield number, row


def _is_trouble(line: str) -> bool:
    return _TROUBLE.match(line.strip()[:_MOST_OF_A_LINE]) is not None


def _is_row(line: str) -> bool:
    return _ENTITY.match(line.lstrip()) is not None


def read_dmon(text: str) -> tuple[DmonReader, list[Row], list[str]]:
    """(reader with the headings, rows, what was lost) of a whole text; `parse_dmon` makes a table of it."""
    if not isinstance(text, str):
        raise ValueError(f"dmon output is text, not {type(text).__name__}; open the file with encoding='utf-8'")
    reader, rows, lost = DmonReader(), [], []
    lines = text.removeprefix("\ufeff").splitlines()
    first = next((i for i, line in enumerate(lines) if line.lstrip().startswith("#")), len(lines))
    for i, line in enumerate(lines):
        if i < first and not _is_row(line) and not _is_trouble(line) and not gpu_failure(line):
            reader.number += 1  # the command itself and a greeting may stand above
            continue
        try:
            row = reader.feed(line)
        except DcgmError as error:
            if not rows:
                raise
            lost.append(f"line {reader.number}: {error}")
            break
        if row:
            rows.append(row)
    if rows and not text.endswith(("\n", "\r")) and len(lines[-1]) < len(lines[first]) and _is_row(lines[-1]):
        rows.pop()
        lost.append(f"line {len(lines)} is cut off; its values are left out")
    if not rows:
        if reader.names:
            hint = "dmon prints its errors on stderr: run it again with 2>&1; an error may stand there"
            raise DcgmError("a heading and no samples", None, hint)
        raise ValueError("this text has no output of `dcgmi dmon` in it")
    return reader, rows, lost


def parse_dmon(text: str, interval_s: float | None = None) -> pd.DataFrame:
    """The output of `dcgmi dmon` as a table: one row a sample and entity, one column a field.

    Columns: sample (from 0), time_s (sample x interval_s; only if you say the `-d` of the run, which the output does
    not hold), entity ("GPU", "GPU-I", "GPU 0 LINK" ...), id, then the fields under DCGM's short names and with its own
    numbers: `dcgm_field(name)` knows their units, `link_rates` converts what concerns links. A value that DCGM did not
    have (N/A, an empty cell) is NaN, never 0, so means leave it out. `frame.attrs`: "units" as printed, "warnings".

    Raises DcgmError for DCGM's error texts, with what to do, and where there is a heading and nothing below it;
    ValueError, with the line, for other text; GpuUnavailable for nvidia-smi's failures.
    """
    import pandas as pd

    reader, rows, lost = read_dmon(text)
    numbered = list(samples(rows))
    head = [(number, row.entity, row.id) for number, row in numbered]
    frame = pd.DataFrame(head, columns=["sample", "entity", "id"])
    if interval_s is not None:
        frame.insert(1, "time_s", frame["sample"] * float(interval_s))
    for i, name in enumerate(reader.names):
        values = [row.values[i] for _, row in numbered]
        words = any(isinstance(value, str) for value in values)
        frame[name] = pd.Series(values, dtype=object if words else float)
    frame.attrs = {"units": dict(zip(reader.names, reader.units or [""] * len(reader.names), strict=True))}
    frame.attrs["warnings"] = lost + _warnings(reader.names, rows)
    return frame


def _warnings(names: list[str], rows: list[Row]) -> list[str]:
    """What a reader of the numbers should be told."""
    said, mine = [], {}
    for row in rows:
        mine.setdefault((row.entity, row.id), []).append(row.values)
    at = {name: i for i, name in enumerate(names)}
    for name in (n for n in names if n in ("NVLTX", "NVLRX", "PCITX", "PCIRX")):
        for (entity, number), values in mine.items():
            known = [v[at[name]] for v in values if v[at[name]] is not None]
            busy = max(v[at["GPUTL"]] or 0 for v in values) if "GPUTL" in at else 0
            if busy >= 90 and known and not any(known):
                said.append(
                    f"{entity} {number}: {name} is 0 in all samples while GPUTL reaches {busy:.0f}: no traffic, or the "
                    "counter does not work here (it is known to); check with nvidia-smi nvlink -gt d"
                )
            elif len(values) > 1 and not known:
                why = "by design for a MIG instance" if entity in ("GPU-I", "GPU-CI") else "is the GPU supported?"
                said.append(f"{entity} {number}: {name} is N/A in all samples ({why})")
    if {"GPUTL", "MCUTL"} & set(names) and not any(f and f.link for f in map(dcgm_field, names)):
        said.append("203 and 204 (GPUTL, MCUTL) are no bandwidths: ask for 1009 to 1012 (PCITX, PCIRX, NVLTX, NVLRX)")
    return said

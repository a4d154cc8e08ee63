"""Tables for people (80 columns, plain text), JSON and CSV for programs."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence

from ddplab._files import Draft, Unwritable
from ddplab.cli.values import Problem


def visible(text: str) -> str:
    """`text` with its control characters written out: what a file holds must not command the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def cell(value: object) -> str:
    """Text of one table cell: 4 significant digits, and '-' for what is not known."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:#.4g}".rstrip(".")
    return " ".join(visible(str(value)).splitlines())


def table(rows: Sequence[Mapping], columns: Mapping[str, str]) -> str:
    """Rows as aligned text; `columns` maps a row's key to its heading. Words stand left, numbers right."""
    body = [[cell(row.get(key)) for key in columns] for row in rows]
    words = [any(isinstance(row.get(key), str) for row in rows) for key in columns]
    widths = [max(len(line[i]) for line in [list(columns.values()), *body]) for i in range(len(columns))]
    lines = (
        "  ".join(text.ljust(w) if left else text.rjust(w) for text, w, left in zip(line, widths, words, strict=True))
        for line in [list(columns.values()), *body]
    )
    return "\n".join(line.rstrip() for line in lines)


def plain(value: object) -> object:
    """Only what JSON knows: numpy scalars become Python's, NaN and infinity become null, keys become text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def print_json(value: object) -> None:
    """Print valid JSON: never NaN."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def width() -> float:
    """Columns that a line may have: those of the terminal, and any number in a file or a pipe."""
    if "COLUMNS" not in os.environ and (sys.stdout is None or not sys.stdout.isatty()):
        return math.inf
    return shutil.get_terminal_size().columns


def coloured(text: str, code: int) -> str:
    """`text` in an ANSI colour on a terminal that wants it, and unchanged everywhere else."""
    wanted = sys.stdout is not None and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\033[{code}m{text}\033[0m" if wanted and os.environ.get("TERM") != "dumb" else text


@contextlib.contextmanager
def text_file(path: str | None) -> Iterator[Draft | None]:
    """A text file that appears whole or not at all; None for None.

    The place is tried first, so that nobody measures for minutes what cannot be saved. Raises Problem.
    """
    if path is None:
        yield None
        return
    try:
        draft = Draft(path)
    except Unwritable as error:
        raise Problem(str(error)) from error
    try:
        with draft:
            yield draft
    except Unwritable as error:
        raise Problem(str(error), 1) from error


@contextlib.contextmanager
def csv_file(path: str | None) -> Iterator[list[dict]]:
    """Collects rows and writes them to a `text_file` at the end; '-' is standard output, None writes nothing."""
    rows: list[dict] = []
    with text_file(None if path == "-" else path) as place:
        yield rows
        if place:
            place.write(_csv(rows))
    if path == "-":
        print(_csv(rows), end="")


def _csv(rows: Sequence[Mapping]) -> str:
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: "" if plain(item) is None else item for key, item in row.items()} for row in rows)
    return out.getvalue()

"""Tables for people (80 columns, plain text), JSON and CSV for programs."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from ddplab.cli.values import Problem


def cell(value: object) -> str:
    """Text of one table cell: 4 significant digits, and '-' for what is not known."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:#.4g}".rstrip(".")
    return str(value)


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
def csv_file(path: str | None) -> Iterator[list[dict]]:
    """Collects rows and writes them to `path` at the end, whole or not at all.

    The place is tried first, so that nobody measures for minutes what cannot be saved. A device or a pipe is
    written directly; '-' is standard output; None writes nothing. Raises Problem for a place that cannot be written.
    """
    rows: list[dict] = []
    if path is None or path == "-":
        yield rows
        if path:
            print(_csv(rows), end="")
        return
    place = os.path.realpath(path)  # a symbolic link stays one
    try:
        special = os.path.exists(place) and not stat.S_ISREG(os.stat(place).st_mode)
        if special or os.path.exists(place):
            open(place, "a", encoding="utf-8").close()  # a folder or a read-only file refuses here
        if not special:
            handle, draft = tempfile.mkstemp(prefix=".ddplab-", suffix=".csv", dir=os.path.dirname(place))
            os.close(handle)
    except OSError as error:
        raise Problem(f"cannot write '{path}': {error.strerror}") from error
    try:
        yield rows
        try:
            with open(place if special else draft, "w", encoding="utf-8", newline="") as out:
                out.write(_csv(rows))
            if not special:
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(draft, 0o666 & ~umask)  # mkstemp makes it private; a result is an ordinary file
                os.replace(draft, place)
        except OSError as error:
            raise Problem(f"cannot write '{path}': {error.strerror}", 1) from error
    finally:
        if not special:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)


def _csv(rows: Sequence[Mapping]) -> str:
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: "" if plain(item) is None else item for key, item in row.items()} for row in rows)
    return out.getvalue()

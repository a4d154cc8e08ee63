"""What goes wrong with a trace file: one error that says where, and a count of what was left out."""

from __future__ import annotations

import zlib
from pathlib import Path

from ddplab.trace.packed import text_of

EARLY = "the file ends early, was the job killed?"
REMEDY = "; what is whole can be read with partial=True (--partial)"


class TraceError(ValueError):
    """A trace that cannot be read. The message names the file, the place in it and the reason.

    path: the file or folder. line, column: from 1, None where no place can be named. reason: without the place.
    """

    def __init__(self, path: str | Path, reason: str, line: int | None = None, column: int | None = None):
        self.path, self.reason, self.line, self.column = str(path), reason, line, column
        place = f", line {line}, column {column}" if line is not None else ""
        super().__init__(f"{path}{place}: {reason}")


class NotATrace(TraceError):
    """Readable text, but of something else."""


def place(path: str | Path, offset: int) -> tuple[int, int]:
    """(line, column), both from 1, of a byte offset of the uncompressed text. Reads the file again: errors only."""
    line, start, at = 1, 0, 0
    with text_of(path) as text:
        while at < offset:
            try:
                block = text.read(min(1 << 20, offset - at))
            except (EOFError, zlib.error):
                break
            if not block:
                break
            newlines = block.count(b"\n")
            if newlines:
                line += newlines
                start = at + block.rfind(b"\n") + 1
            at += len(block)
    return line, at - start + 1

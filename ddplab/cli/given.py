"""Files that a command reads, standard input among them, and their text on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys

from ddplab.cli.values import Problem


def given(paths: list[str]) -> str | list[str]:
    """What the readers of `ddplab.nccl` take: the paths, or for a single "-" the text of standard input."""
    if "-" not in paths:
        return [os.path.expanduser(path) for path in paths]
    if len(paths) > 1:
        raise Problem("- is standard input; it comes alone")
    if sys.stdin is None:
        raise Problem("there is no standard input", 1)
    data = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
    return data.decode("utf-8", "replace") + "\n"


def apart(option: str, place: str | None, read: list[str]) -> None:
    """A result must not be written over what it is made from. Raises Problem."""
    if place is not None and place != "-":
        for path in read:
            with contextlib.suppress(OSError, ValueError):  # what cannot be looked at is told by who opens it
                if os.path.samefile(place, path):
                    raise Problem(f"{option} '{place}' is read here, and would be lost; name another file")


def printable(text: str) -> str:
    """`text` without control characters, which a terminal would obey, and without endless lines."""
    lines = [line if line.isprintable() else ascii(line)[1:-1] for line in text.split("\n")]
    return "\n".join(line if len(line) <= 400 else line[:400] + " ..." for line in lines)

"""Python stacks as tools write them: faulthandler, py-spy dump, and the traceback of an exception.

From each one we want to know where the rank stood in the user's own code, and in which collective, if any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FAULTHANDLER = re.compile(r'^\s+File "(?P<file>[^"\n]{1,400})", line (?P<line>\d{1,9}),? in (?P<name>.{1,200})$')
_PY_SPY = re.compile(r"^\s+(?P<name>[^\s(][^(]{0,200}?) \((?P<file>[^:()]{1,400}):(?P<line>\d{1,9})\)$")
_THREAD = re.compile(r"^(?:Current thread|Thread) (?:0x)?[0-9a-fA-F]+")
_FRAME = re.compile(r"^(?P<name>.{0,200}?) at (?P<file>.{0,400}):(?P<line>\d+|None)$")
_LIBRARY = re.compile(r"site-packages|dist-packages|[/\\]lib[/\\]python3|^<|(?:^|[/\\])torch[/\\]|importlib")
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list",
    "barrier", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single", "gather", "scatter", "send", "recv",
)  # fmt: skip


@dataclass(frozen=True)
class Stack:
    """frames: (function, file, line), innermost first."""

    frames: tuple[tuple[str, str, int], ...]

    @property
    def place(self) -> str | None:
        """The innermost frame outside of torch and Python's library, as "function, file:line"."""
        return place_of(self.frames)

    @property
    def collective(self) -> str | None:
        """The collective that the rank is in: by name, "backward" for DDP's own, "wait" where only that shows."""
        for name, file, _ in self.frames:
            if not _LIBRARY.search(file):
                return None
            if name in COLLECTIVES and "distributed" in file:
                return name
            if name == "backward" and "autograd" in file or name == "_engine_run_backward":
                return "backward"
        return None


def place_of(frames: Sequence[tuple[str, str, int]]) -> str | None:
    """The innermost frame of the user's own, named by the function it belongs to and not by a comprehension in it."""
    for name, file, line in frames:
        if not _LIBRARY.search(file) and not name.startswith("<") or name == "<module>":
            base = re.split(r"[/\\]", file)[-1]
            return f"{name}, {base}:{line}"
    return None


def frames_of(texts: Sequence[str]) -> tuple[tuple[str, str, int], ...]:
    """Frames of a flight recorder entry: texts "function at file:line"."""
    found = (_FRAME.match(text) for text in texts)
    return tuple((m["name"], m["file"], int(m["line"]) if m["line"] != "None" else 0) for m in found if m)


def in_backward(frames: Sequence[tuple[str, str, int]]) -> bool:
    """Was the call made by DDP's reducer, from inside backward?"""
    return any(name in ("backward", "_engine_run_backward") and "autograd" in file for name, file, _ in frames)


def parse_stacks(lines: Sequence[str]) -> list[Stack]:
    """The main thread of each dump in a text. faulthandler writes it last; py-spy names it."""
    dumps: list[list[tuple[bool, list[tuple[str, str, int]]]]] = []
    threads: list[tuple[bool, list[tuple[str, str, int]]]] = []
    inside = False
    for line in lines:
        if _THREAD.match(line):
            threads.append(("MainThread" in line, []))
            inside = True
        elif inside and (frame := _FAULTHANDLER.match(line) or _PY_SPY.match(line)):
            threads[-1][1].append((frame["name"].strip(), frame["file"], int(frame["line"])))
        elif inside and line.strip() and not line.startswith((" ", "\t")):
            dumps.append(threads)
            threads, inside = [], False
    if threads:
        dumps.append(threads)
    found = []
    for dump in dumps:
        filled = [thread for thread in dump if thread[1]]
        main = [thread for thread in filled if thread[0]] or filled[-1:]
        found += [Stack(tuple(thread[1])) for thread in main[:1]]
    return found


def parse_traceback(lines: Sequence[str]) -> Stack | None:
    """The frames of an exception's traceback, which has the innermost last."""
    frames = [(m["name"], m["file"], int(m["line"])) for m in map(_FAULTHANDLER.match, lines) if m]
    return Stack(tuple(reversed(frames))) if frames else None

"""The remains of a job: which of the files in its folder say something, and what.

A folder may hold anything: dumps of the flight recorder, logs, stacks, traces, checkpoints, a lost photograph. Each
file is looked at once, by its content and not by its name. What cannot be read is named, and the rest is used.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ddplab.flight import is_dump
from ddplab.remains.dumps import Recorder, read_recorders
from ddplab.remains.logs import RankLog, read_log
from ddplab.remains.traces import is_trace

_RANK = re.compile(r"rank[_-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_TEXT_LIMIT = 8 * 2**20  # of each log; of a longer one the start and the end
_MOST_FILES = 20_000


@dataclass
class Remains:
    """recorders and logs, by rank. traces: files of the profiler, not yet read.

    lost: what could not be read, a sentence each. files: how many files said something.
    """

    recorders: dict[int, Recorder] = field(default_factory=dict)
    logs: dict[int, RankLog] = field(default_factory=dict)
    traces: list[Path] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    files: int = 0


def read_remains(folder: Path) -> Remains:
    """Everything that a job left in a folder. FileNotFoundError, NotADirectoryError where there is none."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; give the folder that holds what the job left")
    remains, dumps = Remains(), []
    for path in _walk(folder, remains.lost):
        if is_dump(path):
            dumps.append(path)
            continue
        if is_trace(path):
            remains.traces.append(path)
            continue
        try:
            text = _text(path)
        except OSError as error:
            remains.lost.append(f"{path.name}: {error.strerror}")
            continue
        if text is None:
            continue
        if not text.strip():
            if _RANK.search(path.name) and not path.name.endswith((".log", ".txt", ".out", ".err")):
                remains.lost.append(f"{path.name}: empty; was the job killed while it wrote?")
            continue
        before = sum(log.seen for log in remains.logs.values())
        read_log(text, _rank_of(path), remains.logs)
        remains.files += sum(log.seen for log in remains.logs.values()) > before
    remains.recorders = read_recorders(dumps, remains.lost)
    remains.files += len(remains.recorders) + len(remains.traces)
    return remains


def _walk(folder: Path, lost: list[str]) -> list[Path]:
    """Ordinary files below the folder, sorted; links are not followed, pipes and devices are not opened."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders.sort()
        found += [Path(place, name) for name in sorted(files) if not name.startswith(".")]
        if len(found) > _MOST_FILES:
            lost.append(f"more than {_MOST_FILES} files: only the first were read")
            break
    return [path for path in found[:_MOST_FILES] if path.is_file() and not path.is_symlink()]


def _text(path: Path) -> str | None:
    """The file's text; None where it is no text, or JSON, such as a trace."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(min(size, 4096))
        if b"\0" in head or head.lstrip()[:1] in (b"{",) or head[:2] == b"\x1f\x8b":
            return None
        data = head + file.read(_TEXT_LIMIT // 2 - len(head))
        if size > _TEXT_LIMIT:
            file.seek(-_TEXT_LIMIT // 2, os.SEEK_END)
        data += file.read(_TEXT_LIMIT // 2)
    return data.decode("utf8", errors="replace")


def _rank_of(path: Path) -> int | None:
    """From "...rank_3...", or from a folder as torchrun makes them: .../attempt_0/3/stderr.log."""
    if found := _RANK.findall(path.name):
        return int(found[-1])
    parent = path.parent.name
    return int(parent) if parent.isascii() and parent.isdigit() and len(parent) < 7 else None

"""The remains of a job: which of the files in its folder say something, and what.

A folder may hold anything: dumps of the flight recorder, logs, stacks, traces, checkpoints, a lost photograph. Each
file is looked at once, by its content and not by its name. What cannot be read is named, and the rest is used; so is
what says nothing although its name promises it, such as a dump that is torn at its start.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ddplab._files import is_folder, words
from ddplab.flight import is_dump
from ddplab.remains.dumps import Recorder, read_recorders
from ddplab.remains.logs import RankLog, read_log
from ddplab.remains.traces import is_trace

# What a job's files are called, and endings of those that are never among what is read here.
_PROMISES = re.compile(r"rank[_-]?\d|worker[_-]?\d|trace|flight|stack|py-?spy|stderr|stdout|\.log\b", re.IGNORECASE)
_OTHERS = re.compile(
    r"\.(pt|pth|ckpt|bin|safetensors|onnx|np[yz]|zip|tar|tgz|png|jpe?g|svg|pdf|html|so|pyc?|csv)$", re.I
)
_NO_LOG = re.compile(r"\.(jsonl?|pkl|pickle)$|(trace|flight)[^.]*$", re.IGNORECASE)
_RANK = re.compile(r"rank[_-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_TEXT_LIMIT = 8 * 2**20  # of each log; of a longer one the start and the end
_MOST_FILES = 20_000


@dataclass
class Remains:
    """recorders and logs, by rank. traces: files of the profiler, not yet read.

    lost: what could not be read, a sentence each. files: how many files said something, without the traces.
    silent: text files in which no line is about a rank.
    """

    recorders: dict[int, Recorder] = field(default_factory=dict)
    logs: dict[int, RankLog] = field(default_factory=dict)
    traces: list[Path] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    files: int = 0
    silent: list[str] = field(default_factory=list)


def read_remains(folder: Path) -> Remains:
    """Everything that a job left in a folder. FileNotFoundError, NotADirectoryError where there is none."""
    try:
        here = is_folder(folder)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} does not exist") from None
    except OSError as error:
        raise type(error)(f"cannot read '{folder}': {words(error)}") from None
    if not here:
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
            text, why_not = _text(path)
        except OSError as error:
            remains.lost.append(f"{path}: cannot be read: {words(error)}")
            continue
        if why_not:
            _promised(path, why_not, remains.lost)
        elif not text.strip():
            if not path.name.endswith((".log", ".txt", ".out", ".err")):  # of which many stay empty
                _promised(path, "empty; was the job killed while it wrote?", remains.lost)
        else:
            before = sum(log.seen for log in remains.logs.values())
            read_log(text, _rank_of(path), remains.logs)
            said = sum(log.seen for log in remains.logs.values()) > before
            remains.files += said
            remains.silent += [] if said else [path.name]
    remains.recorders = read_recorders(dumps, remains.lost)
    remains.files += len(remains.recorders)
    return remains


def _promised(path: Path, reason: str, lost: list[str]) -> None:
    """A file that says nothing is lost where its name promises something, and foreign otherwise."""
    if _PROMISES.search(path.name) and not _OTHERS.search(path.name):
        lost.append(f"{path}: {reason}")


def _walk(folder: Path, lost: list[str]) -> list[Path]:
    """Ordinary files below the folder, sorted; links are not followed, pipes and devices are not opened."""
    found: list[Path] = []
    for place, folders, files in os.walk(
        folder, onerror=lambda error: lost.append(f"{error.filename}: cannot be read: {words(error)}")
    ):
        folders.sort()
        found += [Path(place, name) for name in sorted(files) if not name.startswith(".")]
        if len(found) > _MOST_FILES:
            lost.append(f"more than {_MOST_FILES} files: only the first were read")
            break
    plain = [path for path in found[:_MOST_FILES] if os.path.isfile(path) and not os.path.islink(path)]
    for path in sorted({*found[:_MOST_FILES]} - {*plain}):
        _promised(path, "a link, a pipe or a device, which is not followed; put the file itself here", lost)
    return plain


def _text(path: Path) -> tuple[str, str]:
    """The file's text, and why there is none: it is no text, or JSON, such as a dump or a trace without its start."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(min(size, 4096))
        if head[:2] == b"\x1f\x8b":
            return "", "packed, and neither a dump nor a trace begins in it: damaged, or a log, which must be unpacked"
        if b"\0" in head:
            return "", "not text, and no dump: is its start torn or overwritten?"
        if head.lstrip()[:1] == b"{":
            return "", "JSON, but neither a dump of the flight recorder nor a trace: is its start torn?"
        if head.strip() and _NO_LOG.search(path.name):
            return "", "its name says dump or trace, but neither begins in it: is its start torn?"
        data = head + file.read(_TEXT_LIMIT // 2 - len(head))
        if size > _TEXT_LIMIT:
            file.seek(-_TEXT_LIMIT // 2, os.SEEK_END)
        data += file.read(_TEXT_LIMIT // 2)
    return data.decode("utf8", errors="replace"), ""


def _rank_of(path: Path) -> int | None:
    """From "...rank_3...", or from a folder as torchrun makes them: .../attempt_0/3/stderr.log."""
    if found := _RANK.findall(path.name):
        return int(found[-1])
    parent = path.parent.name
    return int(parent) if parent.isascii() and parent.isdigit() and len(parent) < 7 else None

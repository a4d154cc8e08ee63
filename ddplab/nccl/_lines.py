"""From a heap of text to NCCL's single lines: who said them, at which level.

Many ranks share a terminal. A launcher puts labels in front, a program's unfinished line stands glued before NCCL's,
two of NCCL's lines may stand in one. The form of a line is that of src/debug.cc, of NCCL 2.8 to 2.30.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LEVELS = "INFO|WARN|CALL|TRACE"
# [timestamp] host:pid:tid [device] milliseconds file:line (function) NCCL LEVEL
PREFIX = re.compile(
    r"(?:\[(?P<time>\d{4}-[^\]]{1,60}|[^\]]{0,40}\d\d:\d\d:\d\d[^\]]{0,20})\] )?"
    r"(?P<host>[^\s:\[\]<>()]{1,255}):(?P<pid>\d{1,10}):(?P<tid>\d{1,20})"
    r"(?: \[(?P<device>\d{1,9})\])?(?: \d{1,15}\.\d{1,9})?"
    rf"(?: (?P<place>[^\s:]{{1,200}}:\d{{1,7}})(?: \((?P<function>[^)]{{0,200}})\))?)? NCCL (?P<level>{LEVELS})(?: |$)"
)
_MARK = re.compile(rf" NCCL (?:{LEVELS})(?= |$)")
_REACH = 800  # characters before a mark in which its prefix is looked for: keeps a line of megabytes linear
# At the front of a line: srun -l, pdsh and clush, docker compose, the time stamps of kubectl logs. Anywhere, because
# they come with each write: mpirun --tag-output, torchrun, Ray.
_LABEL = re.compile(
    r"^\s*\d+: |^[\w.-]+: |^[\w.-]+ +\| |^\d{4}-\d\d-\d\dT\S+ |"
    r"\[\d+,\d+\](?:<std(?:out|err)>)?:? ?|\[(?:rank|default)?\d+\]: ?|\([^()]{1,80} pid=\d+[^()]{0,80}\) ?"
)
VERSION = re.compile(r"NCCL version (\d{1,3})\.(\d{1,3})\.(\d{1,3})\S*")


@dataclass(slots=True)
class Line:
    """One line of NCCL: number (of the text's line, from 1), file, host, pid, tid, device (None in CALL lines), level,
    text; time, place (file:line) and function where the line has them."""

    number: int
    file: str
    host: str
    pid: int
    tid: int
    device: int | None
    level: str
    text: str
    time: str | None = None
    place: str | None = None
    function: str | None = None


def strip_labels(line: str) -> str:
    """`line` without a launcher's labels."""
    return _LABEL.sub("", line)


def lines_of(files: Iterable[tuple[str, str]]) -> list[Line]:
    """NCCL's lines in (name, text) pairs, in order; what else stands there is left out.

    Where foreign characters are glued to a host's name, the name is repaired from lines that stand alone, and what was
    in front goes back to the line before.
    """
    lines: list[Line] = []
    clean: set[str] = set()
    glued: list[tuple[Line, Line | None]] = []
    for name, text in files:
        for number, raw in enumerate(text.splitlines(), 1):
            before: Line | None = None
            for line, alone in _split(raw, number, name):
                if alone:
                    clean.add(line.host)
                else:
                    glued.append((line, before))
                lines.append(line)
                before = line
    names = sorted(clean, key=len, reverse=True)
    for line, before in glued:
        host = next((host for host in names if line.host.endswith(host)), line.host)
        if before is not None:
            before.text += line.host[: len(line.host) - len(host)]
        line.host = host
    return lines


def _split(raw: str, number: int, name: str) -> Iterator[tuple[Line, bool]]:
    """The NCCL lines in one line of text, each with whether it stands alone in it (labels aside)."""
    marks = raw.count(" NCCL ")
    if not marks:
        return
    if marks == 1 and (match := PREFIX.match(raw)):  # nearly every line
        yield _line(match, raw[match.end() :].rstrip(), number, name), True
        return
    found = []
    end = 0
    for mark in _MARK.finditer(raw):
        start = max(end, mark.start() - _REACH)
        match = None
        for match in PREFIX.finditer(raw, start, min(len(raw), mark.end() + 1)):
            if match.end() >= mark.end():
                break
        if match is not None and match.end() >= mark.end():
            found.append(match)
            end = match.end()
    for i, match in enumerate(found):
        stop = found[i + 1].start() if i + 1 < len(found) else len(raw)
        front = strip_labels(raw[: match.start()])
        text = raw[match.end() : stop].rstrip() if i + 1 == len(found) else raw[match.end() : stop]
        alone = not front.strip() and (match.start() == 0 or not raw[match.start() - 1].isalnum())
        yield _line(match, text, number, name), alone


def _line(match: re.Match, text: str, number: int, name: str) -> Line:
    time, host, pid, tid, device, place, function, level = match.groups()
    device = None if device is None else int(device)
    return Line(number, name, host, int(pid), int(tid), device, level, text, time, place, function)

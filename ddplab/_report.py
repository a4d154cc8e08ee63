"""What the caller reads of a launch: each rank's output, and one error that names the rank where it began."""

from __future__ import annotations

import linecache
import re
import signal
from typing import Any

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_OWN = re.compile(r"ddplab/(_rank|_child|_supervisor|_forkserver)\.py$")
_LAST_LINES, _LINE_LIMIT = 5, 300


class RankError(RuntimeError):
    """Ranks failed, died or did not answer in time.

    rank: the one where it began, None where that cannot be told (a hang of several ranks).
    traceback: that rank's Python traceback, or the stacks of the ranks that hang.
    consequences: one line for each other rank that failed too, most often because it lost its peer.
    """

    def __init__(
        self, message: str, rank: int | None = None, traceback: str = "", consequences: list[str] | None = None
    ):
        super().__init__(message)
        self.rank, self.traceback, self.consequences = rank, traceback, consequences or []


def output(reports: list[dict[str, Any]]) -> str:
    """Everything the ranks printed, rank by rank, as "[rank] line"."""
    lines = []
    for report in reports:
        for line in report["output"].rstrip("\n").split("\n") if report["output"].strip() else []:
            lines.append(f"[{report['rank']}] " + line.rstrip("\r").rsplit("\r", 1)[-1])  # a progress bar's last state
    return "".join(f"{line}\n" for line in lines)


def failure(reports: list[dict[str, Any]]) -> RankError:
    """The error of a launch in which ranks failed or died: the first real cause first."""
    failed = [report for report in reports if report["state"] in ("failed", "died")]
    first = min(failed, key=lambda report: (bool(report["failure"].get("secondary")), report["time"]))
    others = {report["rank"]: _summary(report) for report in failed if report is not first}
    alike = [rank for rank, summary in others.items() if summary == _summary(first)]
    lines = {rank: f"rank {rank}: {summary}" for rank, summary in others.items()}
    text = first["failure"].get("traceback") or _stack(first["stack"])
    message = f"rank {first['rank']}: {_summary(first)}"
    if text:
        message += f"\n\n{text.rstrip()}"
    if alike:
        message += f"\n\nThe same on {_names(alike)}."
    if later := [line for rank, line in lines.items() if rank not in alike]:
        message += "\n\nAs a consequence, or later:\n" + "\n".join(f"  {line}" for line in later)
    return RankError(message, first["rank"], text, list(lines.values()))


def hang(reports: list[dict[str, Any]], timeout: float) -> RankError:
    """The error of a launch that ran out of time: who answered, who did not, and where those are."""
    pending = [report for report in reports if report["state"] in ("starting", "joining", "running")]
    absent = [report["rank"] for report in pending if report["state"] == "starting"]
    joining = [report for report in pending if report["state"] == "joining"]
    message = f"no answer within {timeout:g} s from {_names([report['rank'] for report in pending])} of {len(reports)}"
    if absent:
        message += (
            f"; {_names(absent)} never arrived: "
            f"{len(reports) - len(absent)} of {len(reports)} ranks came to the rendezvous"
        )
    elif joining:
        message += f"; {_names([report['rank'] for report in joining])} cannot reach the others"
    elif returned := [report["rank"] for report in reports if report["state"] == "returned"]:
        message += f"; {_names(returned)} returned already"
    groups: dict[str, list[int]] = {}
    for report in pending:
        stack = _stack(report["stack"]) or "  (no Python stack: the rank does not react)"
        groups.setdefault(stack, []).append(report["rank"])
    stacks = "\n".join(f"{_names(ranks)}, most recent call first:\n{stack}" for stack, ranks in groups.items())
    culprits = absent or [report["rank"] for report in pending]
    return RankError(f"{message}\n\n{stacks}", culprits[0] if len(culprits) == 1 else None, stacks)


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _summary(report: dict[str, Any]) -> str:
    if report["state"] == "failed":
        # gloo: "[/path/pair.cc:561] Connection closed by peer ... This is typically caused by ..."
        line = re.sub(r"\[/\S+:\d+\] ", "", report["failure"]["summary"]).partition(" This is typically caused")[0]
        return line if len(line) <= _LINE_LIMIT else line[:_LINE_LIMIT] + " ..."
    status = report["status"]
    if status >= 0:
        how = f"exit code {status}"
    else:
        how = f"killed by {signal.Signals(-status).name} (signal {-status})"
        if -status == signal.SIGKILL:
            how += ", as the kernel does when memory runs out"
    last = [line for line in report["output"].splitlines() if line.strip()][-_LAST_LINES:]
    return f"died without a word: {how}" + ("; the last it printed:\n    " + "\n    ".join(last) if last else "")


def _stack(text: str) -> str:
    """faulthandler's dump of a rank, with source lines, without thread numbers and without our own frames."""
    lines: list[str] = []
    own, frames = False, 0
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            lines += ["  another thread:"] if frames else []
            own = False
        elif frame := _FRAME.fullmatch(line):
            frames += 1
            own = own or bool(_OWN.search(frame["file"]))
            source = linecache.getline(frame["file"], int(frame["line"])).strip()
            lines += [] if own else [line, f"    {source}"] if source else [line]
        elif line.startswith("Fatal Python error"):
            lines.append(line)
    return "\n".join(lines)

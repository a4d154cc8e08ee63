"""What the logs of a job say about each rank: how far it came, how it ended, and the few messages that name a fault.

Read are stderr files of one rank each (the rank is in the file's name, or the folder's, as torchrun writes them),
and files of many ranks with "[rank3]:" or "[3]" before each line; lines without a rank are the launcher's. The texts
are those of torch 2.9 to 2.14 (c10d, DDP, torchrun), gloo and our own launcher.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from ddplab.remains.stacks import Stack, parse_stacks, parse_traceback

_PREFIX = re.compile(r"^(?:\[(?:default|rank)?(\d{1,6})\]:?\s?)")
_STEP = re.compile(r"\b(?:step|iteration|iter)[ =:#]{1,3}(\d{1,12})\b", re.IGNORECASE)
_FINISHED = re.compile(
    r"\b(?:training|epoch|run|job)\b[^\n]{0,40}?\b(?:finished|done|completed?|ended)\b", re.IGNORECASE
)
_ERROR = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Warning|StopIteration))(?::\s?(.*))?$")
_CONSEQUENCE = re.compile(
    r"connection (?:was )?(?:closed|reset|refused)|broken pipe|timed? ?out|remote process|connection was likely closed|"
    r"monitoredbarrier|detected mismatch|recvvalue failed|nccl (?:communicator|error)|ncclremoteerror|socket|"
    r"signalexception|sigterm|gloo[/\\]",
    re.IGNORECASE,
)
_KILLED = re.compile(r"rank (\d+): died without a word: (?:killed by (SIG\w+)|exit code (\d+))")
_TORCHRUN_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank")
_TORCHRUN_EXIT = re.compile(r"^\s*exitcode\s*: (-?\d+) ")
_UNUSED = re.compile(r"did not receive grad for rank (\d+)\s*:?\s*([\w., ]{0,400})")
_BARRIER = re.compile(r"(?:Ranks? |rank )((?:\d+(?:, )?)+) failed to pass monitoredBarrier")
_FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=(\d+), OpType=(\w+)"
    r"(?:, TensorShape=\[([\d, ]*)\])?(?:, TensorDtypes=(\w*))?"
)
_WATCHDOG = re.compile(
    r"collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+), NumelOut=(\d+)"
)
TOO_LONG = "op.preamble.length <= op.nbytes"  # gloo: a message is longer than the buffer that waits for it
_SIGNALS = {6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d{3,6}")
_LONGEST_LINE = 20_000
_NEAR_NS = 600 * 10**9  # beyond this, log and recorder are from other days or other time zones
_TICK_NS = 10**6  # logs tell milliseconds


@dataclass(frozen=True)
class Said:
    """A collective that a message names. seq: of its group, as torch counts. sizes: shape, or (elements,)."""

    seq: int
    name: str
    sizes: tuple[int, ...] | None
    dtype: str | None
    line: str


@dataclass
class RankLog:
    """What the logs say about one rank. Texts are the lines themselves, shortened."""

    steps: list[tuple[int, int | None]] = field(default_factory=list)  # begun; nanoseconds since 1970, where told
    finished: str | None = None
    error: str | None = None  # last line of its first traceback
    consequence: bool = False  # that error is a lost peer or a timeout, so its cause is elsewhere
    error_at: Stack | None = None
    signal: str | None = None  # that ended it
    aborted: str | None = None  # gloo found a message that does not fit
    unused: str | None = None  # DDP: parameters without a gradient
    unused_line: str | None = None
    late_for_barrier: str | None = None  # monitored_barrier names it
    said: list[Said] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    seen: bool = False  # it has a log, or is mentioned as one that died

    def step_at(self, ns: int | None) -> int | None:
        """The step that the rank was in at a time; the last that it began, where the log has no usable times."""
        if not self.steps:
            return None
        timed = [(step, at) for step, at in self.steps if at is not None]
        if ns is None or not timed or not timed[0][1] - _NEAR_NS < ns < timed[-1][1] + _NEAR_NS:
            return self.steps[-1][0]
        return max((pair for pair in timed if pair[1] <= ns + _TICK_NS), key=lambda p: p[1], default=timed[0])[0]


def read_log(text: str, rank: int | None, logs: dict[int, RankLog]) -> None:
    """Add to `logs` what one file says. rank: whose file it is, None where many write or the launcher does."""
    per_rank: dict[int, list[str]] = {}
    launcher: list[str] = []
    for line in text.splitlines():
        line = line[:_LONGEST_LINE]
        prefix = _PREFIX.match(line)
        if rank is not None:
            # A rank's own file: torch repeats "[rank2]:" before the lines of an uncaught exception.
            per_rank.setdefault(rank, []).append(line[prefix.end() :] if prefix else line)
        elif prefix and line[prefix.end() :].strip():  # torchrun numbers its list of failures "[0]:"
            per_rank.setdefault(int(prefix[1]), []).append(line[prefix.end() :])
        else:
            launcher.append(line)
    for one, lines in per_rank.items():
        _read_rank(lines, one, logs.setdefault(one, RankLog()), logs)
    _read_launcher(launcher, logs)


def _read_rank(lines: list[str], rank: int, log: RankLog, logs: dict[int, RankLog]) -> None:
    log.seen = True
    log.stacks += parse_stacks(lines)
    for line in lines:
        if step := _STEP.search(line):
            log.steps.append((int(step[1]), _time_ns(line)))
            log.finished = None  # an epoch ended, and another began
        if _FINISHED.search(line):
            log.finished = shorten(line)
        if line.startswith(("Fatal Python error: Aborted", "terminate called")):
            log.signal = log.signal or "SIGABRT"
        if line.startswith("Fatal Python error: Segmentation"):
            log.signal = log.signal or "SIGSEGV"
        if TOO_LONG in line:
            log.aborted = shorten(line[max(0, line.find(TOO_LONG) - 20) :])
        _messages(line, rank, logs)
    if log.error is None:
        for block in _tracebacks(lines):
            found = next((m for m in map(_ERROR.match, reversed(block)) if m), None)
            if found:
                log.error = shorten(found[0])
                log.consequence = bool(_CONSEQUENCE.search("\n".join(block[-12:])))
                log.error_at = parse_traceback(block)
                break


def _tracebacks(lines: list[str]) -> Iterator[list[str]]:
    """Each traceback with the lines of its message, up to the next line that a logger or a new traceback begins."""
    start = None
    for i, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            if start is not None:
                yield lines[start:i]
            start = i
        elif start is not None and re.match(r"\d{4}-\d\d-\d\d |\[?[WEIF]\d{4} ", line):
            yield lines[start:i]
            start = None
    if start is not None:
        yield lines[start : start + 400]


def _messages(line: str, rank: int | None, logs: dict[int, RankLog]) -> None:
    """The texts that name a rank, whoever wrote them."""
    if unused := _UNUSED.search(line):
        one = logs.setdefault(int(unused[1]), RankLog())
        one.unused, one.unused_line = unused[2].strip(" .,:"), shorten(unused[0])
    if barrier := _BARRIER.search(line):
        for named in barrier[1].split(", "):
            logs.setdefault(int(named), RankLog()).late_for_barrier = shorten(line)
    for found in _FINGERPRINT.finditer(line):
        named, seq, name, shape, dtype = found.groups()
        sizes = tuple(int(n) for n in re.findall(r"\d+", shape)) if shape is not None else None
        # A fingerprint counts the calls before it; the flight recorder numbers them from 1.
        said = Said(int(seq) + 1, _torch_name(name), sizes, dtype, shorten(found[0]))
        logs.setdefault(int(named), RankLog()).said.append(said)
    if (found := _WATCHDOG.search(line)) and rank is not None:
        seq, name, numel, _ = found.groups()
        logs.setdefault(rank, RankLog()).said.append(
            Said(int(seq), _torch_name(name), (int(numel),), None, shorten(found[0]))
        )


def _read_launcher(lines: list[str], logs: dict[int, RankLog]) -> None:
    named = None
    for line in lines:
        for killed in _KILLED.finditer(line):
            log = logs.setdefault(int(killed[1]), RankLog())
            log.signal, log.seen = killed[2] or f"exit code {killed[3]}", True
        if found := _TORCHRUN_RANK.match(line):
            named = int(found[1])
        elif (found := _TORCHRUN_EXIT.match(line)) and named is not None:
            code = int(found[1])
            if code < 0:
                log = logs.setdefault(named, RankLog())
                log.signal, log.seen = _SIGNALS.get(-code, f"signal {-code}"), True
            named = None
        _messages(line, None, logs)


def _time_ns(line: str) -> int | None:
    """The time at the start of a line, which loggers write in the machine's own zone."""
    if not (found := _TIME.match(line)):
        return None
    try:
        moment = datetime.fromisoformat(found[0].replace(",", "."))
        return int(moment.timestamp() * 1e6) * 1000
    except (ValueError, OverflowError, OSError):
        return None


def _torch_name(op: str) -> str:
    """The name of a collective as the flight recorder has it: ALLREDUCE -> all_reduce."""
    known = {
        "ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "_all_gather_base",
        "REDUCE_SCATTER": "reduce_scatter", "_REDUCE_SCATTER_BASE": "_reduce_scatter_base", "ALLTOALL": "all_to_all",
        "ALLTOALL_BASE": "all_to_all",
    }  # fmt: skip
    return known.get(op.upper(), op.lower())


def shorten(line: str, most: int = 240) -> str:
    line = " ".join(line.split())
    return line if len(line) <= most else line[: most - 4] + " ..."

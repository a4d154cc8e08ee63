"""Why did the job hang, or die, or crawl? From what it left in a folder, and from nothing else.

    found = why("remains/")
    print(found)            # the fault, the rank, the collective; the lines that show it; what to do
    found.kind, found.ranks, found.operation, found.seq, found.step

The order of the questions matters. A message that names a fault counts first. Then comes the first number under which
the ranks' sequences of collectives differ: everything later is a consequence. Then the ranks that are missing there:
killed, raised, finished, or elsewhere. Last, who was late. A job without a finding is not accused of anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddplab.remains.calls import Call, Group, groups_of
from ddplab.remains.diverge import Finding, behind, explain_lost, explain_mismatch, first_mismatch, names, waits_in
from ddplab.remains.files import Remains, read_remains
from ddplab.remains.fixes import FIXES, TITLES
from ddplab.remains.late import latecomer
from ddplab.remains.logs import RankLog
from ddplab.remains.traces import Traces, read_traces

__all__ = ["Diagnosis", "why"]


@dataclass(frozen=True)
class Diagnosis:
    """What happened to a job.

    kind: one of `ddplab.faults.FAULTS`, or "exception", "mismatch" (no majority says who is wrong), "no_show" (a rank
    did not come, and nothing tells why), "stuck" (all wait in the same collective); None where nothing is wrong, or
    nothing can be told (see evidence).
    ranks: who did it.  operation: the collective that it concerns, by torch's name.  sizes: its shapes, as the healthy
    ranks have them.  seq: its number in its process group.  step: of the training, from the logs.
    where: the place in the program, of the rank at fault.  evidence: the lines that show it.  fix: what to do.
    lost: files that could not be read.  notes: what was guessed or is odd.  read: how many files said something.
    """

    kind: str | None
    ranks: tuple[int, ...] = ()
    operation: str | None = None
    sizes: tuple = ()
    seq: int | None = None
    group: str | None = None
    step: int | None = None
    where: str | None = None
    evidence: tuple[str, ...] = ()
    fix: str = ""
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    read: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.kind is None:
            part = " in what could be read" if self.lost else ""
            head = f"No fault found{part}." if self.read else "Nothing could be read, so nothing can be told."
        else:
            at = f" in step {self.step}" if self.step is not None else ""
            who = f": {names(self.ranks)}" if self.ranks else ""
            head = f"{TITLES[self.kind]}{who}{at}"
            if self.operation:
                head += f", at {self.operation}" + (f" (number {self.seq})" if self.seq is not None else "")
        lines = [head, *(f"  - {line}" for line in self.evidence)]
        lines += [f"What to do: {self.fix}"] if self.fix else []
        lines += [f"Not read: {line}" for line in self.lost]
        return "\n".join(lines + [f"Note: {line}" for line in self.notes])


def why(folder: str | Path) -> Diagnosis:
    """Read what a job left in `folder` and name the fault.

    Flight recorder dumps, logs, stacks, crash reports and profiler traces of any ranks, in any layout; other files are
    left alone. Never raises for a file's content. FileNotFoundError or NotADirectoryError where there is no such
    folder, OSError where it cannot be read.
    """
    if not os.fspath(folder):
        raise FileNotFoundError("the path is empty; name the folder that holds what the job left")
    remains = read_remains(Path(folder))
    groups = groups_of(remains.recorders, remains.logs)
    # Without any flight recorder, the logs alone: a group of which nobody's calls are known.
    finding, group = _find(groups or [Group("", "", tuple(sorted(remains.logs)), {})], remains)
    traces = Traces()
    if finding is None and remains.traces:
        traces = read_traces(remains.traces, remains.lost)
        finding = traces.finding
    lost, read = tuple(remains.lost), remains.files + traces.ranks
    if finding is None:
        return Diagnosis(
            None, evidence=_nothing(groups, remains, traces.ranks), lost=lost, notes=traces.notes, read=read
        )
    call, rank = finding.call, finding.ranks[0] if finding.ranks else None
    log = remains.logs.get(rank, RankLog()) if rank is not None else RankLog()
    mine = group.calls.get(rank, {}).get(call.seq) if group and call else None
    caller = remains.logs.get(call.rank) if call else None  # often a healthy rank, which is still in that step
    return Diagnosis(
        finding.kind,
        finding.ranks,
        call.name if call else None,
        call.sizes if call else (),
        call.seq if call else None,
        group.title if group and group.calls else None,
        caller.step_at(call.created_ns) if call and caller else log.step_at(None),
        mine.place if mine else _place(log),
        finding.evidence,
        FIXES[finding.kind],
        lost,
        traces.notes,
        read,
    )


def _find(groups: list[Group], remains: Remains) -> tuple[Finding | None, Group | None]:
    for group in groups:
        if (finding := _named_by_ddp(group, remains.logs)) is not None:
            return finding, group
    for group in groups:
        if (seq := first_mismatch(group)) is not None:
            return explain_mismatch(group, seq), group
    for group in groups:
        if (finding := _missing(group, remains.logs)) is not None:
            return finding, group
    for group in groups:
        if (late := latecomer(group)) is not None:
            share = late.seconds / late.span_s
            line = f"{late.times} times the others waited for rank {late.rank}, {late.seconds:.2f} s in all: "
            line += f"{share:.0%} of the {late.span_s:.2f} s on record"
            first = f"most of it at {late.call}" + (f" in {late.call.place}" if late.call.place else "")
            return Finding("slow_rank", (late.rank,), late.call, (line, first)), group
    return None, None


def _named_by_ddp(group: Group, logs: Mapping[int, RankLog]) -> Finding | None:
    """DDP names the rank by itself, where it comes to that: parameters without a gradient in the last iteration."""
    found = {rank: log for rank, log in logs.items() if log.unused is not None}
    if not found:
        return None
    seq = first_mismatch(group)
    call = explain_mismatch(group, seq).call if seq is not None else waits_in(group)
    lines = tuple(f"rank {rank}: DDP says: {log.unused_line}" for rank, log in sorted(found.items()))
    return Finding("unused_parameter", tuple(sorted(found)), call, lines)


def _missing(group: Group, logs: Mapping[int, RankLog]) -> Finding | None:
    """The sequences agree as far as they go. Whom do the others wait for, and where is it?"""
    call = waits_in(group)
    everyone = set(group.ranks) | set(logs) if len(logs) <= 4096 else set(group.ranks)
    raised = [r for r in sorted(everyone) if (log := logs.get(r)) and log.error and not log.consequence]
    if raised and (len(raised) < len(everyone) or len(everyone) == 1):
        lines = tuple(f"rank {r}: {logs[r].error}" for r in raised)
        return Finding("exception", tuple(raised), call, lines)
    # A launcher that ends a job sends SIGTERM to those that still live.
    killed = [r for r in sorted(everyone) if (one := logs.get(r)) and one.signal not in (None, "SIGTERM", "SIGABRT")]
    if killed:
        return _gone(killed, call, logs)
    for rank in sorted(everyone):
        log = logs.get(rank, RankLog())
        if _victim(log) and rank not in group.calls:
            at = (log.stacks[-1:] or [log.error_at])[0]
            found = explain_lost(group, rank, at and at.place, at and at.collective, log.aborted or log.signal or "")
            if found:
                return found
    if not _trouble(group, logs):
        return None
    seq, last = behind(group)
    absent = tuple(sorted(set(group.ranks) - set(group.calls)))
    if seq is not None:
        return _behind(group, last, call, logs)
    if absent and group.calls and (finding := _absent(absent, call, logs)):
        return finding
    named = tuple(sorted(r for r, log in logs.items() if log.late_for_barrier))
    if named:
        return Finding("slow_rank", named, call, tuple(logs[r].late_for_barrier or "" for r in named))
    if call is not None and not call.done:
        where = f"all of {names(sorted(group.calls))} are in number {call.seq} of {group.title}, {call}"
        return Finding("stuck", (), call, (where, "no rank is missing and none called anything else"))
    return None


def _behind(group: Group, last: tuple[int, ...], call: Call | None, logs: Mapping[int, RankLog]) -> Finding:
    """Ranks that stop before a collective in which the others wait."""
    ahead = [rank for rank in sorted(group.calls) if rank not in last]
    missed = group.at(max(group.calls[last[0]]) + 1)
    call = missed[min(missed)] if missed else call
    head = f"{names(ahead)} wait in {call}, number {call.seq} of {group.title}" + (
        f" ({call.place})" if call.place else ""
    )
    done = [rank for rank in last if (log := logs.get(rank)) and log.finished]
    if done:
        lines = (head, *(f"rank {rank} has ended: {logs[rank].finished}" for rank in done))
        return Finding("unequal_batches", tuple(done), call, lines)
    lines = [head]
    for rank in last:
        log = logs.get(rank, RankLog())
        at = (log.stacks[-1:] or [log.error_at])[0]
        where = f"rank {rank} has not called it"
        if at and at.place:
            where += f"; it is in {at.place}" + (f", in {at.collective}" if at.collective else ", in no collective")
        lines.append(where)
    seen = any((log := logs.get(rank)) and (log.stacks or log.error_at) for rank in last)
    return Finding("slow_rank" if seen else "no_show", last, call, tuple(lines))


def _absent(absent: tuple[int, ...], call: Call | None, logs: Mapping[int, RankLog]) -> Finding | None:
    """Ranks without a flight recorder, while the others wait. Their logs tell who went home, and who failed later."""
    done = tuple(rank for rank in absent if (log := logs.get(rank)) and log.finished)
    if done:
        lines = (f"rank {rank} has ended: {logs[rank].finished}" for rank in done)
        return Finding("unequal_batches", done, call, (f"the others wait in {call}", *lines))
    silent = [rank for rank in absent if not ((log := logs.get(rank)) and log.error)]
    if silent and any(log.seen for log in logs.values()):
        return _gone(silent, call, logs)
    if silent:
        line = f"{names(silent)} left no flight recorder and no log: dead, or the files are lost"
        return Finding("no_show", tuple(silent), call, (line,))
    return None


def _gone(ranks: list[int], call: Call | None, logs: Mapping[int, RankLog]) -> Finding:
    lines = []
    for rank in ranks:
        log = logs.get(rank, RankLog())
        if log.signal:
            how = f"was ended by {log.signal}" if log.signal.startswith(("SIG", "signal")) else f"ended: {log.signal}"
        else:
            how = "left no flight recorder"
        said = f"; its log stops in step {log.steps[-1][0]}" if log.steps else ""
        lines.append(f"rank {rank} {how}{said}, without an error of its own")
    if call is not None:
        lines.append(f"the others wait in {call}" + (f" in {call.place}" if call.place else ""))
    return Finding("rank_gone", tuple(ranks), call, tuple(lines))


def _victim(log: RankLog) -> bool:
    """Did gloo end this process because a message did not fit? Then the message is the news, not the death."""
    return log.aborted is not None or log.signal == "SIGABRT"


def _trouble(group: Group, logs: Mapping[int, RankLog]) -> bool:
    """Is there any sign that the job did not end well? A folder of a job that still runs looks uneven, too."""
    failed = any(log.error or log.signal or log.late_for_barrier or log.stacks for log in logs.values())
    timed_out = any(call.created_ns and not call.done for calls in group.calls.values() for call in calls.values())
    return failed or timed_out


def _place(log: RankLog) -> str | None:
    at = (log.stacks[-1:] or [log.error_at])[0]
    return at.place if at else None


def _nothing(groups: list[Group], remains: Remains, traces: int) -> tuple[str, ...]:
    """Why nobody is accused: nothing was there, nothing could be read, or what was read is in order."""
    lines = []
    if groups:
        ranks = sorted({rank for group in groups for rank in group.calls})
        number = sum(len(calls) for group in groups for calls in group.calls.values())
        lines.append(f"{number} collectives of {names(ranks)}: the sequences agree, and nobody was late for long")
    elif remains.recorders:
        lines.append(f"the flight recorders of {names(sorted(remains.recorders))} hold no collective")
    if remains.logs:
        failed = {rank: log.error for rank, log in remains.logs.items() if log.error}
        said = [f"rank {rank}: {error}, and nothing says why" for rank, error in sorted(failed.items())]
        lines += said or [f"logs of {names(sorted(remains.logs))}: no error"]
    if traces > 1:
        lines.append(f"{traces} traces: no rank for which others waited long; `ddplab trace` says where the time went")
    elif traces:
        lines.append("1 trace: alone it cannot tell who came late; `ddplab trace` says where its time went")
    if not lines and remains.silent:
        listed = ", ".join(remains.silent[:3]) + (" ..." if len(remains.silent) > 3 else "")
        lines.append(
            f"no line of {listed} says of which rank it is; name the file rank_3.log, say, or use torchrun's -r 3"
        )
    if not lines and not remains.lost:
        lines.append("the folder holds no flight recorder, log, stack or trace: nothing can be told")
    elif not lines:
        lines.append("none of what the job left could be read: get these files whole and readable, and ask again")
    return tuple(lines)

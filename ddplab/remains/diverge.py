"""Where the ranks' sequences of collectives part: the first number under which they differ, or that some never reach.

Everything after that point is a consequence. Which rank is the odd one is told by the majority; where there is none,
by what the sequence did before, since a training repeats itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddplab.remains.calls import Call, Group, Signature, forecast, majority

_AHEAD = 24  # calls of the reference to look at: about a step


@dataclass(frozen=True)
class Finding:
    """A fault: its kind, the ranks that did it, the collective it concerns, and the lines that show it."""

    kind: str
    ranks: tuple[int, ...]
    call: Call | None
    evidence: tuple[str, ...]


def first_mismatch(group: Group) -> int | None:
    """The first sequence number under which two ranks called different things; None without one."""
    for seq in sorted({seq for calls in group.calls.values() for seq in calls}):
        if len({call.signature for call in group.at(seq).values()}) > 1:
            return seq
    return None


def explain_mismatch(group: Group, seq: int) -> Finding:
    """What the odd ranks did at `seq`, where the others did something else."""
    at = group.at(seq)
    history = _history(group, seq)
    reference = majority(at) or _expected(history, at)
    if reference is None:
        listed = ", ".join(f"rank {rank}: {call}" for rank, call in sorted(at.items()))
        return Finding("mismatch", tuple(sorted(at)), at[min(at)], (f"{group.title}, number {seq}: {listed}",))
    odd = tuple(rank for rank, call in sorted(at.items()) if call.signature != reference)
    others = [rank for rank in sorted(at) if rank not in odd]
    plan = _plan(group, seq, others, history)
    mine = _from(group.calls[odd[0]], seq)
    kind, call, why = _compare(mine, plan)
    who = names(odd)
    evidence = [
        f"{group.title}, number {seq}: {who} called {_at(mine[0])}, {names(others)} called {_at(plan[0])}",
        f"up to number {seq - 1} the sequences agree" if history else "this is the first collective on record",
        why.format(who=who),
    ]
    return Finding(kind, odd, call, tuple(evidence))


def _compare(mine: list[Call], plan: list[Call]) -> tuple[str, Call, str]:
    """The kind of fault, its collective, and a sentence; `mine`: the odd rank's calls, `plan`: the others'."""
    first, second = mine[0], mine[1] if len(mine) > 1 else None
    due = [call.signature for call in plan]
    if second and len(plan) > 1 and (first.signature, second.signature) == (due[1], due[0]):
        return "wrong_order", plan[0], f"{{who}} called {first}, then {second}: the same two, in the other order"
    if second and second.signature == due[0] and first.signature not in due:
        return "one_rank_only", first, f"next, {{who}} called {second}, as the others had: {first} was one too many"
    if first.signature in due[1:]:
        missing = plan[: due.index(first.signature)]
        if all(call.by_ddp for call in missing) and not first.by_ddp:
            what = f"{len(missing)} of DDP's buckets" if len(missing) > 1 else "one of DDP's buckets"
            return "unused_parameter", missing[0], f"{{who}} went on after backward without {what}"
        left_out = ", ".join(map(str, missing))
        return "skipped_collective", missing[0], f"the others come to {first} after {left_out}: {{who}} left that out"
    same_place = first.place is None or plan[0].place is None or first.place == plan[0].place
    if first.name == plan[0].name and same_place:
        return "mismatched_shapes", plan[0], "one collective, but shapes or dtypes that differ"
    return "one_rank_only", first, f"nobody else ever called {_at(first)}"


def explain_lost(group: Group, rank: int, place: str | None, collective: str | None, line: str) -> Finding | None:
    """A rank that died of a message that does not fit, with all others in agreement: its last place tells what it did.

    place, collective: from the stack that it left. None where the others' recorders are missing, too.
    """
    last = max((max(calls) for calls in group.calls.values() if calls), default=None)
    if last is None:
        return None
    ranks = sorted(group.calls)
    pending = [seq for seq in sorted({s for c in group.calls.values() for s in c}) if seq > last - _AHEAD]
    # The others wait in the earliest call that is not over; without such a sign, in the last of all.
    waiting = next((s for s in pending if not all(c.done for c in group.at(s).values())), last)
    plan = _plan(group, waiting, ranks, _history(group, waiting))
    head = f"{group.title}, number {waiting}: {names(ranks)} wait in {_at(plan[0])}; rank {rank} died in "
    head += f"{collective or 'another collective'} at {place or 'an unknown place'}"
    evidence = (head, f"rank {rank}: {line}")
    places = [call.place for call in plan]
    if plan[0].by_ddp and collective != "backward" and place not in (None, plan[0].place):
        return Finding("unused_parameter", (rank,), plan[0], evidence)
    if place is None or place == places[0]:
        return Finding("mismatched_shapes", (rank,), plan[0], evidence)
    if place in places:
        return Finding("skipped_collective", (rank,), plan[0], evidence)
    return Finding("one_rank_only", (rank,), Call(rank, waiting, collective or plan[0].name), evidence)


def behind(group: Group) -> tuple[int | None, tuple[int, ...]]:
    """(first number that some recorder lacks at its end, ranks that stop before it); (None, ()) if all end alike."""
    ends = {rank: max(calls) for rank, calls in group.calls.items() if calls}
    if len(set(ends.values())) < 2:
        return None, ()
    lowest = min(ends.values())
    return lowest + 1, tuple(sorted(rank for rank, end in ends.items() if end == lowest))


def waits_in(group: Group) -> Call | None:
    """The call in which the ranks are that came furthest: the first of theirs that is not over, or their last."""
    ends = [calls[max(calls)] for calls in group.calls.values() if calls]
    if not ends:
        return None
    front = max(ends, key=lambda call: call.seq)
    calls = group.calls[front.rank]
    return next((calls[seq] for seq in sorted(calls) if not calls[seq].done), front)


def names(ranks: tuple[int, ...] | list[int]) -> str:
    """ "rank 3", "ranks 0, 1, 3", and "ranks 0 to 6, 8 to 31" where there are many."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [[f"{run[0]} to {run[-1]}"] if len(run) > 4 else map(str, run) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(text for part in parts for text in part)


def _at(call: Call) -> str:
    return f"{call} in {call.place}" if call.place else str(call)


def _from(calls: Mapping[int, Call], seq: int) -> list[Call]:
    return [calls[s] for s in sorted(calls) if s >= seq][:_AHEAD]


def _history(group: Group, seq: int) -> list[Call]:
    """The common calls before `seq`, from the recorder that reaches back furthest."""
    longest = max((calls for calls in group.calls.values() if calls), key=lambda c: -min(c), default={})
    return [longest[s] for s in sorted(longest) if s < seq]


def _expected(history: list[Call], at: Mapping[int, Call]) -> Signature | None:
    """Without a majority: what the sequence did before after calls like the last ones."""
    following = forecast(history, 1)
    if following and any(call.signature == following[0].signature for call in at.values()):
        return following[0].signature
    return None


def _plan(group: Group, seq: int, ranks: list[int], history: list[Call]) -> list[Call]:
    """What the reference ranks called from `seq` on, and would have called next."""
    done = max((_from(group.calls[rank], seq) for rank in ranks), key=len)
    return (done + forecast(history + done, _AHEAD - len(done)))[:_AHEAD]

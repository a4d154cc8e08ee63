"""The flight recorders of all ranks as sequences that can be laid side by side: for each group, rank by rank, the
collectives in the group's own numbering."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ddplab.remains.dumps import Recorder
from ddplab.remains.logs import RankLog, Said
from ddplab.remains.stacks import frames_of, in_backward, place_of

# Collectives in which shapes may differ between ranks: the root's from the others', or everybody's.
_UNEQUAL = re.compile(r"gather|scatter|_?all_?to_?all\w*|\w*_v(_\w+)?|\w*coalesced|split|send|recv|new_window")
Signature = tuple[str, tuple, tuple]
_CONTEXT = 16  # calls that must have been alike for a forecast to be sure


@dataclass(frozen=True)
class Call:
    """One collective of one rank. done: over, as far as the recorder can tell. frames: as the recorder has them."""

    rank: int
    seq: int
    name: str
    sizes: tuple = ()
    dtypes: tuple = ()
    done: bool = False
    created_ns: int | None = None
    frames: tuple[str, ...] = ()

    @property
    def place(self) -> str | None:
        """Where the user's code made the call, as "function, file:line"."""
        return place_of(frames_of(self.frames))

    @property
    def by_ddp(self) -> bool:
        """Did DDP issue it, from inside backward?"""
        return in_backward(frames_of(self.frames))

    @property
    def signature(self) -> Signature:
        """What must be equal on all ranks."""
        return (self.name, (), ()) if _UNEQUAL.fullmatch(self.name) else (self.name, self.sizes, self.dtypes)

    def __str__(self) -> str:
        shape = ", ".join("[" + ", ".join(map(str, size)) + "]" for size in self.sizes)
        return f"{self.name}({shape})" if shape else self.name


@dataclass
class Group:
    """One process group. ranks: its members, as far as known. calls: by rank, then by sequence number."""

    name: str
    desc: str
    ranks: tuple[int, ...]
    calls: dict[int, dict[int, Call]]

    def at(self, seq: int) -> dict[int, Call]:
        return {rank: calls[seq] for rank, calls in self.calls.items() if seq in calls}

    @property
    def title(self) -> str:
        return f"group {self.name}" + (f" ({self.desc})" if self.desc not in ("", "undefined") else "")


def groups_of(recorders: Mapping[int, Recorder], logs: Mapping[int, RankLog]) -> list[Group]:
    """All groups, the one with most calls first. What messages say of a collective joins what the recorders hold."""
    groups: dict[tuple[str, str], Group] = {}
    for rank, recorder in recorders.items():
        for row in recorder.rows:
            if row["p2p"] or row["seq"] is None:
                continue
            name, desc = row["group"], row["group_desc"]
            # With debug level DETAIL torch wraps its groups, and those inside have a number only.
            key = (name, desc) if name or row["pg_id"] is None else (f"number {row['pg_id']}", desc)
            group = groups.setdefault(key, Group(*key, (), {}))
            group.ranks = group.ranks or row["ranks"] or ()
            call = Call(
                rank, row["seq"], row["collective"], row["in_sizes"], row["in_dtypes"], row["done"], row["created_ns"],
                row["frames"],
            )  # fmt: skip
            _add(group.calls.setdefault(rank, {}), call)
    for group in groups.values():
        group.ranks = tuple(sorted({*group.ranks, *group.calls}))
    _say(groups, logs)
    return sorted(groups.values(), key=lambda g: -sum(map(len, g.calls.values())))


def _add(calls: dict[int, Call], call: Call) -> None:
    """Calls that share a number are one coalesced call."""
    if (first := calls.get(call.seq)) is None:
        calls[call.seq] = call
    elif "coalesced" not in first.name:
        calls[call.seq] = Call(
            call.rank, call.seq, f"{first.name}_coalesced", done=first.done and call.done, created_ns=first.created_ns,
            frames=first.frames,
        )  # fmt: skip


def _say(groups: dict[tuple[str, str], Group], logs: Mapping[int, RankLog]) -> None:
    """Add the collectives that only a message knows: the recorder was off, or the call was refused before it began."""
    said = {rank: log.said for rank, log in logs.items() if log.said}
    if not said:
        return
    if not groups:
        groups["", ""] = Group("", "", tuple(sorted(said)), {})
    for rank, all_said in said.items():
        for one in all_said:
            group = _meant(list(groups.values()), rank, one)
            sizes = (one.sizes,) if one.sizes is not None else ()
            dtypes = (one.dtype.capitalize(),) if one.dtype else ()
            call = Call(rank, one.seq, one.name, sizes, dtypes)
            group.calls.setdefault(rank, {}).setdefault(one.seq, call)
        group.ranks = tuple(sorted({*group.ranks, rank}))


def _meant(groups: list[Group], rank: int, said: Said) -> Group:
    """The group whose record of this rank ends just before the collective that a message names, or else the largest."""
    ends = [group for group in groups if group.calls.get(rank) and max(group.calls[rank]) == said.seq - 1]
    return (ends or sorted(groups, key=lambda g: -len(g.calls.get(rank, ()))))[0]


def majority(calls: Mapping[int, Call]) -> Signature | None:
    """The signature that more than half of these calls have; None without one."""
    if not calls:
        return None
    (signature, count), *_ = Counter(call.signature for call in calls.values()).most_common(1)
    return signature if 2 * count > len(calls) else None


def forecast(history: list[Call], count: int) -> list[Call]:
    """The `count` calls that would follow, if the sequence goes on as it did before.

    A training repeats itself: the longest end of `history` that occurred before tells what comes next.
    """
    known, said = list(history), [call.signature for call in history]
    for _ in range(count):
        best, at = 0, None
        for i in range(len(said) - 2, -1, -1):
            length = 0
            while length <= i and length < _CONTEXT and said[i - length] == said[-1 - length]:
                length += 1
            if length > best:
                best, at = length, i
            if best == _CONTEXT:
                break
        if at is None:
            break
        known.append(known[at + 1])
        said.append(said[at + 1])
    return known[len(history) :]

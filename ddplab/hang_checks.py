"""Checkers for the lab on hanging jobs: where do sequences part, who is odd, and what happened?"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from ddplab.answers import ask
from ddplab.checks import CheckError
from ddplab.faults.plan import FAULTS, Plan

_OPERATIONS = ("all_reduce", "all_gather", "broadcast", "barrier")


def check_parting(fn: Callable[[dict[int, list[str]]], int | None], rounds: int = 300, seed: int = 0) -> None:
    """Check `fn(calls)`: the first place, from 0, at which the ranks' lists differ, or some list has ended; else None.

    calls: {rank: [names of collectives, in order]}. Raises CheckError with the lists for which the answer is wrong.
    """
    dice = random.Random(seed)
    for _ in range(rounds):
        calls, _, place = _sequences(dice)
        answer = ask(fn, calls)
        if answer != place:
            raise CheckError(f"{_listing(calls)}\nthey part at {place}; {fn.__name__} returned {answer!r}.")
    print(f"right for {rounds} drawn jobs")


def check_odd_ranks(fn: Callable[[dict[int, str | None]], list[int]], rounds: int = 300, seed: int = 0) -> None:
    """Check `fn(called)`: the ranks, sorted, that do not do what most do; all of them where there is no majority.

    called: {rank: name of the collective, or None for a rank that called nothing more}. Raises CheckError.
    """
    dice = random.Random(seed)
    for i in range(rounds):
        ranks = dice.randint(2, 6)
        usual, other = dice.sample([*_OPERATIONS, None], 2)
        odd = sorted(dice.sample(range(ranks), ranks // 2 if i % 4 == 0 else dice.randint(1, max(1, (ranks - 1) // 2))))
        called = {rank: other if rank in odd else usual for rank in range(ranks)}
        right = odd if 2 * len(odd) < ranks else list(range(ranks))
        answer = ask(fn, called, kind=(list, tuple))
        if list(answer) != right:
            reason = "" if right == odd else ": as many do one thing as the other"
            raise CheckError(f"{called}: the odd ranks are {right}{reason}; {fn.__name__} returned {answer!r}.")
    print(f"right for {rounds} drawn jobs")


def check_verdict(answer: Mapping[str, object], truth: Plan) -> None:
    """Check a reader's verdict, a mapping with "kind", "rank" and "operation", against what was really done.

    Raises CheckError that says which of the three is wrong, and not what would be right.
    """
    if not isinstance(answer, Mapping) or set(answer) != {"kind", "rank", "operation"}:
        raise CheckError('a verdict is a dictionary with "kind", "rank" and "operation".')
    if answer["kind"] not in FAULTS:
        raise CheckError(f"the kind is one of {', '.join(FAULTS)}, not {answer['kind']!r}.")
    if answer["rank"] != truth.rank:
        raise CheckError(
            f"rank {answer['rank']!r} did nothing wrong. The one that dies or complains first may be a victim: who "
            "called something else than the others, or nothing?"
        )
    if answer["kind"] != truth.fault:
        raise CheckError(f"the rank is right, but the evidence speaks against {answer['kind']}. {_HINTS[truth.fault]}")
    if answer["operation"] != truth.operation:
        raise CheckError(f"rank and kind are right, but it was not about {answer['operation']!r}.")
    print(f"Right: {truth.fault}, rank {truth.rank}, {truth.operation}.")


_HINTS = {
    "skipped_collective": "Compare what this rank called with what the others called one number later.",
    "rank_gone": "Which rank left no flight recorder, and does its log say goodbye?",
    "unequal_batches": "Read the last line of this rank's log.",
    "unused_parameter": "Who issues the collectives that are missing, you or DDP?",
    "slow_rank": "Nothing is missing. Compare the times at which ranks entered the same collective.",
    "wrong_order": "Look at two numbers in a row.",
    "mismatched_shapes": "Compare sizes, not only names.",
    "one_rank_only": "Did any other rank ever call this?",
}


def _sequences(dice: random.Random) -> tuple[dict[int, list[str]], int, int | None]:
    """Lists of a drawn job, the rank that was changed, and where the lists part."""
    base = [dice.choice(_OPERATIONS) for _ in range(dice.randint(3, 9))]
    ranks, at = dice.randint(2, 5), dice.randrange(len(base))
    rank, mine = dice.randrange(ranks), list(base)
    change = dice.choice(("none", "skip", "extra", "cut", "other"))
    if change == "skip":
        del mine[at]
    elif change == "extra":
        mine.insert(at, dice.choice(_OPERATIONS))
    elif change == "cut":
        del mine[at:]
    elif change == "other":
        mine[at] = dice.choice(_OPERATIONS)
    longest = max(len(base), len(mine))
    pairs = zip(base + [None] * (longest - len(base)), mine + [None] * (longest - len(mine)), strict=True)
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    return {r: mine if r == rank else list(base) for r in range(ranks)}, rank, place


def _listing(calls: Mapping[int, list[str]]) -> str:
    return "\n".join(f"rank {rank}: {', '.join(names)}" for rank, names in calls.items())

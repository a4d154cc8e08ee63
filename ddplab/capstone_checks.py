"""Checkers for the capstone's lab: what a headline implies, which statements it contradicts, what three runs say."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from ddplab.answers import ask
from ddplab.checks import CheckError
from ddplab.headline import Headline, headline, three_runs

PEAK_BPS = 300e9  # NVLink of an A100, one direction, as printed
PROFILE_S, PROFILE_STEPS = 0.1247, 3  # the article's section 4
_NEAR = 0.05  # measured numbers that differ by less may describe the same thing

HYPOTHESIS = "hypothesis: "  # a reading of the headline, which the article does not state

# statement of the article, or hypothesis -> does its headline (section 5) contradict it? (`Headline` in, bool out)
STATEMENTS: dict[str, Callable[[Headline], bool]] = {
    "8 cards reach 92% of linear speed-up": lambda h: not _near(h.efficiency[0], 0.92),
    "more than 90% of NVLink's 300 GB/s are used": lambda h: h.busbw_Bps < 0.9 * PEAK_BPS,
    "all-reduces take 124.7 ms in 3 profiled steps": lambda h: not _near(PROFILE_S / PROFILE_STEPS, h.before_s),
    "a step's all-reduces take less than 1/3 of backward": lambda h: h.before_s >= h.compute_s / 3,
    "fp32 has 102.2 MB a step": lambda h: not _near(h.nbytes, 102.2e6),
    "a step becomes 1.7 times faster, nothing hidden": lambda h: not _near(h.step_s[0] / h.step_s[1], 1.7),
    f"{HYPOTHESIS}fp16 halves the time of communication to 45 ms": lambda h: not _near(h.before_s / 2, h.after_s),
    f"{HYPOTHESIS}1-bit quantisation sends 3.1% in 45 ms": lambda h: not _near(h.before_s / 32, h.after_s),
}


def check_implied(fn: Callable[..., Mapping[str, float]], rounds: int = 200, seed: int = 0) -> None:
    """Check `fn(before_s, after_s, speedup, nbytes, ranks)` -> {"compute_s", "busbw_Bps", "bits", "efficiency"}.

    Nothing is hidden; efficiency is that before compression. Raises CheckError that names the entry, and the usual
    mistake where it is one.
    """
    dice = random.Random(seed)
    for i in range(rounds):
        compute, before = dice.uniform(0.01, 0.5), dice.uniform(0.01, 0.5)
        after, ranks, values = before * dice.uniform(0.05, 0.9), dice.randint(2, 64), dice.randint(10**6, 10**8)
        h = headline(before, after, (compute + before) / (compute + after), values, ranks)
        if i == 0:
            h = headline()
        found = ask(fn, h.before_s, h.after_s, h.speedup, h.nbytes, h.ranks)
        if not isinstance(found, Mapping) or set(found) != {"compute_s", "busbw_Bps", "bits", "efficiency"}:
            raise CheckError(f"{fn.__name__} returns a dictionary with compute_s, busbw_Bps, bits and efficiency.")
        given = f"{h.before_s * 1e3:.4g} -> {h.after_s * 1e3:.4g} ms, {h.speedup:.4g} times faster"
        for name, right, mistakes in _implied(h):
            if not _same(found[name], right):
                why = next((text for value, text in mistakes if _same(found[name], value)), "")
                raise CheckError(f"{given}: {name} is {right:.4g}; {fn.__name__} returned {found[name]!r}.{why}")
    print(f"right for the article's headline and {rounds - 1} drawn ones")


def _implied(h: Headline) -> list[tuple[str, float, list[tuple[float, str]]]]:
    """(entry, right value, [(wrong value, what was forgotten)])."""
    return [
        (
            "compute_s",
            h.compute_s,
            [(h.overlapped_compute_s, " That is the computing if everything is hidden that can be; here nothing is.")],
        ),
        (
            "busbw_Bps",
            h.busbw_Bps,
            [
                (h.nbytes / h.before_s, " That is the algorithm bandwidth: a ring sends 2 (N - 1) / N of the buffer."),
                (h.busbw_Bps * 8, " That is in bits a second."),
                (h.busbw_Bps * h.before_s / h.after_s, " That is what the link would carry in the time after."),
            ],
        ),
        ("bits", h.bits, [(h.bits / 32, " That is the part of the bytes; a value has 32 bits.")]),
        (
            "efficiency",
            h.efficiency[0],
            [(h.efficiency[1], " That is the efficiency after."), (1 - h.efficiency[0], " That is the part lost.")],
        ),
    ]


def check_audit(answer: Mapping[str, bool], story: Headline | None = None) -> None:
    """Check which `STATEMENTS` a headline (default: the article's) contradicts: {statement: True or False}.

    Raises CheckError that names the first statement that is judged wrongly, and what to compare it with.
    """
    story = story or headline()
    if not isinstance(answer, Mapping) or set(answer) != set(STATEMENTS):
        odd = sorted(set(STATEMENTS) ^ set(answer if isinstance(answer, Mapping) else ()))
        raise CheckError(f"the audit has one entry for each statement; missing or unknown: {odd[:3]}.")
    for statement, contradicted in STATEMENTS.items():
        if bool(answer[statement]) != contradicted(story):
            said = "contradicts" if answer[statement] else "does not contradict"
            raise CheckError(f'"{statement}": you say that the headline {said} it. {_hint(statement, story)}')
    readings = [bool(v) for statement, v in answer.items() if statement.startswith(HYPOTHESIS)]
    others = [bool(v) for statement, v in answer.items() if not statement.startswith(HYPOTHESIS)]
    counts = f"{sum(others)} of {len(others)} statements, {sum(readings)} of {len(readings)} hypotheses"
    print(f"right: the headline contradicts {counts}")


def _hint(statement: str, h: Headline) -> str:
    numbers = {
        "8 cards": f"A step computes {h.compute_s * 1e3:.0f} of {h.step_s[0] * 1e3:.0f} ms.",
        "more than": f"The ring of {h.ranks} moves {h.busbw_Bps / 1e9:.3g} GB/s.",
        "all-reduces": f"That is a time for {PROFILE_STEPS} steps.",
        "a step's": f"Even if all of the {h.compute_s * 1e3:.0f} ms were backward, what is a third of it?",
        "fp32": f"The headline's model has {h.parameters:,} values of 4 bytes.",
        f"{HYPOTHESIS}fp16": f"What is half of {h.before_s * 1e3:.0f} ms?",
        f"{HYPOTHESIS}1-bit": f"What is 1/32 of {h.before_s * 1e3:.0f} ms?",
        "a step becomes": "That number is part of the headline.",
    }
    return next(text for start, text in numbers.items() if statement.startswith(start))


def check_three_runs(fn: Callable[[float, float, float], Sequence[float]], rounds: int = 200, seed: int = 0) -> None:
    """Check `fn(noop_s, fp32_s, fp16_s)` -> (seconds of fp32's communication, seconds of it that are hidden).

    Raises CheckError with the three runs for which the answer is wrong.
    """
    dice = random.Random(seed)
    for _ in range(rounds):
        compute, communication = dice.uniform(0.05, 1), dice.uniform(0.05, 1)
        hidden = dice.choice([0.0, communication / 2 * dice.uniform(0, 0.95)])
        steps = compute, compute + communication - hidden, compute + communication / 2 - hidden
        runs = three_runs(*steps)
        try:
            total, beside = ask(fn, *steps)
        except (TypeError, ValueError):
            raise CheckError(f"{fn.__name__} returns two numbers: communication and the hidden part of it.") from None
        given = f"nothing {steps[0] * 1e3:.1f}, fp32 {steps[1] * 1e3:.1f}, fp16 {steps[2] * 1e3:.1f} ms"
        if not _same(total, runs.communication_s):
            why = " That is what the step waits for." if _same(total, runs.exposed_s) else ""
            raise CheckError(
                f"{given}: fp32 communicates for {communication * 1e3:.1f} ms, {fn.__name__} says {total!r} s.{why} "
                "What do fp32 and fp16 differ by?"
            )
        if not math.isclose(beside, hidden, rel_tol=1e-6, abs_tol=1e-9):
            raise CheckError(f"{given}: {hidden * 1e3:.1f} ms are hidden, {fn.__name__} says {beside!r} s.")
    print(f"right for {rounds} drawn jobs")


def _near(a: float, b: float) -> bool:
    return abs(a / b - 1) <= _NEAR


def _same(a: object, b: float) -> bool:
    return isinstance(a, (int, float)) and math.isclose(a, b, rel_tol=1e-6)

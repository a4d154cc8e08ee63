"""Text with damage, as copies, cuts, terminals and full disks make it: for readers that must not fall over."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given, note, settings
from hypothesis import strategies as st

AT_ONCE = 20

NOISE = [
    "",
    "\n",
    " ",
    "\t",
    "0",
    "-1",
    "9" * 30,
    "1e400",
    "nan",
    "N/A",
    "\x00",
    "\ufffd",
    "\u2028",
    "\u0661",
    "#",
    '"',
    "{",
    "}",
    "[",
    "]",
]
NOISE += [
    ":",
    ",",
    "/",
    "->",
    "...",
    "\x1b[31m",
    "null",
    "[1,0]<stdout>:",
    "0: ",
    "loss 0.41 ",
    "a:1:2 [0] NCCL INFO ",
    "\r",
    "\\",
    "'",
]


def for_seeds(check: Callable[[int], None], count: int = 2000) -> None:
    """`check(seed)` for `count` seeds: hypothesis draws every 20th and the others lie far off it.

    To draw an example takes longer than most readers need for one text, and to draw each random number of a text from
    hypothesis five times as long again. Each run has the same seeds; one that fails stands in hypothesis's report.
    """

    @settings(max_examples=count // AT_ONCE, derandomize=True, deadline=None, database=None)
    @given(st.integers(0, 2**48 - 1))
    def some(first: int) -> None:
        for i in range(AT_ONCE):
            seed = first + (i << 48)
            try:
                check(seed)
            except BaseException:
                note(f"seed {seed}")
                raise

    some()


def mangled(draw: random.Random, text: str) -> str:
    """`text` after up to eight accidents: noise put in, a stretch lost, doubled, moved or shuffled by lines."""
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(text) + 1)
        end = min(len(text), at + draw.choice([0, 1, 2, 5, 30, 300]))
        piece = text[at:end]
        kind = draw.randrange(6)
        if kind == 0:
            text = text[:at] + draw.choice(NOISE) + text[at:]
        elif kind == 1:
            text = text[:at] + text[end:]
        elif kind == 2:
            text = text[:at] + draw.choice(NOISE) + text[end:]
        elif kind == 3:
            text = text[:end] + piece + text[end:]
        elif kind == 4:
            to = draw.randrange(len(text) + 1)
            text = text[:to] + piece + text[to:]
        else:
            lines = text.split("\n")
            draw.shuffle(lines)
            text = "\n".join(lines) if draw.random() < 0.2 else text[: max(1, at)]
    return text

"""Text with damage, as copies, cuts, terminals and full disks make it: for readers that must not fall over."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable

from hypothesis import given, note, settings
from hypothesis import strategies as st

AT_ONCE = 20
SPARE = 1.15  # seeds for each text that is asked for: some give the same text as others

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


def for_seeds(check: Callable[[int], Hashable], count: int = 2000) -> None:
    """`check(seed)` for so many seeds that `count` different inputs were tried; each call returns what it tried.

    Hypothesis draws every 20th seed and the others lie far off it.
    To draw an example takes longer than most readers need for one text, and to draw each random number of a text from
    hypothesis five times as long again. Each run has the same seeds; one that fails stands in hypothesis's report.
    """

    tried = set()

    @settings(max_examples=round(SPARE * count) // AT_ONCE, derandomize=True, deadline=None, database=None)
    @given(st.integers(0, 2**48 - 1))
    def some(first: int) -> None:
        for i in range(AT_ONCE):
            seed = first + (i << 48)
            try:
                tried.add(hash(check(seed)))
            except BaseException:
                note(f"seed {seed}")
                raise

    some()
    assert len(tried) >= count, f"only {len(tried)} of the inputs differ from each other"


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


WORDS = [b"null", b"-1", b"1e400", b"NaN", b'"x"', b"{}", b"[]", b"9" * 30, b"9" * 5000, b"true", b'"', b"{", b"\x00"]


def mangled_bytes(draw: random.Random, data: bytes) -> bytes:
    """`data` after one to four accidents: torn off, a byte or a bit changed, a stretch lost, overwritten or doubled,
    noise or one of `WORDS` put in, or such a word in the place of a value of JSON."""
    text = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, kind = draw.randrange(len(text) + 1), draw.randrange(8)
        if kind == 0:
            del text[at:]
        elif kind == 1:
            text[at : at + 1] = draw.randbytes(1)
        elif kind == 2 and at < len(text):
            text[at] ^= 1 << draw.randrange(8)
        elif kind == 3:
            del text[at : at + draw.randint(1, 40)]
        elif kind == 4:
            text[at : at + draw.choice([0, 0, draw.randint(1, 40)])] = draw.randbytes(draw.randint(1, 8))
        elif kind == 5:
            text[at:at] = text[at : at + draw.randint(1, 60)]
        elif kind == 6:
            text[at:at] = draw.choice(WORDS)
        elif (colon := text.find(b":", at)) >= 0:
            end = min(e for e in (text.find(b",", colon), text.find(b"}", colon), len(text)) if e >= 0)
            text[colon + 1 : end] = draw.choice(WORDS)
    return bytes(text)

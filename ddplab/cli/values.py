"""From the words of a command line to values: sizes, ranks, links, names; each refusal says what would be right."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable

SCHEDULES = ("ring", "star", "chain", "direct", "tree", "halving_doubling", "hierarchical")


class Problem(Exception):
    """Something to tell the user in one sentence; `code` is the exit code (2: bad input, 1: not possible here)."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code
        self.command = "ddplab"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'ring'?" for the nearest known word, or nothing."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), list(names), n=1, cutoff=0.6)
    return f"; did you mean '{names[near[0]]}'?" if near else ""


def sizes(text: str) -> list[int]:
    """Bytes, as `ddplab.bench` reads them: '1K:64M', '1K:64M:4', '1K,100K', '102.4MB'. Raises ArgumentTypeError."""
    from ddplab._sizes import parse_sizes

    try:
        return parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error


def size(text: str) -> int:
    """One size in bytes: 4096, 64K (binary, as in nccl-tests), 102.4MB (decimal). Raises ArgumentTypeError."""
    found = [] if set(text) & set(":,") else sizes(text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is more than one size; write one, such as 64K, 100M or 102.4MB")
    return found[0]


def count(text: str) -> int:
    """A whole number, 1 or more (ranks, hosts, runs). Raises ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not 1 <= value <= 10**9:
        raise argparse.ArgumentTypeError(f"'{text}' is not a count; give a whole number, 1 or more")
    return value


def positive(what: str) -> Callable[[str], float]:
    """A converter to a number above 0, in the unit that the option names. It raises ArgumentTypeError with `what`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"'{text}' is not {what}; give a number above 0")
        return value

    return convert


seconds = positive("a time")


def named(what: str) -> Callable[[str], str]:
    """A converter to a path, as it was written. An empty one would mean the working folder: ArgumentTypeError."""

    def convert(text: str) -> str:
        if not text:
            raise argparse.ArgumentTypeError(f"the path is empty; name {what}")
        return text

    return convert


def link(text: str):
    """A `ddplab.Link`: 1gbit, 25GB/s, 100 MB/s, or one of FIELD_LINKS by name. Raises ArgumentTypeError."""
    from ddplab.link import FIELD_LINKS, Link  # numpy, which --help does not need

    if text.lower() in FIELD_LINKS:
        return FIELD_LINKS[text.lower()]
    try:
        return Link.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error


def one_of(known: Iterable[str], what: str):
    """A converter that accepts only `known` names. It raises ArgumentTypeError with the nearest one."""
    names = list(known)

    def convert(text: str) -> str:
        if text not in names and (text := text.replace("-", "_")) not in names:
            hint = did_you_mean(text, names) or f"; known: {', '.join(names)}"
            raise argparse.ArgumentTypeError(f"unknown {what} '{text}'{hint}")
        return text

    return convert


def many_of(known: Iterable[str], what: str):
    """The same for a list separated by commas; a name given twice counts once."""
    convert = one_of(known, what)
    return lambda text: list(dict.fromkeys(convert(part.strip()) for part in text.split(",")))

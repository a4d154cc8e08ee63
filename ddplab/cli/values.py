"""From the words of a command line to values: sizes, ranks, links, names; each refusal says what would be right."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable

# The powers are binary, as in nccl-tests: 64M is 64 MiB. Only an explicit "MB" is decimal.
_UNIT = {"": 1, **{u: 1024**i for i, u in enumerate("KMGT", 1)}}
_UNIT |= {f"{u}iB": 1024**i for i, u in enumerate("KMGT", 1)} | {f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}
_UNIT = {name.lower(): factor for name, factor in _UNIT.items()} | {"b": 1}


class Problem(Exception):
    """Something to tell the user in one sentence; `code` is the exit code (2: bad input, 1: not possible here)."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code
        self.command = "ddplab"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'ring'?" for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""


def size(text: str) -> int:
    """Bytes: 4096, 64K or 64KiB (binary, as in nccl-tests), 102.4MB (decimal). Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _UNIT:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size; write 4096, 64K, 100M (MiB) or 102.4MB")
    number, unit = match[1], _UNIT[match[2]]
    nbytes = int(number) * unit if number.isdigit() else round(float(number) * unit)
    if nbytes == 0 or nbytes > 2**50:
        raise argparse.ArgumentTypeError(f"'{text}' is out of range; sizes go from 1 byte to 1024T")
    return nbytes


def sizes(text: str) -> list[int]:
    """Bytes of a sweep: '1K:64M' doubles, '1K:64M:4' quadruples, '1K,100K,1M' is a list. Raises ArgumentTypeError."""
    if ":" not in text:
        return [size(part) for part in text.split(",")]
    first, last, *rest = text.split(":")
    factor = rest[0] if rest else "2"
    if len(rest) > 1 or not factor.isdigit() or int(factor) < 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not a sweep; write FIRST:LAST or FIRST:LAST:FACTOR, as 1K:64M:4")
    low, high = size(first), size(last)
    if low > high:
        raise argparse.ArgumentTypeError(f"'{text}' runs backwards; write the smaller size first: {last}:{first}")
    sweep = [low]
    while sweep[-1] * int(factor) <= high:
        sweep.append(sweep[-1] * int(factor))
    return sweep


def count(text: str) -> int:
    """A whole number, 1 or more (ranks, hosts, runs). Raises ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not 1 <= value <= 10**9:
        raise argparse.ArgumentTypeError(f"'{text}' is not a count; give a whole number, 1 or more")
    return value


def seconds(text: str) -> float:
    """A positive time, in the unit that the option names. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a time; give a number above 0")
    return value


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
        if text not in names:
            hint = did_you_mean(text, names) or f"; known: {', '.join(names)}"
            raise argparse.ArgumentTypeError(f"unknown {what} '{text}'{hint}")
        return text

    return convert


def many_of(known: Iterable[str], what: str):
    """The same for a list separated by commas; a name given twice counts once."""
    convert = one_of(known, what)
    return lambda text: list(dict.fromkeys(convert(part.strip()) for part in text.split(",")))

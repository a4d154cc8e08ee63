"""How NCCL, torch and gloo read the value of a variable, and what they make of one that was not meant so.

NCCL's numbers pass through C's strtoll with base 0 and nobody looks at what is left: "8MB" is 8, "010" is 8, "true" is
0 (param.cc). Words have a parser each, some of them case-sensitive.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ddplab.nccl.knobs import Knob, nearest

FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")  # those that NCCL_ALGO can name

Complaint = tuple[str, str]  # what is wrong, what to do

_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")  # what the old numbers 0 to 4 mean


def strtoll(text: str) -> tuple[int, str]:
    """(number, what was not read) of C's strtoll(text, &rest, 0); (0, text) where there is no number."""
    found = _NUMBER.match(text)
    if not found:
        return 0, text
    digits = found[2]
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits[0] == "0" else 10
    value = int(digits, base) if len(digits) < 99 else 2**99  # out of range anyway
    return -value if found[1] == "-" else value, text[found.end() :]


def parse_list(text: str, elements: list[str]) -> dict[str, set[str]]:
    """What NCCL_ALGO or NCCL_PROTO allow: function -> elements.

    Raises where NCCL 2.24 and later refuse the value: LookupError(word) for an unknown element, ValueError otherwise.

    "ring;allreduce:^tree": entries between semicolons, of which the first may lack its function and then holds for
    all; ^ in front of a list means all but these. (tuning.cc, parseList)
    """
    names = {element.lower(): element for element in elements}
    allowed = {function: set(elements) for function in FUNCTIONS}
    entries = [entry for entry in text.split(";") if entry]
    for i, entry in enumerate(entries):
        parts = [part for part in entry.split(":") if part]  # strtok: empty parts do not exist
        if not parts:
            raise ValueError(f"the entry {entry!r} lists nothing")
        if len(parts) == 1 and (i or text[0] == ";"):
            raise ValueError(f"the entry {entry!r} names no function; only the first may do without")
        prefix, listed = ("", parts[0]) if len(parts) == 1 else parts[:2]
        functions = [name for name in FUNCTIONS if not prefix or name.lower() == prefix.lower()]
        if not functions:
            raise ValueError(f"unknown function {prefix!r}; known: {', '.join(FUNCTIONS)}")
        chosen = set()
        for word in filter(None, listed.removeprefix("^").split(",")):
            if word.lower() not in names:
                raise LookupError(word)
            chosen.add(names[word.lower()])
        for function in functions:
            allowed[function] = set(elements) - chosen if listed[0] == "^" else chosen
    return allowed


def number(text: str) -> int | None:
    """The number that NCCL makes of `text`; None where it takes its default."""
    value, _ = strtoll(text)
    return value if text and -(2**63) <= value < 2**63 else None


def complaint(knob: Knob, text: str) -> Complaint | None:
    """What is wrong with this value, and what to do; None where nothing is."""
    if not text and not knob.kind.startswith("torch"):
        return None  # as good as unset
    return _READERS[knob.kind](knob, text)


def legal(knob: Knob) -> str:
    """The legal values in words."""
    if knob.kind in ("bool", "torchbool"):
        return "1 or 0"
    if knob.range:
        least, most, step = knob.range
        if most is None:
            return f"a number, {least} or more"
        return f"a multiple of {step} from {least} to {most}" if step > 1 else f"a number from {least} to {most}"
    if knob.kind in ("algorithms", "protocols", "words"):
        return f"a list of {', '.join(knob.words)}; ^ in front for all but these"
    if knob.kind == "netdevs":
        return "AUTO, ALL or MAX:n"
    return " or ".join(filter(None, [", ".join(knob.words[:-1]), *knob.words[-1:]]))


def _integer(knob: Knob, text: str) -> Complaint | None:
    value, rest = strtoll(text)
    if not -(2**63) <= value < 2**63:
        return "too large, so NCCL takes its default", f"write {legal(knob) or 'a smaller number'}"
    if rest == text:
        if text.strip().lower() in ("false", "off", "no") and "0" in knob.words:
            return None  # 0, as it was meant
        on = text.strip().lower() in ("true", "on", "yes") and "1" in knob.words
        return "parsed as 0: it does not start with a digit", "write 1" if on else f"write {legal(knob) or 'a number'}"
    if rest.strip():
        unit = _UNITS.get(rest.strip()[:1].upper()) if knob.unit == "bytes" else None
        meant = f"write {value * unit}" if unit and value else f"write {legal(knob) or 'a whole number'}"
        return f"parsed as {value}: NCCL reads the digits in front, and ignores {rest.strip()!r}", meant
    if re.match(r"\s*[+-]?0[0-7]*[1-7]", text):
        return f"parsed as {value}: a 0 in front means octal", f"write {value}, or the number without the 0"
    return None if _inside(knob, value) else _outside(knob, value)


def _inside(knob: Knob, value: int) -> bool:
    if value == -2 or str(value) == knob.default:  # NCCL's mark for "not set"
        return True
    if knob.range:
        least, most, step = knob.range
        return least <= value and (most is None or value <= most) and value % step == 0
    return not knob.words or str(value) in knob.words


def _outside(knob: Knob, value: int) -> Complaint:
    becomes = ""
    if knob.range and knob.name.endswith("NTHREADS"):
        least, most, step = knob.range
        if step > 1 and value > 0:  # tuning.cc, getNthreads
            used = most if value % step or value > most else least
            why = f"not a multiple of {step}" if value % step else f"outside {least} to {most}"
            return f"becomes {used}: {value} is {why}", f"choose {legal(knob)}, or leave it unset"
        becomes = f"becomes {most}: " if step == 1 and value > most else ""
    return f"{becomes}{value} is not a legal value", f"choose {legal(knob)}"


def _one_of(knob: Knob, text: str, exact: bool = False) -> Complaint | None:
    if text in knob.words or (not exact and text.upper() in map(str.upper, knob.words)):
        return None
    meant = nearest(text, knob.words, 0.5)
    effect = "NCCL ignores it" if knob.library == "NCCL" else "torch refuses it"
    return f"unknown value, so {effect}", f"did you mean {meant}?" if meant else f"choose {legal(knob)}"


def _words(knob: Knob, text: str) -> Complaint | None:
    known = {word.upper() for word in knob.words}
    for word in text.removeprefix("^").split(","):
        if word.strip() and word.strip().upper() not in known:
            meant = nearest(word.strip(), knob.words, 0.5)
            problem = f"unknown word {word.strip()!r}, for which NCCL 2.30 ignores the whole list"
            return problem, f"did you mean {meant}?" if meant else f"choose from {', '.join(knob.words)}"
    return None


def _listed(knob: Knob, text: str) -> Complaint | None:
    what = "algorithm" if knob.kind == "algorithms" else "protocol"
    versions = "NCCL ≤ 2.23 silently nothing, ≥ 2.24 error"
    try:
        parse_list(text, knob.words)
    except LookupError as error:
        word = error.args[0]
        meant = nearest(word.strip(), knob.words, 0.5)
        remedy = f"did you mean {meant}?" if meant else f"known: {', '.join(knob.words)}"
        return f"unknown {what} {word!r}; {versions}", remedy
    except ValueError as error:
        return f"{error}; {versions}", "write as in ring,tree or allreduce:^tree;broadcast:ring"
    return None


def _policy(knob: Knob, text: str) -> Complaint | None:
    if text[0] in "0123456789":
        return None if text in ("0", "1", "2") else ("only the first digit counts", f"choose {legal(knob)}")
    parts = [part.upper() for part in text.split("|") if part]
    for part in parts:
        if part not in knob.words:
            return f"unknown policy {part!r}, so NCCL ignores it", f"choose {legal(knob)}"
    if {"ZERO", "EFFICIENCY"} <= set(parts):
        return "ZERO and EFFICIENCY exclude each other, and NCCL drops EFFICIENCY", "choose one"
    return None


def _netdevs(knob: Knob, text: str) -> Complaint | None:
    if text.upper() in ("AUTO", "ALL") or (text[:4].upper() == "MAX:" and strtoll(text[4:])[0] > 0):
        return None
    return "unknown value, so NCCL takes AUTO", f"choose {legal(knob)}"


def _level(knob: Knob, text: str) -> Complaint | None:
    if text[0] in "0123456789" or text in knob.words:
        return None
    meant = nearest(text, knob.words, 0.5)
    return "unknown level, so NCCL ignores it (capitals count)", f"did you mean {meant}?" if meant else legal(knob)


def _path(knob: Knob, text: str) -> Complaint | None:
    return ("nothing replaces the ~, unless your shell does", "write the path in full") if text[0] == "~" else None


def _bool(knob: Knob, text: str) -> Complaint | None:
    if text.upper() in ("1", "T", "TRUE", "0", "F", "FALSE"):
        return None
    return f"not understood, so NCCL takes its default {knob.default}", "write 1 or 0"


def _torch_bool(knob: Knob, text: str) -> Complaint | None:
    if text.lower() in ("1", "t", "true", "y", "yes", "0", "f", "false", "n", "no"):
        return None
    return "torch refuses it when the process group starts", "write 1 or 0, or unset it"


def _torch_int(knob: Knob, text: str) -> Complaint | None:
    found = re.match(r"\s*[+-]?[0-9]+", text)
    if not found or len(found[0]) > 99 or not -(2**31) <= int(found[0]) < 2**31:
        return "torch refuses it when the process group starts", f"write {legal(knob) or 'a number'}, or unset it"
    if text[found.end() :].strip():
        return f"parsed as {int(found[0])}: torch reads the digits in front", f"write {legal(knob) or 'a number'}"
    return None if _inside(knob, int(found[0])) else _outside(knob, int(found[0]))


def _magic(knob: Knob, text: str) -> Complaint | None:
    value, rest = strtoll(text)
    if rest or not -(2**63) <= value < 2**64:
        return "not a number, so NCCL takes its default", "write a number, as 0x1234"
    return None


def _anything(knob: Knob, text: str) -> None:
    return None


_READERS: dict[str, Callable[[Knob, str], Complaint | None]] = {
    "int": _integer,
    "bytes": _integer,
    "number": _magic,
    "bool": _bool,
    "choice": _one_of,
    "exact": lambda knob, text: _one_of(knob, text, exact=True),
    "words": _words,
    "algorithms": _listed,
    "protocols": _listed,
    "policy": _policy,
    "netdevs": _netdevs,
    "level": _level,
    "path": _path,
    "torchbool": _torch_bool,
    "torchint": _torch_int,
    "interfaces": _anything,
    "text": _anything,
}

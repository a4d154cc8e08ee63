"""The slow way through a block of events: value by value, so that a damaged one costs only itself.

It also finds where the list of events ends inside a block, which a cut between events cannot tell.
"""

from __future__ import annotations

import json
import re

from ddplab.trace.errors import EARLY
from ddplab.trace.events import BROKEN, Event, decode, without_infinity

_JSON = json.JSONDecoder()
_BETWEEN = re.compile(r"[ \t\r\n,]*")
_NEXT = re.compile(r'\}\s*+(?:,\s*+)?(?=\{\s*"(?:ph|cat|name|ts|pid|tid|dur)"\s*:)|\}\s*+(?=\]\s*+(?:[,}]|\Z))')
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_SLACK = 12  # characters that the longest JSON token cut short can have, other than a string


def walk(
    text: bytes, last: bool, partial: bool, exact: bool = False
) -> tuple[list[Event], int, bool, list[tuple[int, str]]]:
    """(events, bytes used, whether the list ended, damage as (offset, reason)).

    Stops before a value that the end of `text` cuts short: more bytes may complete it, unless `last`. Stops at the
    first damage unless `partial`; then goes on at what looks like the next event.
    """
    # Latin-1 bytes survive as lone surrogates, which no UTF-8 text holds; so offsets stay those of the file.
    chars = without_infinity(text).decode("utf-8", "surrogateescape")
    found: list[Event] = []
    damage: list[tuple[int, str]] = []
    at = good = 0  # `good`: begin of the values that are whole and not decoded yet
    ended = False

    def take(end: int) -> None:
        nonlocal good
        piece = chars[good:end].strip(" \t\r\n,")
        if piece:
            try:
                found.extend(decode(_bytes(piece), exact))
            except BROKEN:
                _one_by_one(chars, good, end, found, damage)
        good = end

    while True:
        at = _BETWEEN.match(chars, at).end()
        if chars[at : at + 1] == "]":
            ended = True
            break
        if at >= len(chars):
            break
        try:
            _, end = _JSON.raw_decode(chars, at)
            bad = _NOT_UTF8.search(chars, at, end)
            if not bad:
                at = end
                continue
            where, reason = bad.start(), f"byte 0x{ord(bad[0]) - 0xDC00:02x} is not UTF-8"
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated string") or error.pos >= len(chars) - _SLACK
            if cut and not last:
                break
            where, reason = error.pos, f"no valid JSON: {error.msg}"
            if cut:
                where, reason = len(chars), EARLY
        except ValueError as error:  # a whole number of more digits than Python converts
            where, reason = at, f"no valid JSON: {error}"
        except RecursionError:
            where, reason = at, "nested too deeply"
        take(at)
        damage.append((len(_bytes(chars[:where])), reason))
        if not partial:
            break
        following = _NEXT.search(chars, at + 1)
        at = good = following.end() if following else len(chars)
    take(at)
    return found, len(_bytes(chars[: at + ended])), ended, damage


def _one_by_one(chars: str, at: int, end: int, found: list[Event], damage: list[tuple[int, str]]) -> None:
    """Values that json accepts and the typed decoder does not, one of them at least."""
    while (at := _BETWEEN.match(chars, at, end).end()) < end:
        _, after = _JSON.raw_decode(chars, at)
        try:
            found.extend(decode(_bytes(chars[at:after])))
        except BROKEN as error:
            damage.append((len(_bytes(chars[:at])), f"no valid event: {error}"))
        at = after


def _bytes(chars: str) -> bytes:
    return chars.encode("utf-8", "surrogateescape")

"""JSON text to events: typed, only the fields that are used, and forgiving where a value is of the wrong kind."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import msgspec

NAN = math.nan
_INT64 = 2**63


class Args(msgspec.Struct, gc=False):
    """What Kineto writes of an event's collective and of its launch (names: torch's ParamCommsUtils.cpp)."""

    correlation: int = -1
    collective: str | None = msgspec.field(default=None, name="Collective name")
    in_elements: int | None = msgspec.field(default=None, name="In msg nelems")
    out_elements: int | None = msgspec.field(default=None, name="Out msg nelems")
    dtype: str | None = None
    group_size: int | None = msgspec.field(default=None, name="Group size")
    group: str | None = msgspec.field(default=None, name="Process Group Name")
    ranks: str | None = msgspec.field(default=None, name="Process Group Ranks")
    seq: int | None = msgspec.field(default=None, name="Seq")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")


class Event(msgspec.Struct, gc=False):
    """One entry of `traceEvents`. A missing duration or time is NaN; only complete events ("ph": "X") have both."""

    name: str = ""
    cat: str = ""
    ts: float = NAN
    dur: float = NAN
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    args: Args | None = None


class ExactEvent(Event, gc=False):
    """An event whose time has more digits than a double holds."""

    ts: Decimal = Decimal("NaN")


class Head(msgspec.Struct):
    """The trace file around its events. What is of an unexpected kind stays as it is."""

    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    base_ns: Any = msgspec.field(default=0, name="baseTimeNanoseconds")


_decoders = {exact: msgspec.json.Decoder(list[kind]) for exact, kind in ((False, Event), (True, ExactEvent))}
decode_head = msgspec.json.Decoder(Head).decode
BROKEN = (ValueError, RecursionError)  # what decoding raises: msgspec's errors are ValueErrors

# `inf` and `nan` where a number belongs (kineto issue 105 and others), and numbers that no double holds. A string is
# matched first, and kept.
_NOT_A_NUMBER = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[-+]?\b(?:[Ii]nf(?:inity)?|[Nn]a[Nn])\b|(?<![\d.])\d[\d.]*+[eE]\+?\d{3,}', re.DOTALL
)


def decode(text: bytes | memoryview, exact: bool = False) -> list[Event]:
    """The events of a JSON array's inside (no brackets). ValueError or RecursionError where it is no JSON.

    exact: times as Decimal, for traces whose doubles would lose nanoseconds. It takes three times as long.
    """
    listed = b"".join((b"[", text, b"]"))
    try:
        return _decoders[exact].decode(listed)
    except msgspec.ValidationError:
        return forgiving(msgspec.json.decode(listed))


def without_infinity(text: bytes) -> bytes:
    """`inf` and `nan` become text of the same length, which is no time: the event is damaged then, its file is not."""
    return _NOT_A_NUMBER.sub(lambda match: match[0] if match[0][:1] == b'"' else b'"' + match[0][1:-1] + b'"', text)


def forgiving(entries: Any) -> list[Event]:
    """Events from plain JSON values, field by field: text where a number belongs is read, nonsense is left out."""
    return [_event(entry) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _event(entry: dict[str, Any]) -> Event:
    given = entry.get("args")
    args = None
    if isinstance(given, dict):
        args = Args(
            **{
                field.name: (_whole_number if "int" in str(field.type) else _text)(given.get(field.encode_name))
                for field in msgspec.structs.fields(Args)
                if field.type is not msgspec.Raw
            }
        )
        args.correlation = -1 if args.correlation is None else args.correlation
        for name, key in (("dims", "Input Dims"), ("types", "Input type")):
            setattr(args, name, msgspec.Raw(msgspec.json.encode(given.get(key))))
    return Event(
        _text(entry.get("name")) or "",
        _text(entry.get("cat")) or "",
        _number(entry.get("ts")),
        _number(entry.get("dur")),
        *(
            value if isinstance(value, int | str | float | None) else str(value)
            for value in map(entry.get, ("pid", "tid"))
        ),
        args,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float:
    try:
        return NAN if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return NAN


def _whole_number(value: Any) -> int | None:
    number = _number(value)
    return int(number) if math.isfinite(number) and abs(number) < _INT64 else None

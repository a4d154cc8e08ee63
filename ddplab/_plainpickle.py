"""Read a pickle that holds plain containers only, and refuse every other one before anything runs.

A pickle is a program. Its dangerous instructions name a class or a function and call it; what torch's flight recorder
writes needs none of them. So there is no unpickler here with a filter in front, but a tiny machine that knows how to
build dicts, lists, tuples, text and numbers, and nothing else (instructions: the pickletools module of Python).
"""

from __future__ import annotations

import pickletools
from typing import Any


class PlainPickleError(ValueError):
    """The pickle is torn, or asks for something beyond plain containers."""


_PUSHED_AS_IS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# The hash of a tuple of tuples of tuples can take for ever; torch's keys are text.
_KEYS = (str, int, float, bytes, type(None))
_MARK = object()


def loads(data: bytes) -> Any:
    """The object in `data`: dict, list, tuple, str, bytes, int, float, bool and None, nested as they like.

    PlainPickleError with the instruction and its offset for anything else, and for data that ends early.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    name, at = "the first instruction", 0
    try:
        for op, arg, byte in pickletools.genops(data):
            name, at = op.name, byte
            if name == "STOP":
                return _pop(stack, 1)[0]
            _run(name, arg, stack, memo)
    except PlainPickleError as problem:
        raise PlainPickleError(f"{problem} (byte {at})") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as problem:
        raise PlainPickleError(f"not a whole pickle: {_short(problem)} after {name} (byte {at})") from None
    raise PlainPickleError("the pickle has no end")  # genops insists on STOP; for readers


def _run(name: str, arg: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _PUSHED_AS_IS:
        stack.append(arg)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[arg] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[arg])
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name == "EMPTY_LIST":
        stack.append([])
    elif name == "MARK":
        stack.append(_MARK)
    elif name in _TUPLES:
        stack.append(tuple(_pop(stack, _TUPLES[name])))
    elif name == "TUPLE":
        stack.append(tuple(_above_mark(stack)))
    elif name in ("APPEND", "APPENDS"):
        items = _pop(stack, 1) if name == "APPEND" else _above_mark(stack)
        _top(stack, list).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _pop(stack, 2) if name == "SETITEM" else _above_mark(stack)
        target = _top(stack, dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, _KEYS):
                raise PlainPickleError(f"a {type(key).__name__} as a key: only text and numbers are read")
            target[key] = value
    elif name not in ("PROTO", "FRAME"):
        what = f"{name} {arg}" if isinstance(arg, str) else name
        raise PlainPickleError(
            f"instruction {what[:80]!r} is refused: it would build more than plain containers, so this is no dump of "
            "torch's flight recorder; nothing was run"
        )


def _pop(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise PlainPickleError("the stack is empty")
    items = stack[-count:]
    if any(item is _MARK for item in items):
        raise PlainPickleError("a mark where a value should be")
    del stack[-count:]
    return items


def _above_mark(stack: list[Any]) -> list[Any]:
    for i in range(len(stack) - 1, -1, -1):
        if stack[i] is _MARK:
            items = stack[i + 1 :]
            del stack[i:]
            return items
    raise PlainPickleError("no mark on the stack")


def _top(stack: list[Any], kind: type) -> Any:
    if not stack or type(stack[-1]) is not kind:
        raise PlainPickleError(f"no {kind.__name__} to add to")
    return stack[-1]


def _short(problem: Exception) -> str:
    return (str(problem) or type(problem).__name__).splitlines()[0][:120]

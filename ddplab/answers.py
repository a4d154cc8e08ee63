"""Ask a reader's function: its errors, endless loops and wrong answers become one sentence with the input in it."""

from __future__ import annotations

import contextlib
import copy
import math
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Number, Real
from typing import Any

from ddplab._arguments import instance, shown
from ddplab.checks import CheckError

LIMIT_S = 10.0
_NUMBERS = {float: Real, int: Integral}  # bool is both, and neither is meant
_ZERO = 1e-12  # absolute: what is left where numbers cancel


class _TooLong(BaseException):
    """Not an Exception: the reader's own `except Exception` must not catch it."""


def check_answers(
    fn: Callable, cases: Iterable[tuple], hint: str = "", close: float = 1e-9, limit_s: float = LIMIT_S
) -> None:
    """Check `fn(*arguments)` against known answers.

    cases: (arguments, answer) or (arguments, answer, what to say where it is missed). An answer is a number (equal to
    `close`, relative), text, True, False, None, or a list, tuple or dictionary of these; a list may come as a tuple or
    an array. Raises CheckError that names the arguments, what came, what was expected, and `hint`; see also `ask`.
    Prints one line if all is right.
    """
    instance(fn, Callable, "check_answers takes a function, and a list of (arguments, answer)")
    count = 0
    for arguments, right, *why in cases:
        answer = ask(fn, *arguments, limit_s=limit_s)
        if found := _difference(answer, right, close):
            said = " ".join(filter(None, [*why, hint]))
            call = f"{_name(fn)}({', '.join(map(_short, arguments))})"
            raise CheckError(f"{call}: {found}." + f" {said}" * bool(said))
        count += 1
    print(f"{_name(fn)}: right in {count} cases.")


def ask(fn: Callable, *arguments: Any, kind: type | tuple[type, ...] = object, limit_s: float = LIMIT_S) -> Any:
    """`fn(*arguments)`, on copies of the arguments.

    Raises CheckError with the line of the reader's code that raised, after `limit_s` seconds of an endless loop (in
    a main thread, where it can be stopped), and where the answer is not of `kind`; float stands for any number, numpy's
    too, and int for any whole one.
    """
    given = ", ".join(map(_short, arguments))
    try:
        with _limited(limit_s):
            answer = fn(*copy.deepcopy(arguments))
    except _TooLong as error:
        place = where(error, fn).removesuffix("_TooLong: ").removesuffix(": ")
        raise CheckError(
            f"{_name(fn)}({given}) did not come back within {limit_s:g} s: an endless loop? {place}"
        ) from None
    except CheckError:
        raise
    except NotImplementedError as error:
        raise CheckError(str(error)) from None
    except Exception as error:
        raise CheckError(f"{where(error, fn)}. That was {_name(fn)}({given}).") from None
    number = kind in (float, int)
    fits = isinstance(answer, _NUMBERS[kind]) and not isinstance(answer, bool) if number else isinstance(answer, kind)
    if not fits:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = {float: "a number", int: "a whole number"}[kind] if number else " or ".join(k.__name__ for k in kinds)
        raise CheckError(f"{_name(fn)}({given}) returned {_came(answer)}; expected: {wanted}.")
    return answer


def where(error: BaseException, fn: Callable) -> str:
    """ "line 4 of my_function: IndexError: ..." for the deepest frame of the traceback in the file of `fn`.

    A blank exercise says what to do, and nothing else.
    """
    if isinstance(error, NotImplementedError) and str(error):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    code = getattr(fn, "__code__", None)
    frames = traceback.walk_tb(error.__traceback__)
    mine = [(f, line) for f, line in frames if code and f.f_code.co_filename == code.co_filename]
    if not mine:
        return text
    frame, line = mine[-1]
    return f"line {line - frame.f_code.co_firstlineno + 1} of {frame.f_code.co_name}: {text}"


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _difference(answer: Any, right: Any, close: float) -> str | None:
    """In words, with what was expected; None where there is none."""
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    right = right.tolist() if hasattr(right, "tolist") else right
    expected = f"expected {_short(right)}, came {_came(answer)}"
    if right is None or isinstance(right, (bool, str)):
        return None if type(answer) is type(right) and answer == right else expected
    if isinstance(right, Number):
        if isinstance(answer, bool) or not isinstance(answer, Number):
            return expected
        same = answer == right or math.isclose(answer, right, rel_tol=close, abs_tol=_ZERO)
        return None if same else expected
    if isinstance(right, Mapping):
        if not isinstance(answer, Mapping) or set(answer) != set(right):
            return expected
        places = [(key, answer[key], right[key]) for key in right]
    else:
        if not isinstance(answer, (list, tuple)) or len(answer) != len(right):
            return expected
        places = list(zip(range(len(right)), answer, right, strict=True))
    for place, one, other in places:
        if found := _difference(one, other, close):
            return f"{expected}; in place {place!r}: {found}" if len(places) > 1 else expected
    return None


def _came(answer: Any) -> str:
    return "None (is there a `return` on every way through it?)" if answer is None else _short(answer)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value.__name__ if callable(value) and hasattr(value, "__name__") else shown(value)


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)

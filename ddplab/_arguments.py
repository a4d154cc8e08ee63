"""Checks of arguments: what makes no sense becomes a sentence that names the argument, its value, and what fits.

Numbers have `ddplab.transfers.count` and `number`; here are truth values, words, things of a kind, and lists of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

_LONGEST = 100


def shown(value: Any) -> str:
    """A value in a message: as Python writes it, if that is short; else what it is."""
    text = repr(value)
    if len(text) <= _LONGEST and "\n" not in text:
        return text
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if isinstance(shape, tuple) else "")


def flag(value: Any, what: str) -> bool:
    """`value` if it is True or False; TypeError for anything else, such as "no", which Python takes for true."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} is True or False, not {shown(value)}")
    return bool(value)


def choice(value: Any, what: str, known: Iterable[str]) -> str:
    """`value` if it is one of the words `known`; ValueError otherwise."""
    words = list(known)
    if not isinstance(value, str) or value not in words:
        listed = " or ".join(filter(None, [", ".join(f'"{word}"' for word in words[:-1]), f'"{words[-1]}"']))
        raise ValueError(f"{what} is {listed}, not {shown(value)}")
    return value


def instance(value: Any, kinds: type | tuple[type, ...], what: str) -> Any:
    """`value` if it is of one of the kinds; TypeError otherwise. `what`: "scaler is a GradScaler or None"."""
    if not isinstance(value, kinds):
        raise TypeError(f"{what}, not {shown(value)}")
    return value


def several(values: Any, what: str) -> list[Any]:
    """The things in `values`, at least one. `what`: "seeds are whole numbers, such as range(5)". TypeError for what is
    no collection (or is text, a collection of letters, or a mapping), ValueError for an empty one."""
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise TypeError(f"{what}, not {shown(values)}")
    try:
        listed = list(values)
    except TypeError:  # a tensor or an array without dimensions
        raise TypeError(f"{what}, not {shown(values)}") from None
    if not listed:
        raise ValueError(f"{what}: there must be at least one")
    return listed

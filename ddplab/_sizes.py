"""Message sizes in words, as nccl-tests takes them: "1K:128M" doubles from 1 KiB to 128 MiB."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_POWER = {"": 0, "K": 1, "M": 2, "G": 3}
_MOST_BYTES = 2**50
_MOST_SIZES = 1000

Sizes = str | int | Iterable[str | int]


def parse_sizes(sizes: Sizes) -> list[int]:
    """Bytes from "1K:128M" (times 2), "1K:128M:4" (times 4), "1K,1M", "25.6MB", a number, or an iterable of such.

    K, M, G and KiB, MiB, GiB are powers of 1024 as in nccl-tests; KB, MB, GB are powers of 1000. ValueError otherwise.
    """
    if isinstance(sizes, str) and ":" in sizes:
        return _sweep(sizes)
    if isinstance(sizes, str):
        sizes = sizes.split(",")
    elif isinstance(sizes, (int, float)):
        sizes = [sizes]
    try:
        parsed = [_nbytes(size) for size in sizes]
    except TypeError:
        raise _refusal(sizes) from None
    if not 0 < len(parsed) <= _MOST_SIZES:
        raise ValueError(f"There must be 1 to {_MOST_SIZES} sizes, not {len(parsed)}.")
    return parsed


def _sweep(text: str) -> list[int]:
    first, last, *rest = text.split(":")
    factor = rest[0].strip() if rest else "2"
    if len(rest) > 1 or not factor.isdecimal() or int(factor) < 2:
        raise _refusal(text)
    size, high = _nbytes(first), _nbytes(last)
    if size > high:
        raise ValueError(f"The sizes {text!r} run backwards: write the smaller one first.")
    sizes = []
    while size <= high:
        sizes.append(size)
        size *= int(factor)
    return sizes


def _nbytes(size: Any) -> int:
    number, factor = size, 1
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([KMG]?)(I?B)?", size.strip().upper())
        if not match or (match[3] == "IB" and not match[2]):
            raise _refusal(size)
        number, factor = float(match[1]), (1000 if match[3] == "B" else 1024) ** _POWER[match[2]]
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number * factor >= 1:
        raise _refusal(size)
    if number * factor > _MOST_BYTES:
        raise ValueError(f"{size!r} is too large: a size is at most 1 PiB, 2^50 bytes.")
    return round(number * factor)


def _refusal(size: Any) -> ValueError:
    return ValueError(
        f'{size!r} is not a size: write "1K:128M" (from:to, doubling), "1K:128M:4" (times 4), "1K,1M", "25.6MB", or a '
        "number of bytes, 1 or more."
    )

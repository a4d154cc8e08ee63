"""What an event says of its collective, from its arguments and its name."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ddplab.trace import kernels
from ddplab.trace.columns import Message
from ddplab.trace.events import Event

NONE = Message()


def message_of(event: Event) -> Message:
    """The message of a kernel or of a distributed annotation; `NONE` if nothing is told."""
    args = event.args
    if args is None:
        return Message(collective=kernels.collective(event.name))
    elements, dtype = args.in_elements, args.dtype
    if elements is None:  # older traces, and gloo's: the shape and type of the operator's first input
        shapes, types = _list(args.dims), _list(args.types)
        elements = _elements(shapes[0]) if shapes else None
        dtype = types[0] if types and isinstance(types[0], str) else None
    return Message(
        collective=kernels.collective(args.collective or event.name),
        in_elements=natural(elements),
        out_elements=natural(args.out_elements),
        dtype=kernels.dtype(dtype),
        group_size=natural(args.group_size),
        group=args.group,
        ranks=args.ranks,
        seq=natural(args.seq),
    )


def natural(value: Any) -> int | None:
    """`value` where it is a count that int64 holds, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else None


def _elements(shape: Any) -> int | None:
    """Elements of a tensor of that shape, or of a list of tensors: a list of shapes."""
    if not isinstance(shape, list):
        return None
    if any(isinstance(part, list) for part in shape):
        return sum(_elements(part) or 0 for part in shape)
    return math.prod(shape) if all(natural(n) is not None for n in shape) else None


def _list(raw: msgspec.Raw) -> list:
    try:
        found = msgspec.json.decode(raw) if len(bytes(raw)) else []
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []

"""What all ranks must share: options when a hook is made, counters and factors when a run goes on from a checkpoint.

Ranks that disagree would hang, or add up different elements and say nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ddplab.hooks.wire import Wire

AFTER_LOADING = (
    ". A checkpoint was loaded on some ranks only, or from different steps: let every rank load what it saved itself, "
    "all at the same step"
)


def require_agreement(wire: Wire, mine: dict[str, Any], advice: str = "") -> None:
    """ValueError on every rank of the wire's group, with each rank's value, if a value of `mine` differs between them.

    The keys say what the values are, such as "TopK's ratio". Every rank of the group calls it.
    """
    if wire.size == 1:
        return
    everyones: list[dict[str, Any]] = [{} for _ in range(wire.size)]
    dist.all_gather_object(everyones, mine, group=wire.group)
    for name in everyones[0]:
        values = [theirs.get(name) for theirs in everyones]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in zip(wire.ranks, values, strict=True))
            raise ValueError(f"{name} must be the same on all ranks: {listed}{advice}")


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A few letters for many numbers, other ones for other bits."""
    checksum = 0
    for t in tensors:
        raw = t.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        checksum = zlib.crc32(raw, zlib.crc32(str(tuple(t.shape)).encode(), checksum))
    return f"{checksum:08x}"

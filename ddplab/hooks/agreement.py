"""Options of a hook that all ranks must share. Ranks that disagree would hang, or add up different elements."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ddplab.hooks.wire import Wire


def require_agreement(wire: Wire, whose: str, /, **options: Any) -> None:
    """ValueError on every rank of the wire's group, with each rank's value, if an option differs between them."""
    if wire.size == 1:
        return
    all_options: list[dict[str, Any]] = [{} for _ in range(wire.size)]
    dist.all_gather_object(all_options, options, group=wire.group)
    for name in options:
        values = [theirs[name] for theirs in all_options]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in zip(wire.ranks, values, strict=True))
            raise ValueError(f"{whose}'s {name} must be the same on all ranks: {listed}")

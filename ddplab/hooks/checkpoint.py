"""Is this the saved state of this hook, on this rank? Asked before anything of it is taken."""

from __future__ import annotations

from typing import Any

import torch

from ddplab._arguments import shown


def require_own(saved: Any, mine: dict[str, Any]) -> None:
    """ValueError unless `saved` is what the hook whose state is `mine` saved on this rank, undamaged."""
    method = saved.get("method") if isinstance(saved, dict) else None
    if method != mine["method"] or saved.keys() != mine.keys():
        what = f"that of {method}" if method else f"no state_dict() of a hook, but {type(saved).__name__}"
        raise ValueError(f"this is no state of {mine['method']}, it is {what}")
    for key in ("rank", "world_size"):
        if saved[key] != mine[key]:
            raise ValueError(f"{key} was {saved[key]} when this state was saved and is {mine[key]} now")
    for key, value in mine.items():
        if not _fits(saved[key], value):
            what = {dict: "tensors by place", str: "text"}.get(type(value), "a number, 0 or more")
            raise ValueError(f"this state of {mine['method']} is damaged: {key} is {what}, not {shown(saved[key])}")


def _fits(saved: Any, mine: Any) -> bool:
    if isinstance(mine, dict):
        return isinstance(saved, dict) and all(
            isinstance(place, str) and place.isdecimal() and (_is_values(value) or _is_flat(value))
            for place, value in saved.items()
        )
    if isinstance(mine, (int, float)):
        number = isinstance(saved, (type(mine), int)) and not isinstance(saved, bool)
        return number and 0 <= saved < float("inf")
    return isinstance(saved, type(mine))


def _is_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_flat(value: Any) -> bool:
    """A `ddplab.hooks.residuals.Flat`."""
    if not isinstance(value, dict) or value.keys() != {"layout", "now"} or not _is_values(value["now"]):
        return False
    layout = value["layout"]
    return isinstance(layout, torch.Tensor) and layout.dtype == torch.int64 and layout.dim() == 2

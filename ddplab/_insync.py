"""Do all ranks hold the same gradients? The question that a silent DDP bug answers with no."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn


def assert_grads_in_sync(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """AssertionError on every rank unless all ranks hold the same gradients, bit for bit (0.0 equals -0.0).

    Names the first parameter that differs, its first differing element, and each rank's value. Every rank must call it.
    An all-reduce leaves the same bytes on all ranks, so no tolerance is needed. Costs one exchange of 8 bytes a
    parameter; values travel only when something differs. A single process without a group agrees with itself.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"assert_grads_in_sync takes a model, wrapped or not, not {type(model).__name__}")
    if not (dist.is_available() and dist.is_initialized()):
        return
    group = group or getattr(model, "process_group", None)
    module = model.module if hasattr(model, "no_sync") else model
    grads = {n: None if p.grad is None else p.grad.detach().to_dense() for n, p in module.named_parameters()}
    tables: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(tables, {n: _digest(g) for n, g in grads.items()}, group=group)
    names = list(dict.fromkeys(n for table in tables for n in table))
    differing = [n for n in names if len({table.get(n, "no such parameter") for table in tables}) > 1]
    if not differing:
        return
    name = differing[0]
    values: list = [None] * len(tables)
    mine = grads.get(name)
    dist.all_gather_object(values, None if mine is None else mine.cpu(), group=group)
    others = f"; {len(differing) - 1} more differ: {', '.join(differing[1:6])}" if len(differing) > 1 else ""
    raise AssertionError(f"gradients differ between ranks: {name}{_difference(values)}{others}")


def _digest(grad: torch.Tensor | None) -> str | None:
    if grad is None:
        return None
    raw = (grad + 0.0).contiguous().reshape(-1).view(torch.uint8).cpu().numpy()  # -0.0 + 0.0 is 0.0
    return hashlib.blake2b(raw, digest_size=8, salt=str(tuple(grad.shape)).encode()[:16]).hexdigest()


def _difference(values: list[torch.Tensor | None]) -> str:
    here = [r for r, v in enumerate(values) if v is not None]
    if len(here) < len(values):
        without = [r for r, v in enumerate(values) if v is None]
        return f": a gradient on rank {', '.join(map(str, here))}, none on rank {', '.join(map(str, without))}"
    if len({v.shape for v in values}) > 1:
        return ": " + ", ".join(f"rank {r} has shape {tuple(v.shape)}" for r, v in enumerate(values))
    table = torch.stack([v.reshape(-1).to(torch.promote_types(v.dtype, torch.float64)) for v in values])
    same = ((table == table[0]) | (table.isnan() & table[0].isnan())).all(dim=0)
    first = int(same.int().argmin())
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), values[0].shape)] if values[0].dim() else ""
    said = ", ".join(f"rank {r} has {row[first].item()}" for r, row in enumerate(table))
    return f"{index}: {said} ({int((~same).sum())} of {same.numel()} elements)"

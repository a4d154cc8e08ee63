"""Small exchanges between ranks: a few integers, tensors from the first rank, and "is it the same model?"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn


def gather_ints(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Every rank's `values` (same length everywhere), in rank order: one all-gather of int64."""
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(table, mine, group=group)
    return [row.tolist() for row in table]


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensors` on every rank with those of the group's first rank: one broadcast per dtype and device.

    The values travel as bytes, so any dtype will do.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for t in tensors:
        if t.numel():
            kinds.setdefault((t.dtype, t.device), []).append(t.detach())
    for same in kinds.values():
        flat = torch.cat([t.reshape(-1) for t in same])
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
        for t, piece in zip(same, flat.split([t.numel() for t in same]), strict=True):
            t.copy_(piece.view(t.shape))


def check_same_model(module: nn.Module, group: dist.ProcessGroup) -> None:
    """ValueError on every rank, naming the first parameter or buffer that is not the same on all."""
    lazy = [n for n, p in module.named_parameters() if nn.parameter.is_lazy(p)]
    mine = {n: "uninitialised: run one forward first" for n in lazy}
    for n, t in [*module.named_parameters(), *module.named_buffers()]:
        kind = "trainable" if t.requires_grad else "frozen" if isinstance(t, nn.Parameter) else "buffer"
        # The elements of a gradient travel in the order in which they lie in memory.
        laid = t.requires_grad and n not in lazy and not t.is_contiguous()
        layout = f", strides {tuple(t.stride())}" if laid else ""
        mine.setdefault(n, "" if n in lazy else f"{tuple(t.shape)} {t.dtype} {kind}{layout}")
    tables: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(tables, mine, group=group)
    for rank, other in enumerate(tables):
        for name in [*tables[0], *other]:
            here, there = tables[0].get(name, "missing"), other.get(name, "missing")
            if here != there:
                raise ValueError(f"the ranks' models differ: {name!r} is {here} on rank 0, {there} on rank {rank}")
    if lazy:
        raise ValueError(f"parameter {lazy[0]!r} is {mine[lazy[0]]}")

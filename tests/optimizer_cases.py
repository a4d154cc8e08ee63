"""What the tests of optimizers that talk share: a small model, its data by step and rank, what the ranks agree on."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 5, generator=made), torch.randn(4, 2, generator=made)


def gradients(model: nn.Module, step: int, rank: int) -> None:
    """The gradients of a rank's batch, in `model`; what was there before goes."""
    x, y = batch(step, rank)
    model.zero_grad()
    nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y).backward()


def values(model: nn.Module) -> torch.Tensor:
    """All parameters as one tensor."""
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def equal_everywhere(*tensors: torch.Tensor) -> bool:
    """Do all ranks hold the same, to the bit? Every rank must ask."""
    rows: list = [None] * dist.get_world_size()
    dist.all_gather_object(rows, list(tensors))
    return all(torch.equal(a, b) for row in rows for a, b in zip(rows[0], row, strict=True))


def outcome(call: Callable[[], object]) -> str:
    """What `call` gives, warns or raises."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            said = repr(call())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return "; ".join([said, *(f"{w.category.__name__}: {w.message}" for w in seen)])

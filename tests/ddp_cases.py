"""What the tests of the DDPs share: the four of them, a small model, batches known to all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddplab.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP

OURS = {"naive": NaiveDDP, "flat": FlatDDP, "overlapped": OverlappedDDP, "bucketed": BucketedDDP}
EACH = pytest.mark.parametrize("name", OURS)


def toy():
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3))


def batch(rank: int, step: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(10_000 + 100 * step + rank)
    return torch.randn(rows, *shape, generator=g, dtype=torch.float64).to(dtype)


def outcome(fn):
    try:
        return fn()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"

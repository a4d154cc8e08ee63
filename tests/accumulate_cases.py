"""What the tests of gradient accumulation share: torch's DDP and ours, two models, samples, the big batch.

The recurring model is w * x with a scalar w, so that the gradient is x: rank 0 sees 1, 10 and rank 1 sees 2, 20. The
sum over a window of two, averaged over the ranks, is ((1 + 10) + (2 + 20)) / 2 = 16.5.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP

OURS = {"naive": NaiveDDP, "flat": FlatDDP, "overlapped": OverlappedDDP, "bucketed": BucketedDDP}
WRAPPERS = {
    "torch": TorchDDP,
    "torch, views": lambda m: TorchDDP(m, gradient_as_bucket_view=True),
    **OURS,
}
EACH = pytest.mark.parametrize("name", WRAPPERS)


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.w * x


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Times(), Times()

    def forward(self, x, which):
        return getattr(self, which)(x)


def counted(ddp):
    """Count buckets reduced, on any DDP with torch's hook interface."""
    calls = [0]

    def hook(state, bucket):
        calls[0] += 1
        buffer = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    return ddp, calls


def finish(ddp):
    getattr(ddp, "finish", lambda: None)()


def outcome(fn):
    """What `fn` returns, or what it complained of."""
    try:
        return fn()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


def grads(ddp):
    return [p.grad.item() for p in ddp.parameters()]


def mine():
    return [(1.0, 10.0), (2.0, 20.0)][dist.get_rank()]


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def samples(rank, sizes):
    g = torch.Generator().manual_seed(100 + rank)
    shape = lambda n, d: torch.randn(n, d, generator=g, dtype=torch.float64)  # noqa: E731
    return [(shape(n, 6), shape(n, 3)) for n in sizes]


RAGGED = [4] * 10 + [3]


def big_batch(batches_per_rank, windows):
    """One process: the gradient of the mean over all samples of each window, whoever held them."""
    model, found = net(), []
    for lo, hi in windows:
        model.zero_grad()
        rows = [b for batches in batches_per_rank for b in batches[lo:hi]]
        x, y = (torch.cat(parts) for parts in zip(*rows, strict=True))
        nn.functional.mse_loss(model(x), y).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found

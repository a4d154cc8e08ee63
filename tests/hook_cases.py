"""What the tests of the communication hooks share: the methods, the wrappers, a model for which all is known."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist
from ddp_cases import OURS, toy
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab.hooks.base import comm_hook
from ddplab.hooks.cast import bf16, fp16
from ddplab.hooks.hierarchical import Hierarchical
from ddplab.hooks.int8 import int8
from ddplab.hooks.onebit import onebit
from ddplab.hooks.powersgd import powersgd
from ddplab.hooks.sparse import randomk, topk

CORE = {"fp16": fp16, "onebit": onebit, "int8": int8}
EVERY = CORE | {
    "bf16": bf16,
    "topk": topk,
    "randomk": randomk,
    "powersgd": powersgd,
    "hierarchical": lambda **options: (Hierarchical(**options), comm_hook),
}
CASTS = {"fp16": fp16, "bf16": bf16}  # of one class: what differs is what they can hold
FEEDBACK = {"onebit": onebit, "int8": int8}
WRAPPERS = {"torch": TorchDDP, "torch, static": lambda m: TorchDDP(m, static_graph=True), **OURS}


class Given(nn.Module):
    """Its gradients are what it is called with: one tensor for each parameter, in their order."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, *gradients):
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def step(ddp, *gradients):
    """One backward with these gradients on this rank; the reduced ones."""
    ddp.zero_grad()
    ddp(*gradients).backward()
    getattr(ddp, "finish", lambda: None)()
    return [p.grad.clone() for p in ddp.module.parameters()]


def hooked(make, model, wrap=TorchDDP, **options):
    """(ddp, state) of a method around a model."""
    ddp = wrap(model)
    state, hook = make(**options)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def many_buckets(find_unused_parameters: bool = False):
    """A torch DDP of 12 parameters in at least 6 buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(toy(), nn.Linear(3, 5), nn.Tanh(), toy())
    return TorchDDP(model, bucket_cap_mb=1e-5, find_unused_parameters=find_unused_parameters)


def delay(state, seed: int, longest: float) -> None:
    """Make the state's communication lane late by a random time before every exchange."""
    exchange, dice = state.exchange, random.Random(seed)

    def late(work):
        time.sleep(dice.random() * longest)
        return exchange(work)

    state.exchange = late


def equal(a, b) -> bool:
    """Bit for bit, through nested dictionaries."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a == b


def same_on_all_ranks(tensors) -> bool:
    """Are these tensors bit for bit those of every other rank?"""
    flat = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return all(torch.equal(flat, row) for row in rows)


def soak(make, steps: int, seed: int, longest: float, find_unused_parameters: bool) -> tuple[bool, int]:
    """Train with random delays in backward and in the lane: (all ranks the same afterwards?, buckets)."""
    rank = dist.get_rank()
    ddp = many_buckets(find_unused_parameters)
    state, hook = make()
    seen: set[int] = set()

    def counting(state, bucket):
        seen.add(bucket.index())
        return hook(state, bucket)

    ddp.register_comm_hook(state, counting)
    delay(state, 1000 * seed + rank, longest)
    dice = random.Random(1000 * seed + rank + 500)
    for p in ddp.module.parameters():
        p.register_hook(lambda grad: time.sleep(dice.random() * longest / 10))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        (ddp(torch.randn(4, 5, generator=generator)).sin() ** 2).mean().backward()
        optimizer.step()
    same = same_on_all_ranks(ddp.module.parameters())
    state.close()
    return same, len(seen)

"""How each method makes a training step, and which one it has to be compared with.

A recipe is run by a `Trainer` on every rank: the same small interface for hooks under torch's DDP, for optimizers that
communicate themselves, and for training alone between two agreements. Nothing is tuned for a method: it takes the
learning rate of its baseline, as somebody does who adds a line to a script that works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddplab._arguments import instance
from ddplab.hooks.cast import fp16
from ddplab.hooks.int8 import int8
from ddplab.hooks.onebit import onebit
from ddplab.hooks.powersgd import powersgd
from ddplab.hooks.sparse import randomk, topk
from ddplab.local_sgd import DiLoCo, PostLocalSGD
from ddplab.onebit_adam import OneBitAdam

SGD_LR, MOMENTUM = 0.05, 0.9
ADAM_LR, BETAS = 2e-3, (0.9, 0.99)
RATIO = 0.01  # of the elements, where few are sent
EVERY = 10  # H: steps between two agreements
WARMUP = 0.2  # of all steps, where a method has a warm-up: the 20% of claim C64


class Trainer:
    """One rank's model in training. `exchanges`: how often the ranks have communicated, one after the other."""

    exchanges = 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """One optimizer step on this rank's batch. ValueError on every rank if a gradient is not finite."""
        raise NotImplementedError

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that this rank has put on the wire for steps."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the last step of a run that came to its end, on every rank."""

    def close(self) -> None:
        """Give back what the method holds, on every rank."""


class Hooked(Trainer):
    """torch's DDP with a communication hook, or without one. `make` gives (state, hook)."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, make: Callable | None, per_step: int = 1):
        self.ddp, self.optimizer, self.per_step = DistributedDataParallel(model), optimizer, per_step
        self.state = None
        self._ring = 0
        if make is not None:
            self.state, hook = make()
            self.ddp.register_comm_hook(self.state, hook)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.ddp(x), y).backward()
        self.optimizer.step()
        self.exchanges += self.per_step
        self._ring += ring_bytes(sum(p.grad.nbytes for p in self.ddp.parameters()))

    @property
    def wire_bytes(self) -> int:
        return self._ring if self.state is None else self.state.wire_bytes

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


class Own(Trainer):
    """An optimizer that communicates by itself. `is_exchange(step)` says in which steps, from 1, it does."""

    def __init__(self, model: nn.Module, optimizer: Any, is_exchange: Callable[[int], bool] = lambda step: True):
        self.model, self.optimizer, self.is_exchange, self.steps = model, optimizer, is_exchange, 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.exchanges += self.is_exchange(self.steps)

    @property
    def wire_bytes(self) -> int:
        return self.optimizer.wire_bytes

    def finish(self) -> None:
        getattr(self.optimizer, "finish", lambda: None)()

    def close(self) -> None:
        getattr(self.optimizer, "close", lambda: None)()


def ring_bytes(nbytes: int) -> int:
    """What a ring all-reduce of `nbytes` has a rank send."""
    n = dist.get_world_size()
    return 2 * (n - 1) * nbytes // n


@dataclass(frozen=True)
class Recipe:
    """A method. `make(model, steps, lr_factor)` gives this rank's `Trainer`; `says` is one line on what is sent.

    baseline: the name of the recipe that it is compared with; None for a baseline.
    """

    make: Callable[[nn.Module, int, float], Trainer]
    baseline: str | None
    says: str

    def __post_init__(self) -> None:
        instance(self.make, Callable, "a recipe's make is a function (model, steps, lr_factor) that gives a Trainer")
        instance(self.baseline, (str, NoneType), "a recipe's baseline is the name of another one, or None")
        instance(self.says, str, "what a recipe says is text")


def _sgd(model: nn.Module, lr_factor: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr_factor * SGD_LR, momentum=MOMENTUM)


def _adam(model: nn.Module, lr_factor: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr_factor * ADAM_LR, betas=BETAS)


def _plain(optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]) -> Recipe:
    return Recipe(lambda model, steps, lr: Hooked(model, optimizer(model, lr), None), None, "every gradient, 4 bytes")


def _hook(make: Callable, says: str, per_step: int = 1, **options: Any) -> Recipe:
    def trainer(model: nn.Module, steps: int, lr_factor: float) -> Trainer:
        return Hooked(model, _sgd(model, lr_factor), lambda: make(module=model, **options), per_step)

    return Recipe(trainer, "fp32", says)


def _onebit_adam(says: str, warmup: float = WARMUP, **options: Any) -> Recipe:
    def trainer(model: nn.Module, steps: int, lr_factor: float) -> Trainer:
        how = {"lr": lr_factor * ADAM_LR, "betas": BETAS, "warmup": max(1, round(warmup * steps)), "stable": None}
        return Own(model, OneBitAdam(model.named_parameters(), **how, **options))

    return Recipe(trainer, "Adam", says)


def _post_local(model: nn.Module, steps: int, lr_factor: float) -> Trainer:
    warmup = round(WARMUP * steps)
    optimizer = PostLocalSGD(model, _sgd(model, lr_factor), EVERY, warmup=warmup)
    return Own(model, optimizer, lambda step: step <= warmup or (step - warmup) % EVERY == 0)


def _diloco(model: nn.Module, steps: int, lr_factor: float) -> Trainer:
    return Own(model, DiLoCo(model, _adam(model, lr_factor), EVERY), lambda step: step % EVERY == 0)


_LOST = ", what is not sent is lost"

RECIPES: dict[str, Recipe] = {
    "fp32": _plain(_sgd),
    "fp16": _hook(fp16, "every gradient, 2 bytes"),
    "int8": _hook(int8, "every gradient, 1 byte"),
    "1-bit": _hook(onebit, "signs and scales"),
    "1-bit without feedback": _hook(onebit, f"signs and scales{_LOST}", error_feedback=False),
    "top-k": _hook(topk, "the largest 1%, with indices", ratio=RATIO),
    "top-k without feedback": _hook(topk, f"the largest 1%{_LOST}", ratio=RATIO, error_feedback=False),
    "random-k": _hook(randomk, "a random 1%", ratio=RATIO),
    "random-k without feedback": _hook(randomk, f"a random 1%{_LOST}", ratio=RATIO, error_feedback=False),
    "PowerSGD": _hook(powersgd, "two thin matrices, rank 4", per_step=2, rank=4),
    "post-local SGD": Recipe(_post_local, "fp32", f"gradients in the warm-up, then parameters every {EVERY} steps"),
    "Adam": _plain(_adam),
    "1-bit Adam": _onebit_adam("gradients in the warm-up, then signs and scales of the step"),
    "1-bit Adam as published": _onebit_adam("the same, of the momentum itself", preconditioned=False, floor=0.0),
    "1-bit Adam without feedback": _onebit_adam(f"the same{_LOST}", error_feedback=False),
    "1-bit Adam without warm-up": _onebit_adam("one exact step, then signs and scales", warmup=0),
    "DiLoCo": Recipe(_diloco, "Adam", f"the change of the parameters, every {EVERY} steps"),
}

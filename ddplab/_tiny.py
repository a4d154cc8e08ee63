"""What a DDP is checked against: tiny float64 models, batches, gradients; every rank builds them itself, from seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]

TOLERANCE = 1e-10
ROWS = 4


def tiny() -> nn.Module:
    """Three layers, a frozen one between them, a buffer."""
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 6))
    model.add_module("frozen", nn.Linear(6, 6).requires_grad_(False))
    model.add_module("norm", nn.BatchNorm1d(6, affine=False).eval())
    model.add_module("middle", nn.Linear(6, 5))
    model.add_module("bend", nn.Tanh())
    model.add_module("last", nn.Linear(5, 3))
    return model


def tied() -> nn.Module:
    """The output layer's weight is the input layer's."""
    model = nn.Sequential()
    model.add_module("embed", nn.Linear(4, 4, bias=False))
    model.add_module("mix", nn.Linear(4, 4))
    model.add_module("out", nn.Linear(4, 4, bias=False))
    model.out.weight = model.embed.weight
    return model


def build(make: Callable, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().double()
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
        return model


def batch_of(rank: int, step: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, 4, generator=seeded, dtype=torch.float64)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out.sin() ** 2).mean()


def gradients(model: nn.Module, ranks: Iterable[int], step: int) -> Tensors:
    """One process' gradients on these ranks' batches; leaves `model` and its `.grad` as they are."""
    loss = loss_of(model(torch.cat([batch_of(rank, step) for rank in ranks])))
    trained = trained_parameters(model)
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


class Momentum:
    """SGD with momentum. (torch.optim would load the compiler into every rank, which takes longer than all checks.)"""

    def __init__(self, params: Mapping[str, nn.Parameter], lr: float = 0.1, momentum: float = 0.9):
        self.params, self.lr, self.momentum = params, lr, momentum
        self.speed = {name: torch.zeros_like(p) for name, p in params.items()}

    @torch.no_grad()
    def step(self, grads: Tensors) -> None:
        for name, p in self.params.items():
            self.speed[name].mul_(self.momentum).add_(grads[name])
            p.sub_(self.lr * self.speed[name])


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def state_of(model: nn.Module) -> Tensors:
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def add(a: Tensors, b: Tensors) -> Tensors:
    return {name: a[name] + b[name] for name in a}


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= TOLERANCE)

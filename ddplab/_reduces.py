"""Watch a rank's all-reduces during backward: what each carries, and how many gradients were ready when it left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

_CLOSE = 1e-12


@dataclass(frozen=True)
class Call:
    """One `dist.all_reduce`."""

    gradients: tuple[str, ...]  # the parameters whose gradient it carries
    parameters: tuple[str, ...]  # the parameters that it carries themselves
    ready: int  # gradients that backward had finished
    in_backward: bool


class Reduces:
    """Within `with Reduces(model) as reduces:` the calls of each step are recorded in `reduces.calls`.

    What a call carries is told by address (`p.grad`, `p`), and by value for copies in a flat buffer: a gradient counts
    as found wherever its numbers stand one after another. Only calls through `torch.distributed` are seen; torch's own
    reducer makes its calls from C++.
    """

    def __init__(self, model: nn.Module):
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.calls: list[Call] = []
        self._values: dict[str, list[torch.Tensor]] = {}
        self._weights: dict[str, list[torch.Tensor]] = {}
        self._ready, self._in_backward, self._recording = 0, False, False
        for p in self.trained.values():  # before the wrapper's hooks, so that the count includes the one just done
            p.register_post_accumulate_grad_hook(self._count)

    def _count(self, p: torch.Tensor) -> None:
        self._ready += 1

    @contextmanager
    def step(self, local: dict[str, torch.Tensor], mean: dict[str, torch.Tensor], ranks: int) -> Iterator[None]:
        """Record one step. `local` and `mean`: each gradient before and after the reduction."""
        factors = (1, 1 / ranks)
        self._values = {n: [local[n] * f for f in factors] + [mean[n] * f for f in (*factors, ranks)] for n in local}
        self._weights = {n: [p.detach().clone() * f for f in factors] for n, p in self.trained.items()}
        self.calls, self._ready, self._recording = [], 0, True
        try:
            yield
        finally:
            self._recording = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the call of `backward()`."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def __enter__(self) -> Reduces:
        self._real = c10d.all_reduce
        for home in (dist, c10d):
            home.all_reduce = self._all_reduce
        return self

    def __exit__(self, *error: object) -> None:
        for home in (dist, c10d):
            home.all_reduce = self._real

    def _all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._recording:
            here, flat = tensor.data_ptr(), tensor.detach().flatten()
            gradients, parameters = [], []
            for name, p in self.trained.items():
                if p.grad is not None and p.grad.data_ptr() == here or _holds(flat, self._values[name]):
                    gradients.append(name)
                elif p.data_ptr() == here or _holds(flat, self._weights[name]):
                    parameters.append(name)
            self.calls.append(Call(tuple(gradients), tuple(parameters), self._ready, self._in_backward))
        return self._real(tensor, *args, **kwargs)


def _holds(flat: torch.Tensor, pieces: list[torch.Tensor]) -> bool:
    """Do the numbers of one of `pieces` stand in `flat`, one after another?"""
    if flat.numel() < pieces[0].numel():
        return False
    windows = flat.unfold(0, pieces[0].numel(), 1)
    for piece in map(torch.flatten, pieces):
        begun = windows[(windows[:, 0] - piece[0]).abs() < _CLOSE]  # few: to compare them all in full takes long
        if bool(((begun - piece).abs().amax(1) < _CLOSE).any()):
            return True
    return False

"""Paced compute: a module with parameters of the real sizes whose backward waits on the clock instead of computing.

Four ranks' real backward on two cores fights with the network threads for the cores, which a GPU's does not. A paced
backward sleeps for the recorded time: it takes no processor, as a GPU's kernels take none of the host, and everything
else (buckets, hooks, bytes, waiting) is real. Numbers made with it are called *paced*.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from ddplab.profile import Gradient, Profile
from ddplab.transfers import number


class _Wait(torch.autograd.Function):
    """Gives gradients to parameters after waiting. Forward costs nothing, whatever the sizes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, *weights: torch.Tensor) -> torch.Tensor:
        ctx.seconds, ctx.like = seconds, [(w.shape, w.dtype, w.device) for w in weights]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        deadline = time.perf_counter() + ctx.seconds
        value = gradient.item()
        made = [torch.full(shape, value, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        wait_until(deadline)  # filling the gradients is part of the time, not on top of it
        return gradient, None, *made


class Paced(nn.Module):
    """Made by `paced`. `profile` is what it plays; `forward(x)` waits for `profile.forward_s` and returns a scalar.

    The scalar is x's mean (1 without an x), and every element of every gradient is that scalar's own upstream gradient
    times the mean of x: different on each rank where the inputs are, so that an average can be checked.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self.profile = profile
        by_position = sorted(profile.gradients, key=lambda g: g.position)
        for g in by_position:
            name = g.name.replace(".", "_")  # torch allows no dot in a parameter's own name
            weight = torch.zeros((g.elements,) if g.shape is None else g.shape, dtype=getattr(torch, g.dtype))
            self.register_parameter(f"{name}_{g.position}" if hasattr(self, name) else name, nn.Parameter(weight))
        weights = dict(zip(by_position, self.parameters(), strict=True))
        before, self._stages = 0.0, []
        for g in profile.gradients:
            self._stages.append((g.ready_s - before, weights[g]))
            before = g.ready_s
        self._tail_s = profile.backward_s - before

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """A scalar, float32, to call backward() on."""
        deadline = time.perf_counter() + self.profile.forward_s
        device = next(self.parameters()).device
        scale = torch.ones((), device=device) if x is None else x.detach().float().mean()
        out = torch.ones((), device=device, requires_grad=True)
        if self._tail_s > 0:
            out = _Wait.apply(out, self._tail_s)
        for seconds, weight in reversed(self._stages):
            out = _Wait.apply(out, seconds, weight)
        wait_until(deadline)
        return out * scale

    def optimizer_step(self) -> None:
        """Waits for the profile's `optimizer_s`."""
        time.sleep(self.profile.optimizer_s)


def paced(model_or_profile: Profile | nn.Module, backward_s: float = 0.4, forward_s: float | None = None) -> Paced:
    """A module that plays a `Profile`: the real sizes and dtypes, gradients ready at the recorded times, no compute.

    Works under torch's DDP and all of ours. With a module instead of a profile, `backward_s` seconds are shared among
    its trainable parameters in proportion to their size, last parameter first, and forward takes half as long unless
    `forward_s` says otherwise: stated, not recorded. Its parameters are names and sizes; values do not matter.
    """
    if isinstance(model_or_profile, Profile):
        return Paced(model_or_profile)
    if not isinstance(model_or_profile, nn.Module):
        raise TypeError(f"paced takes a ddplab.Profile or a torch module, not {type(model_or_profile).__name__}")
    number(backward_s, "backward_s")
    every = enumerate(model_or_profile.named_parameters())
    named = [(i, name, p) for i, (name, p) in every if p.requires_grad and p.numel()]
    if not named:
        raise ValueError("no parameter of this module requires a gradient: nothing to play")
    total = sum(p.numel() for *_, p in named)
    ready, gradients = 0, []
    for position, name, p in reversed(named):
        ready += p.numel()
        dtype = str(p.dtype).removeprefix("torch.")
        gradients.append(Gradient(name, p.numel(), backward_s * (ready / total), position, dtype, tuple(p.shape)))
    source = f"{type(model_or_profile).__name__}, backward shared among its parameters by their size"
    return Paced(
        Profile(
            gradients, backward_s / 2 if forward_s is None else forward_s, backward_s, basis="stated", source=source
        )
    )


def wait_until(deadline: float) -> None:
    """Sleep until `time.perf_counter()` says `deadline`."""
    left = deadline - time.perf_counter()
    if left > 0:
        time.sleep(left)

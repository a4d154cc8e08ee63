"""Adam's arithmetic for one parameter, in the order of operations of torch's own (so that results agree to the bit)."""

from __future__ import annotations

from typing import Any

import torch

State = dict[str, Any]  # step (a tensor, as in torch), exp_avg (m), exp_avg_sq (v)
Group = dict[str, Any]  # lr, betas, eps, weight_decay, decoupled_weight_decay


def check_options(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, floor: float) -> None:
    """ValueError for what (1-bit) Adam cannot work with."""
    for name, value, fits in (
        ("lr", lr, lr >= 0),
        ("betas", betas, len(betas) == 2 and all(0 <= beta < 1 for beta in betas)),
        ("eps", eps, eps >= 0),
        ("weight_decay", weight_decay, weight_decay >= 0),
        ("floor", floor, 0 <= floor <= 1),
    ):
        if not fits:
            raise ValueError(f"{name} is out of range: {value!r}")


def fresh_state(p: torch.Tensor) -> State:
    """Step 0: no momentum, no variance."""
    return {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def exact_step(p: torch.Tensor, grad: torch.Tensor, state: State, group: Group, corrected: bool) -> None:
    """A step of Adam along `grad`; `corrected`: divide m and v by 1 - beta^t."""
    beta1, beta2 = group["betas"]
    grad = _decay(p, grad, group)
    state["step"] += 1
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    _move(p, state, group, beta1 if corrected else 0.0, beta2 if corrected else 0.0)


def local_momentum(p: torch.Tensor, state: State, group: Group) -> torch.Tensor:
    """beta1 m + (1 - beta1) g with this rank's gradient, flat, float32."""
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    m, grad = state["exp_avg"].float(), _decay(p, grad, group).float()
    return m.lerp(grad, 1 - group["betas"][0]).reshape(-1)


def step_unit(state: State, group: Group) -> torch.Tensor:
    """sqrt(v) + eps, flat, float32: what a step divides the momentum by, once v is frozen."""
    return state["exp_avg_sq"].float().reshape(-1).sqrt().add_(group["eps"])


def frozen_step(p: torch.Tensor, momentum: torch.Tensor, state: State, group: Group, corrected: bool) -> None:
    """A step along the common momentum (flat, float32), with v as it is (divided already)."""
    state["step"] += 1
    state["exp_avg"].copy_(momentum.view(p.shape))
    _move(p, state, group, group["betas"][0] if corrected else 0.0, 0.0)


def freeze(state: State, group: Group, corrected: bool, floor: float) -> None:
    """The last change of v: divide it by 1 - beta2^t; lift what is above 0 to `floor` times the parameter's mean."""
    v, steps = state["exp_avg_sq"], float(state["step"])
    if not steps or not v.numel():
        return
    if corrected:
        v.div_(1 - group["betas"][1] ** steps)
    v.copy_(torch.where(v > 0, v.clamp(min=floor * float(v.mean())), v))


def _decay(p: torch.Tensor, grad: torch.Tensor, group: Group) -> torch.Tensor:
    """Weight decay: in the gradient, as Adam's, or straight from the value, as AdamW's."""
    if not group["weight_decay"]:
        return grad
    if group["decoupled_weight_decay"]:
        p.mul_(1 - float(group["lr"]) * group["weight_decay"])
        return grad
    return grad.add(p, alpha=group["weight_decay"])


def _move(p: torch.Tensor, state: State, group: Group, beta1: float, beta2: float) -> None:
    t = float(state["step"])
    scale = (state["exp_avg_sq"].sqrt() / (1 - beta2**t) ** 0.5).add_(group["eps"])
    p.addcdiv_(state["exp_avg"], scale, value=-float(group["lr"]) / (1 - beta1**t))

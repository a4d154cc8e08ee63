"""Adam's arithmetic for one parameter, in the order of operations of torch's own (so that results agree to the bit)."""

from __future__ import annotations

from typing import Any

import torch

from ddplab._arguments import shown
from ddplab.transfers import number

State = dict[str, Any]  # step (a tensor, as in torch), exp_avg (m), exp_avg_sq (v)
Group = dict[str, Any]  # lr, betas, eps, weight_decay, decoupled_weight_decay


def check_options(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, floor: float) -> None:
    """ValueError for what (1-bit) Adam cannot work with."""
    number(lr.item() if isinstance(lr, torch.Tensor) and lr.numel() == 1 else lr, "lr", 0)  # torch takes tensors, too
    number(eps, "eps", 0), number(weight_decay, "weight_decay", 0), number(floor, "floor", 0, 1)
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas are two numbers, such as (0.9, 0.999), not {shown(betas)}")
    for beta in betas:
        if number(beta, "each of the betas", 0, 1) == 1:
            raise ValueError(f"each of the betas is below 1, not {beta!r}: nothing new would ever count")


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

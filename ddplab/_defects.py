"""The defects of a DDP, in one sentence each: where it was seen, what is wrong, what to do."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ddplab._reduces import Call
from ddplab._tiny import TOLERANCE, Tensors, close, state_of, trained_parameters


def _at(name: str, model: nn.Module) -> str:
    """ "rank 1, parameter 'embed.weight' (tied to 'out.weight')"."""
    params = dict(model.named_parameters(remove_duplicate=False))
    kind = "parameter" if name in params else "buffer"
    twins = [repr(n) for n, p in params.items() if n != name and p is params.get(name)]
    return f"rank {dist.get_rank()}, {kind} {name!r}" + (f" (tied to {', '.join(twins)})" if twins else "")


def unequal_start(model: nn.Module, rank0: Tensors, own: Tensors) -> str | None:
    for name, value in state_of(model).items():
        if not value.equal(rank0[name]):
            what = "still its own start value" if value.equal(own[name]) else "neither its own start value nor rank 0's"
            return f"{_at(name, model)}: {what} after wrapping: broadcast parameters and buffers from rank 0."
    return None


def unequal_end(model: nn.Module, whole: Tensors) -> str | None:
    for name, value in state_of(model).items():
        if (error := float((value - whole[name]).abs().max())) > TOLERANCE:
            return f"{_at(name, model)}: after the last step {error:.1e} away from one process on the whole batch."
    return None


def wrong_traffic(model: nn.Module, before: Tensors, calls: list[Call], step: int) -> str | None:
    sent = [name for call in calls for name in call.gradients]
    for name, p in trained_parameters(model).items():
        if any(name in call.parameters for call in calls):
            return f"{_at(name, model)}, step {step}: all-reduces the parameter instead of its gradient (p.grad)."
        if not p.detach().equal(before[name]):
            return f"{_at(name, model)}, step {step}: the parameter changed before optimizer.step()."
    for name in trained_parameters(model):
        if (n := sent.count(name)) > 1:
            times = "twice" if n == 2 else f"{n} times"
            return f"{_at(name, model)}, step {step}: reduced {times} in one step; once is enough."
    return None


def wrong_gradient(model: nn.Module, local: Tensors, mean: Tensors, step: int) -> str | None:
    n = dist.get_world_size()
    return compare(
        model,
        mean,
        (local, "nobody reduced it: this is the rank's own gradient"),
        ({k: n * g for k, g in mean.items()}, f"the sum over the ranks instead of the mean: divide by {n}, once"),
        ({k: g / n for k, g in mean.items()}, f"the mean divided by {n} once more"),
        when=f"in step {step}",
    )


def compare(model: nn.Module, right: Tensors, *known: tuple[Tensors, str], when: str) -> str | None:
    """What is wrong with the first gradient that is not the right one; `known` mistakes come with their sentence."""
    for name, p in trained_parameters(model).items():
        if p.grad is None:
            return f"{_at(name, model)}, {when}: no gradient."
        if close(p.grad, right[name]):
            continue
        says = next((text for wrong, text in known if close(p.grad, wrong[name])), None)
        off = float((p.grad - right[name]).abs().max())
        return f"{_at(name, model)}, {when}: {says or f'the gradient is {off:.1e} away from the right one'}."
    return None


def order(calls: list[Call]) -> str | None:
    during = [call for call in calls if call.in_backward]
    everything = max((call.ready for call in calls), default=0)
    if len(during) < 2 or during[0].ready < everything:
        return None
    first = ", ".join(map(repr, during[0].gradients)) or "something"
    return (
        f"right results, but nothing overlaps: the first of {len(during)} all-reduces ({first}) left only when all "
        f"{everything} gradients were ready: the buckets are in forward order, and backward ends with the first layers."
    )

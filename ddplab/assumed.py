"""A profile without a measurement: backward shared among the layers by their FLOPs, at a stated speed.

Whoever has the hardware should `record` instead. Where nobody has it, an assumption that is written down beats a
number without a source: the order of the layers and their sizes are the model's own, the speed is yours to state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplab.profile import Gradient, Profile
from ddplab.transfers import count, number, whole

if TYPE_CHECKING:
    import torch

TFLOPS = 10.0  # sustained, for images in fp32; a figure to reckon with, measured nowhere here
BATCH = 32
_PIXELS = {"inception_v3": 299}  # all others: 224


def assumed_profile(
    model: str | torch.nn.Module,
    inputs: Any = None,
    *,
    batch: int = BATCH,
    tflops: float = TFLOPS,
    compute_s: float | None = None,
) -> Profile:
    """A `Profile` with basis "assumed": forward takes 1/3 and backward 2/3 of the compute time, each layer its share by
    FLOPs, the optimizer nothing.

    model: the name of a torchvision classifier, such as "resnet50", or any module.
    inputs: example inputs of a module, a tensor or a tuple, the whole batch. Without them, and where the module cannot
        be run without data (on torch's meta device), time is shared by the number of parameters.
    batch: images a rank and step, for a name (3 x 224 x 224 each; inception_v3's are 299 wide).
    tflops: sustained 10^12 floating point operations a second, 3 times the forward's a step. compute_s: the compute
        time of a step in seconds, stated directly instead; needed where FLOPs are not known.
    Raises ValueError for a name that torchvision does not have, and for numbers that make no sense; TypeError for what
    is no model; ImportError where torchvision is missing.
    """
    batch = count(whole(batch), "batch", error=ValueError)
    number(tflops, "tflops", above=True)
    if compute_s is not None:
        number(compute_s, "compute_s", above=True)
    import torch

    if isinstance(model, str):
        name, model = model, torchvision_model(model)
        inputs = torch.empty(batch, 3, *[_PIXELS.get(name, 224)] * 2, device="meta")
    elif isinstance(model, torch.nn.Module):
        name = type(model).__name__
    else:
        raise TypeError(f"model is the name of a torchvision classifier or a torch module, not {model!r}")
    named = [(i, n, p) for i, (n, p) in enumerate(model.named_parameters()) if p.requires_grad and p.numel()]
    if not named:
        raise ValueError(f"no parameter of {name} requires a gradient")
    calls, unknown = _calls(model, inputs) if inputs is not None else ([], "there are no example inputs")
    if calls:
        work = 3 * sum(flops for _, flops in calls)
        seconds = compute_s or work / (tflops * 1e12)
        if not seconds > 0:
            raise ValueError(f"at {tflops:g} TFLOP/s a step of {name} takes no time at all: state a speed that exists")
        speed = f"{compute_s * 1e3:.4g} ms stated" if compute_s else f"at an assumed {tflops:g} TFLOP/s"
        why = f"shared by FLOPs; {work / 1e9:.4g} GFLOP a step, {speed}"
        why += f", batch {len(inputs)}" if isinstance(inputs, torch.Tensor) and inputs.dim() else ""
    elif compute_s:
        calls, seconds = [([p], p.numel()) for *_, p in named], compute_s
        why = f"shared by number of parameters; {compute_s * 1e3:.4g} ms stated"
    else:
        raise ValueError(
            f"the FLOPs of {name} are not known ({unknown}): state compute_s, the compute time of a step in seconds"
        )
    # Backward visits the calls in reverse. What forward never met comes at the very end, the last one first.
    total, done, ready = sum(flops for _, flops in calls), 0, {}
    for own, flops in reversed(calls):
        done += flops
        for p in reversed(own):
            ready.pop(p, None)  # used again, earlier in forward: complete only now
            ready[p] = done / total
    ready |= {p: 1.0 for *_, p in reversed(named) if p not in ready}
    place = {p: (i, n) for i, n, p in named}
    gradients = [
        Gradient(
            place[p][1],
            p.numel(),
            share * seconds * 2 / 3,
            place[p][0],
            str(p.dtype).removeprefix("torch."),
            tuple(p.shape),
        )
        for p, share in ready.items()
        if p in place
    ]
    return Profile(gradients, seconds / 3, seconds * 2 / 3, basis="assumed", source=f"{name}, {why}")


def torchvision_model(name: str) -> torch.nn.Module:
    """A torchvision classifier by name, without weights, on the meta device (no memory). Errors: `assumed_profile`."""
    import torch

    try:
        from torchvision import models
    except ImportError as error:
        raise ImportError(
            f"the layers of {name!r} come from torchvision, which is not installed here: pip install torchvision"
        ) from error
    if name not in models.list_models(module=models):
        from difflib import get_close_matches

        near = get_close_matches(name, models.list_models(module=models), 3, 0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"torchvision has no classifier {name!r}{hint}")
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        return models.get_model(name, weights=None, **options)


def _calls(model: torch.nn.Module, inputs: Any) -> tuple[list[tuple[list[Any], float]], str]:
    """(parameters, FLOPs) of each call of a layer that owns parameters, in the order of forward, found by running it on
    the meta device; no call, and why, where it cannot run there or needs no operation that is counted."""
    import copy

    import torch
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    before: dict[torch.nn.Module, int] = {}
    calls = []

    def enter(module: torch.nn.Module, _: Any) -> None:
        before[module] = counter.get_total_flops()

    def leave(module: torch.nn.Module, *_: Any) -> None:
        own = [real[p] for p in module.parameters(recurse=False)]
        calls.append((own, counter.get_total_flops() - before[module]))

    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        ghost = copy.deepcopy(model).to("meta")
        real = dict(zip(ghost.parameters(), model.parameters(), strict=True))
        for module in ghost.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave)
        with counter:
            ghost(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    except Exception as error:  # it is the user's code: whatever it raises, the sizes are known all the same
        said = (str(error).splitlines() or [""])[0]
        return [], f"without data its forward fails: {type(error).__name__}: {said}"
    return (calls, "") if sum(flops for _, flops in calls) > 0 else ([], "it has no operation that is counted")

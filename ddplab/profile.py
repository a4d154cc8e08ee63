"""The recording of one step of one rank: how long it computes, and when each parameter's gradient is ready.

A `Profile` is all that the timeline needs to know of a model. It is measured on this machine (`record`), assumed from
layer sizes (`ddplab.assumed_profile`), or written down by hand (`Profile.of`); it remembers which.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from ddplab.transfers import count, number, whole

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Gradient(NamedTuple):
    """One parameter of a profile. It answers `numel()` and `element_size()` as a parameter does, so that the rule that
    fills DDP's buckets with parameters fills them with recorded ones, too."""

    name: str
    elements: int
    ready_s: float  # seconds since backward began, without any communication
    position: int  # place in `module.parameters()`, from 0
    dtype: str = "float32"
    shape: tuple[int, ...] | None = None  # of the parameter; None where only its size is known

    device = "recorded"

    def numel(self) -> int:
        """Number of elements."""
        return self.elements

    def element_size(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Profile:
    """One step of one rank without communication; times in seconds.

    gradients: `Gradient(name, elements, ready_s, position, dtype, shape)`, in the order in which they become ready.
    forward_s, backward_s, optimizer_s: the three parts of the step; nothing is ready later than `backward_s`.
    basis: "measured", "assumed" or "stated".  source: one sentence on where the numbers come from.
    Raises ValueError for times that are negative or out of order, and where there is no gradient.
    """

    gradients: tuple[Gradient, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    basis: str = "stated"
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gradients", tuple(self.gradients))
        if not self.gradients:
            raise ValueError("a profile without gradients: no parameter of the model requires one")
        for part in ("forward_s", "backward_s", "optimizer_s"):
            value = getattr(self, part)
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"a profile's {part} is a number of seconds, 0 or more, not {value!r}")
        before = 0.0
        for g in self.gradients:
            if not isinstance(g, Gradient):
                raise ValueError(f"a profile's gradients are ddplab.Gradient rows, not {g!r}")
            if g.dtype not in ITEM_BYTES:
                raise ValueError(f"{g.name} is {g.dtype!r}; gradients are {', '.join(ITEM_BYTES)}")
            count(g.elements, f"{g.name}'s elements", error=ValueError)
            if g.shape is not None and math.prod(g.shape) != g.elements:
                raise ValueError(
                    f"{g.name} of shape {tuple(g.shape)} has {math.prod(g.shape)} elements, not {g.elements}"
                )
            if not isinstance(g.ready_s, Real) or not before <= g.ready_s <= self.backward_s * (1 + 1e-9):
                raise ValueError(
                    f"{g.name} is ready at {g.ready_s!r} s; in the order of readiness it must lie between {before!r} s "
                    f"(the one before it) and {self.backward_s!r} s (the end of backward)"
                )
            before = g.ready_s

    @classmethod
    def of(cls, layers: Iterable[Sequence[float]], forward_s: float = 0.0, **parts: Any) -> Profile:
        """A profile by hand: layers are (elements, backward seconds) in the order of forward, one parameter each.

        Backward visits them from the last to the first: `Profile.of([(1_000, 0.01), (5_000, 0.02)])`.
        """
        if not isinstance(layers, Iterable):
            raise ValueError(f"layers are pairs (elements, backward seconds), not {layers!r}")
        layers, now, gradients = list(layers), 0.0, []
        for position, layer in reversed(list(enumerate(layers))):
            try:
                elements, seconds = layer
            except (TypeError, ValueError):
                raise ValueError(f"layer {position} is (elements, backward seconds), not {layer!r}") from None
            elements = count(whole(elements), f"layer {position}'s elements", error=ValueError)
            now += number(seconds, f"layer {position}'s backward seconds")
            gradients.append(Gradient(f"layer{position}.weight", elements, now, position))
        return cls(tuple(gradients), forward_s, now, **{"source": "written down by hand", **parts})

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients: what a rank gives to the all-reduces of one step."""
        return sum(g.nbytes for g in self.gradients)

    @property
    def compute_s(self) -> float:
        """forward + backward + optimizer: the step of one rank alone."""
        return self.forward_s + self.backward_s + self.optimizer_s

    def scaled(self, factor: float) -> Profile:
        """The same step, every time multiplied: a faster or slower processor."""
        if not 0 < factor < math.inf:
            raise ValueError(f"a profile is scaled by a positive factor, not {factor!r}")
        return replace(
            self,
            gradients=tuple(g._replace(ready_s=g.ready_s * factor) for g in self.gradients),
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            optimizer_s=self.optimizer_s * factor,
            source=f"{self.source}, times x {factor:g}" if self.source else f"times x {factor:g}",
        )

    def __str__(self) -> str:
        return (
            f"{len(self.gradients)} gradients, {self.nbytes / 1e6:.4g} MB, forward {self.forward_s * 1e3:.4g} ms, "
            f"backward {self.backward_s * 1e3:.4g} ms, optimizer {self.optimizer_s * 1e3:.4g} ms "
            f"({self.basis}{': ' + self.source if self.source else ''})"
        )


def record(
    model: torch.nn.Module,
    inputs: Any = (),
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    repeats: int = 5,
) -> Profile:
    """Measure a `Profile` of `model` in this process, without DDP: when is each gradient ready, and what do the parts
    of a step take? Medians of `repeats` steps after two to warm up; a GPU is timed by its own events.

    inputs: what the model is called with: a tuple of arguments, or one argument.  loss_fn: from the model's output to
    a scalar loss; None takes the sum of the output.  optimizer: stepped and timed too, which changes the parameters
    (None counts 0 s). Gradients are cleared afterwards. Raises ValueError if no parameter got a gradient, TypeError if
    there is no loss to call backward on.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"record takes a torch module, not {type(model).__name__}")
    repeats = count(repeats, "record's repeats", error=ValueError)
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    names = {p: (name, i) for i, (name, p) in enumerate(model.named_parameters())}
    cuda = next((p.is_cuda for p in names), False)

    marks: dict[torch.nn.Parameter, Any] = {}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: marks.__setitem__(p, clock(cuda)))
        for p in names
        if p.requires_grad and p.numel()
    ]
    steps = []
    try:
        for _ in range(repeats + 2):
            model.zero_grad()
            marks.clear()
            begin = clock(cuda)
            out = model(*arguments)
            if loss_fn is None and not isinstance(out, torch.Tensor):
                raise TypeError(f"the model returned a {type(out).__name__}, which has no sum: pass loss_fn")
            loss = loss_fn(out) if loss_fn else out.sum()
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
                raise TypeError(f"the loss is one number, a tensor, not a {type(loss).__name__}{shape}")
            if not loss.requires_grad:
                break  # nothing to record, which is said below
            middle = clock(cuda)
            loss.backward()
            end = clock(cuda)
            if optimizer is not None:
                optimizer.step()
            done = clock(cuda)
            if cuda:
                torch.cuda.synchronize()
            ready = {p: between(middle, mark) for p, mark in marks.items()}
            steps.append((between(begin, middle), between(middle, end), between(end, done), ready))
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad()
    steps = steps[2:]
    if not marks:
        raise ValueError("no parameter of this model got a gradient: is the loss connected to the parameters?")
    middle_of = lambda values: sorted(values)[len(values) // 2]  # noqa: E731
    backward_s = middle_of([step[1] for step in steps])
    gradients, latest = [], 0.0
    for p in marks:  # dicts keep their order: that of the last step, which is torch's order of readiness
        latest = min(max(latest, middle_of([step[3].get(p, 0.0) for step in steps])), backward_s)
        name, position = names[p]
        dtype = str(p.dtype).removeprefix("torch.")
        gradients.append(Gradient(name, p.numel(), latest, position, dtype, tuple(p.shape)))
    return Profile(
        tuple(gradients),
        middle_of([step[0] for step in steps]),
        backward_s,
        middle_of([step[2] for step in steps]),
        basis="measured",
        source=f"{type(model).__name__} on {'the GPU' if cuda else 'the CPU'} of this machine, median of {repeats}",
    )


def clock(cuda: bool) -> Any:
    """A mark in time: this thread's clock, or an event on the current stream of the GPU."""
    if not cuda:
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Seconds between two marks: floats, or events of a GPU."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3

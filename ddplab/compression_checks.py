"""Checkers for the lab on compression: a 1-bit encoder with error feedback, and the bytes of three ways to send it."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

from ddplab._arguments import instance, shown
from ddplab.answers import ask, where
from ddplab.checks import CheckError
from ddplab.schedule import ring

if TYPE_CHECKING:
    import torch

ROUTES = ("fp32 ring", "all-gather", "two phases")
_STEPS = 200
_CLOSE = 1e-5  # relative: float32 sums of 200 steps


def check_onebit(fn: Callable, seed: int = 0) -> None:
    """Check `fn(gradient, residual)`, a 1-bit encoder with error feedback: (bits, scale, new residual).

    gradient, residual: float32, shape (n,).  bits: bool, shape (n,): True stands for +scale, False for -scale; zero is
    True.  scale: the mean magnitude of what is encoded.  Tried on vectors with known answers and on 200 random steps.
    Raises CheckError that names the step and the first wrong place; prints one line if all is right.
    """
    import torch

    instance(fn, Callable, "check_onebit takes a function of a gradient and a residual")
    draw = torch.Generator().manual_seed(seed)
    known = [
        ([1.0, -3.0], [0.0, 0.0], "without anything held back"),
        ([0.0, -0.0, 2.0], [0.0, 0.0, 0.0], "with zeros of both signs"),
        ([1.0, -3.0], [-4.0, 5.0], "when what was held back turns the sign"),
        ([5.0], [0.5], "with one value"),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], "with nothing but zeros"),
    ]
    for gradient, residual, when in known:
        _step(fn, torch.tensor(gradient), torch.tensor(residual), when)
    residual = torch.zeros(101)  # odd: no multiple of 8
    wanted, sent = torch.zeros(101, dtype=torch.float64), torch.zeros(101, dtype=torch.float64)
    for step in range(_STEPS):
        gradient = torch.randn(101, generator=draw) + 0.5
        bits, scale, residual = _step(fn, gradient, residual, f"in random step {step}")
        wanted += gradient
        sent += torch.where(bits, scale, -scale)
    lost = float((wanted - sent - residual).abs().max())
    if lost > _CLOSE * float(wanted.abs().max()):
        raise CheckError(f"after {_STEPS} steps, sent plus residual miss the gradients' sum by {lost:.2g}.")
    print(f"right, and after {_STEPS} steps nothing was lost: sent plus residual is the sum of the gradients")


def _step(fn: Callable, gradient: torch.Tensor, residual: torch.Tensor, when: str) -> tuple[Any, Any, Any]:
    import torch

    kept = gradient.clone(), residual.clone()
    try:
        answer = fn(gradient, residual)
    except NotImplementedError as error:
        raise CheckError(str(error)) from None
    except Exception as error:
        raise CheckError(f"{when}: {where(error, fn)}.") from None
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise CheckError(f"return three things, (bits, scale, residual), not {shown(answer)}.")
    bits, scale, new = answer
    if not torch.equal(gradient, kept[0]) or not torch.equal(residual, kept[1]):
        raise CheckError("the gradient or the residual was changed in place: return a new residual instead.")
    value = gradient + residual
    shape = tuple(gradient.shape)
    for name, tensor in (("bits", bits), ("residual", new)):
        if not isinstance(tensor, torch.Tensor) or tensor.shape != gradient.shape:
            raise CheckError(f"{name} is a tensor of shape {shape}, not {getattr(tensor, 'shape', tensor)!r}.")
    if bits.dtype != torch.bool:
        raise CheckError(f"bits are of dtype bool, one for each value, not {bits.dtype}.")
    try:
        scale, right = float(scale), value.abs().mean().item()
    except (TypeError, ValueError):
        raise CheckError(f"scale is a number, not {shown(scale)}.") from None
    given = f"gradient {_list(gradient)} and residual {_list(residual)}"
    if not torch.equal(bits, value >= 0):
        i = int((bits != (value >= 0)).int().argmax())
        hint = " Add the residual first." if torch.equal(bits, gradient >= 0) and bool(residual.any()) else ""
        hint = " Zero counts as plus." if value[i] == 0 else hint
        raise CheckError(f"{when}, value {i} of {given}: {value[i]:.4g} got the bit {bool(bits[i])}.{hint}")
    if not abs(scale - right) <= _CLOSE * max(right, 1e-30):  # NaN is not right either
        raise CheckError(f"{when}: the scale is {scale:.6g}; the mean magnitude of what is encoded is {right:.6g}.")
    left = value - torch.where(bits, right, -right)
    if not torch.allclose(new, left, rtol=_CLOSE, atol=_CLOSE * max(right, 1e-30)):
        i = int((new - left).abs().argmax())
        hint = " The old residual was dropped." if torch.allclose(new, left - residual, rtol=_CLOSE) else ""
        raise CheckError(f"{when}, value {i} of {given}: held back is {new[i]:.4g}, should be {left[i]:.4g}.{hint}")
    return bits, scale, new


def _list(values: torch.Tensor) -> str:
    shown = ", ".join(f"{v:.3g}" for v in values[:3].tolist())
    return f"[{shown}{', ...' if len(values) > 3 else ''}]"


def check_routing_bytes(fn: Callable[[str, int, int], float]) -> None:
    """Check `fn(route, ranks, values)`: payload bytes that one rank sends to get the mean of `values` gradients.

    Routes: "fp32 ring"; "all-gather": 1 bit a value, every rank's bits to every other; "two phases": 1 bit a value, to
    the rank that owns it, and its mean, 1 bit again, from there to all. Scales do not count, and numbers divide evenly.
    Compared with messages that are counted one by one. Raises CheckError that names the case.
    """
    instance(fn, Callable, "check_routing_bytes takes a function of a route, a number of ranks, and one of values")
    for route in ROUTES:
        for ranks in (2, 4, 8, 64):
            values = 64 * ranks * 100
            answer, right = ask(fn, route, ranks, values), sum(_messages(route, ranks, values))
            if not isinstance(answer, Real) or isinstance(answer, bool) or not abs(answer - right) <= 1e-9 * right:
                said = f"{answer:,}" if isinstance(answer, Real) else shown(answer)
                raise CheckError(
                    f"{route}, {ranks} ranks, {values:,} values: rank 0 sends {right:,} bytes, "
                    f"{getattr(fn, '__name__', 'the function')} returned {said}. {_HINTS[route]}"
                )
    print("right for 2, 4, 8 and 64 ranks")


_HINTS = {
    "fp32 ring": "2 (N - 1) messages, each a chunk of values / N at 4 bytes.",
    "all-gather": "N - 1 messages, each with all of the rank's bits. A byte holds 8.",
    "two phases": "N - 1 messages to the owners and N - 1 with the result, each with the bits of one shard.",
}


def _messages(route: str, ranks: int, values: int) -> list[int]:
    """Bytes of each message that rank 0 sends."""
    if route == "fp32 ring":
        schedule = ring(ranks)
        return [4 * values // schedule.chunks for row in schedule.transfers if row.src == 0]
    others = range(1, ranks)
    if route == "all-gather":
        return [values // 8 for _ in others]
    shard = values // ranks // 8
    return [shard for _ in others] + [shard for _ in others]

"""Has Adam's variance settled, and has every value one? 1-bit Adam freezes it, and has to know."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ddplab.transfers import number


class VarianceWatch:
    """Compares the L1 norm of v at the end of the warm-up with what it was some steps before.

    Args:
        warmup: the step after which v is frozen.
        stable: the ratio of the two norms may lie between this and its inverse; None: no verdict.
        beta2: the steps between the two are 1 / (1 - beta2), v's memory; in a short warm-up, its second half.
    """

    def __init__(self, warmup: int, stable: float | None, beta2: float):
        if stable is not None:
            number(stable, "stable, where it is not None,", most=1.0, above=True)
        self.warmup, self.stable = warmup, stable
        self.window = max(1, min(round(1 / (1 - beta2)), warmup // 2))
        self.before = 0.0  # the earlier norm, once it is known; part of a checkpoint

    def see(self, step: int, states: Iterable[tuple[dict[str, Any], float]], speak: bool) -> None:
        """After each step of the warm-up. `states`: each parameter's state and beta2. `speak`: warn here if need be."""
        if self.stable is None or step not in (self.warmup - self.window, self.warmup):
            return
        norm = _norm(states)
        if step < self.warmup:
            self.before = norm
            return
        ratio = norm / self.before if self.before else float("inf")
        if speak and not self.stable <= ratio <= 1 / self.stable:
            warnings.warn(
                f"1-bit Adam freezes a variance that is not stable: after the {step} steps of the warm-up its L1 norm "
                f"is {ratio:.2f} times that of {self.window} steps before ({self.stable} to {1 / self.stable:.2f} were "
                "asked for). Warm up longer, or lower beta2",
                RuntimeWarning,
                stacklevel=5,
            )


def warn_of_late_gradients(late: list[torch.Tensor], warmup: int, step: int, rank: int) -> bool:
    """Warn if `late`, gradients of values that had none in the warm-up, are not all zero; say whether."""
    count = sum(int(grad.count_nonzero()) for grad in late)
    if count:
        warnings.warn(
            f"rank {rank}, step {step}: {count} values get their first gradient after the warm-up of {warmup} steps: "
            "they have no variance, and keep their value",
            RuntimeWarning,
            stacklevel=6,
        )
    return count > 0


def _norm(states: Iterable[tuple[dict[str, Any], float]]) -> float:
    """The L1 norm of all v, each over 1 - beta2^t: without that it would grow at first whatever the gradients do."""
    norm = 0.0
    for state, beta2 in states:
        if steps := float(state["step"]):
            norm += float(state["exp_avg_sq"].sum(dtype=torch.float64)) / (1 - beta2**steps)
    return norm

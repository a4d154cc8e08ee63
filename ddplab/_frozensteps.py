"""The steps of 1-bit Adam after the switch: which values travel, and what error feedback holds back of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ddplab._adamsteps import Group, State, frozen_step, local_momentum, step_unit
from ddplab._variance import warn_of_late_gradients


class Part(NamedTuple):
    """A parameter that has a variance, with its group and its state."""

    group: Group
    p: torch.Tensor
    state: State


class FrozenSteps:
    """Steps of `parts` along the mean of the ranks' momenta, which travel through `exchange` (a `TwoPhase`).

    A value without a variance is not sent. `others`: the parameters that have none at all; the first gradient that is
    lost so is warned about.

    Attributes:
        worker, server: what error feedback holds back on this rank, flat, float32; zeros without error feedback.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        others: Sequence[torch.Tensor],
        exchange: Any,
        preconditioned: bool,
        corrected: bool,
        error_feedback: bool,
    ) -> None:
        if not parts:
            raise RuntimeError("no parameter had a gradient on any rank during the warm-up: nothing can be trained")
        self.parts, self.others, self.exchange = list(parts), list(others), exchange
        self.preconditioned, self.corrected, self.error_feedback = preconditioned, corrected, error_feedback
        self._warned = False
        live = torch.cat([state["exp_avg_sq"].reshape(-1) > 0 for _, _, state in self.parts])
        self._live = None if bool(live.all()) else live  # which values are sent; None: all
        sent = int(live.sum())
        mine = exchange.shard(sent)
        self.worker = torch.zeros(sent, device=live.device)
        self.server = torch.zeros(mine.stop - mine.start, device=live.device)

    def restore(self, worker: Any, server: Any) -> None:
        """Go on with these residuals of a checkpoint. ValueError for those of another model."""
        for name, mine, saved in (("worker", self.worker, worker), ("server", self.server, server)):
            if not isinstance(saved, torch.Tensor) or saved.shape != mine.shape:
                shape = tuple(saved.shape) if isinstance(saved, torch.Tensor) else saved
                raise ValueError(f"the {name}'s residual in this checkpoint is {shape}, not {tuple(mine.shape)}")
        self.worker.copy_(worker)
        self.server.copy_(server)

    def residual_norm(self) -> float:
        """The L2 norm of what is held back."""
        return float(torch.cat([self.worker, self.server]).norm())

    def step(self, number: int, warmup: int, rank: int) -> None:
        """One step on every rank. `number`, of the step, `warmup` and `rank` are for the warning."""
        momenta = [local_momentum(p, state, group) for group, p, state in self.parts]
        units = [step_unit(state, group) if self.preconditioned else 1 for group, _, state in self.parts]
        flat = torch.cat([m / unit for m, unit in zip(momenta, units, strict=True)])
        self._say_what_is_lost(flat, number, warmup, rank)
        sent = flat if self._live is None else flat[self._live]
        sent = self.exchange.mean(sent, *((self.worker, self.server) if self.error_feedback else (None, None)))
        flat = sent if self._live is None else torch.zeros_like(flat).masked_scatter_(self._live, sent)
        pieces = flat.split([m.numel() for m in momenta])
        for (group, p, state), piece, unit in zip(self.parts, pieces, units, strict=True):
            frozen_step(p, piece * unit, state, group, self.corrected)

    def _say_what_is_lost(self, flat: torch.Tensor, number: int, warmup: int, rank: int) -> None:
        if self._warned:
            return
        late = [p.grad for p in self.others if p.grad is not None]
        late += [] if self._live is None else [flat[~self._live]]
        self._warned = warn_of_late_gradients(late, warmup, number, rank)

"""1-bit Adam: an optimizer that exchanges one bit a value, once Adam's variance has settled. Not a hook for DDP.

Sign bits do not add up, so no all-reduce can carry them, and Adam cannot be fed with compressed gradients: its variance
is a sum of squares, in which the errors of compression do not cancel. What 1-bit Adam does about both is below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddplab._adamsteps import check_options, exact_step, freeze, fresh_state, frozen_step, local_momentum, step_unit
from ddplab._localsteps import whole
from ddplab._lockstep import Lockstep, check_same_parameters, mean_
from ddplab._variance import VarianceWatch, warn_of_late_gradients
from ddplab.hooks.codec import SignCodec
from ddplab.hooks.twophase import TwoPhase


class OneBitAdam(torch.optim.Optimizer):
    """Adam for `warmup` steps; then Adam's variance stands still and the momentum travels as one bit a value.

        optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup=200)      # the plain model, no DDP around it
        for x, y in batches:
            loss_fn(model(x), y).backward()      # the gradient of this rank alone
            optimizer.step()                     # talks to the other ranks
            optimizer.zero_grad()

    In step t on rank i, with gradient g_i:

        t <= warmup    g = mean of the g_i, exactly; m, v and x as in torch.optim.Adam
        t > warmup     m_i = beta1 m + (1 - beta1) g_i
                       m = mean of the m_i, 1 bit a value, with error feedback at the worker and at the server
                       x = x - lr m / (sqrt(v) + eps), v as it was after step `warmup`

    With v constant the step is linear in what is sent, so what error feedback adds later makes up for what was lost.
    After every step all ranks hold the same x, m and v, to the bit.

    Args:
        params, lr, betas, eps, weight_decay, decoupled_weight_decay: as in `torch.optim.Adam`, groups included. Equal
            on all ranks to begin with. Give it `model.named_parameters()` and messages name parameters.
        warmup: exact steps. DeepSpeed's advice is 15 to 25% of all steps. The run's bytes are w + (1 - w) / 32 of
            Adam's with float32, w being the share of the warm-up.
        bias_correction: True divides m and v by 1 - beta^t as Adam does, and freezes the divided v. The paper's
            formulas and DeepSpeed's code have no correction: False.
        preconditioned: what is compressed. False: m, as in the paper. True: m / (sqrt(v) + eps), the step it makes. One
            scale stands for thousands of values, and in m it throws those of a small variance far out.
        floor: v is frozen at no less than this part of its parameter's mean: Adam's v would grow when a value that had
            next to no gradient gets one, a frozen v does not. 0.0 in the paper (with it 3 of 3 runs of a CNN met NaN).
        stable: the switch warns unless the L1 norm of v changed by a factor between `stable` and 1 / `stable` in the
            1 / (1 - beta2) steps before it (in a short warm-up: in its second half). The paper freezes v where that
            norm has levelled off. None: no check.
        error_feedback: False throws away what compression lost, to show what goes wrong.
        process_group: the ranks that train together; default all. exchange: another `TwoPhase` than that of one bit.

    A value without a gradient on any rank during the warm-up has no variance, and eps alone would throw it out of the
    model. It is not sent and keeps its value; the first gradient that is lost so is warned about. A parameter without a
    gradient on some ranks counts as zero there. One that nobody used in a step is skipped in the warm-up, and moves on
    with its momentum after it. float64 momenta travel as float32. No sparse gradients, no complex parameters.

    Under a DDP, forward and backward belong inside `with ddp.no_sync():`. One that averages the gradients is refused.

    Memory: 12 bytes a value (m, v, residual), 4/N for the server's residual, and as much again during a step. It loses
    where the link is fast, where the warm-up is most of the run, where the variance changes after the switch.

    Raises:
        ValueError: options out of range; in a step, on every rank: NaN or infinity in a gradient (rank, step and
            parameter are named; no value and no state has changed), options or parameters that differ between ranks.
        TypeError: sparse or complex; a module in place of its parameters.
        RuntimeError: no `torch.distributed`; on every rank: ranks in different steps, gradients averaged already.

    Source: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training (arXiv:2102.02888), algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup: int,
        decoupled_weight_decay: bool = False,
        bias_correction: bool = True,
        stable: float | None = 0.96,
        error_feedback: bool = True,
        preconditioned: bool = True,
        floor: float = 1e-2,
        process_group: dist.ProcessGroup | None = None,
        exchange: Any = None,
    ):
        if isinstance(params, nn.Module):
            raise TypeError("OneBitAdam takes parameters: model.parameters(), or model.named_parameters()")
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("OneBitAdam needs torch.distributed: use ddplab.launch or torchrun")
        check_options(lr, betas, eps, weight_decay, floor)
        self.warmup = whole(warmup, "warmup", least=1)  # without any there is no variance to divide by
        self.bias_correction, self.error_feedback, self.preconditioned = bias_correction, error_feedback, preconditioned
        self.group = process_group or dist.group.WORLD
        if dist.get_rank(self.group) < 0:
            raise RuntimeError(f"rank {dist.get_rank()} is not in the process group given to OneBitAdam")
        self.floor, self.steps = floor, 0  # steps taken so far
        self._ranks, self._sent, self._warned = dist.get_world_size(self.group), 0, False
        self._lockstep: Lockstep | None = None  # until the first step, and after a group was added
        self._watch = VarianceWatch(self.warmup, stable, betas[1])
        self._residuals: tuple[torch.Tensor, torch.Tensor] | None = None  # worker's, server's; from the switch on
        self._pairs: list[tuple[dict[str, Any], torch.Tensor]] = []  # groups and parameters that have a variance
        self._live: torch.Tensor | None = None  # which of their values are sent; None: all
        self._exchange = TwoPhase(SignCodec(), self.group) if exchange is None else exchange
        decay = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps} | decay)

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that this rank has put on the wire so far, where the backend's all-reduce is a ring."""
        return self._sent + self._exchange.wire_bytes + (self._lockstep.wire_bytes if self._lockstep else 0)

    @property
    def compressing(self) -> bool:
        """Has the variance been frozen?"""
        return self._residuals is not None

    def residual_norm(self) -> float:
        """The L2 norm of what error feedback holds back on this rank, as worker and as server; 0.0 in the warm-up."""
        return float(torch.cat(self._residuals).norm()) if self.compressing else 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every rank. `closure` computes the loss and the gradients again; its value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._lockstep is None:
            self._begin()
        grads = [p.grad for _, p in self._each()]
        meeting = self._lockstep.meet(self.steps + 1, grads, "gradient", self._options())
        if meeting.alike and self._lockstep.identical(grads):
            raise RuntimeError(
                f"step {self.steps + 1}: all ranks hold the same gradients. If a DDP averages them, run forward and "
                "backward inside `with ddp.no_sync():`, or use the plain model; otherwise give each rank its own data"
            )
        if self.steps < self.warmup and not self.compressing:
            self._warm_up(meeting.used)
        else:
            if not self.compressing:
                self._freeze()
            self._compressed_step()
        self.steps += 1
        return loss

    def _warm_up(self, used: list[bool]) -> None:
        """Average the gradients, where they lie, and let Adam do the rest."""
        pairs = [pair for pair, anywhere in zip(self._each(), used, strict=True) if anywhere]
        for _, p in pairs:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self._sent += mean_([p.grad for _, p in pairs], self.group)
        for group, p in pairs:
            exact_step(p, p.grad, self._state(p), group, self.bias_correction)
        seen = ((self._state(p), group["betas"][1]) for group, p in self._each())
        self._watch.see(self.steps + 1, seen, speak=dist.get_rank(self.group) == 0)

    def _compressed_step(self) -> None:
        momenta = [local_momentum(p, self.state[p], group) for group, p in self._pairs]
        units = [step_unit(self.state[p], group) if self.preconditioned else 1 for group, p in self._pairs]
        flat = torch.cat([m / unit for m, unit in zip(momenta, units, strict=True)])
        self._say_what_is_lost(flat)
        sent = flat if self._live is None else flat[self._live]
        sent = self._exchange.mean(sent, *(self._residuals if self.error_feedback else (None, None)))
        flat = sent if self._live is None else torch.zeros_like(flat).masked_scatter_(self._live, sent)
        parts = flat.split([m.numel() for m in momenta])
        for (group, p), part, unit in zip(self._pairs, parts, units, strict=True):
            frozen_step(p, part * unit, self.state[p], group, self.bias_correction)

    def _freeze(self) -> None:
        """The switch: from here on v stays as it is, and what has no v is not sent."""
        self._check_same_values(self._lockstep, "at the switch")
        for group, p in self._each():
            freeze(self._state(p), group, self.bias_correction, self.floor)
        self._lay_out()

    def _lay_out(self) -> None:
        self._pairs = [(group, p) for group, p in self._each() if self._state(p)["step"] > 0]
        if not self._pairs:
            raise RuntimeError("no parameter had a gradient on any rank during the warm-up: nothing can be trained")
        live = torch.cat([self.state[p]["exp_avg_sq"].reshape(-1) > 0 for _, p in self._pairs])
        self._live = None if bool(live.all()) else live
        sent = int(live.sum())
        mine = self._exchange.shard(sent)
        sizes = (sent, mine.stop - mine.start)
        self._residuals = tuple(torch.zeros(size, device=live.device) for size in sizes)

    # -- what can go wrong -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first step: do all ranks train the same thing, from the same values?"""
        names = list(self._names())
        check_same_parameters(names, [p for _, p in self._each()], self.group)
        lockstep = Lockstep(names, self.group)
        self._check_same_values(lockstep, "before the first step")
        self._lockstep = lockstep

    def _check_same_values(self, lockstep: Lockstep, when: str) -> None:
        values = [p for _, p in self._each()]
        lockstep.meet(self.steps + 1, values, "value", self._options())
        if not lockstep.identical(values):
            raise ValueError(f"the ranks hold different parameters {when}: build, seed or broadcast them alike")

    def _say_what_is_lost(self, flat: torch.Tensor) -> None:
        if self._warned:
            return
        trained = {p for _, p in self._pairs}
        late = [p.grad for _, p in self._each() if p not in trained and p.grad is not None]
        late += [] if self._live is None else [flat[~self._live]]
        self._warned = warn_of_late_gradients(late, self.warmup, self.steps + 1, dist.get_rank(self.group))

    # -- groups and checkpoints --------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, before the variance is frozen; RuntimeError afterwards."""
        if self.compressing:
            raise RuntimeError("the variance is frozen: a new parameter would have none. Add groups during the warm-up")
        own = {**self.defaults, **param_group}
        check_options(own["lr"], own["betas"], own["eps"], own["weight_decay"], own.get("floor", 0.0))
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if not p.is_floating_point():
                raise TypeError(f"OneBitAdam trains real parameters, not {p.dtype}")
        if self._lockstep is not None:
            self._sent, self._lockstep = self._sent + self._lockstep.wire_bytes, None

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with an entry "onebit": this rank's residuals and counts. Every rank saves and loads its own.

        Tensors, numbers and text only. A resumed run goes on to the bit.
        """
        worker, server = self._residuals or (None, None)
        mine = {
            "rank": dist.get_rank(self.group),
            "ranks": self._ranks,
            "steps": self.steps,
            "wire_bytes": self.wire_bytes,
            "norm_before": self._watch.before,
            "worker_residual": worker,
            "server_residual": server,
        }
        return super().state_dict() | {"onebit": mine}

    def load_state_dict(self, state_dict: dict[str, Any], residuals: bool = True) -> None:
        """Go on from a `state_dict()` of this rank.

        residuals: False starts with empty residuals, and takes the state of any rank, saved by any number of ranks.
        ValueError without that for another rank's state, or another number of ranks'.
        """
        mine = state_dict.get("onebit")
        if mine is None:
            raise ValueError("this is no checkpoint of OneBitAdam: it has no entry 'onebit'")
        here = dist.get_rank(self.group), self._ranks
        if residuals and (mine["rank"], mine["ranks"]) != here:
            raise ValueError(
                f"this is the checkpoint of rank {mine['rank']} of {mine['ranks']}, loaded on rank {here[0]} of "
                f"{here[1]}: load this rank's own, or start with empty residuals: load_state_dict(..., residuals=False)"
            )
        super().load_state_dict(copy.deepcopy({k: v for k, v in state_dict.items() if k != "onebit"}))
        self.steps, self._watch.before = mine["steps"], mine["norm_before"]
        self._sent += mine["wire_bytes"] - self.wire_bytes
        self._residuals, self._live = None, None
        if mine["worker_residual"] is not None:
            self._lay_out()
            if residuals:
                self._residuals[0].copy_(mine["worker_residual"])
                self._residuals[1].copy_(mine["server_residual"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("OneBitAdam belongs to the ranks of its group and cannot be copied: save its state_dict()")

    def _options(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        mine = ("warmup", "bias_correction", "preconditioned", "floor", "error_feedback")
        groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in self.param_groups]
        return {name: getattr(self, name) for name in mine} | {"groups": groups}

    def _each(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        return ((group, p) for group in self.param_groups for p in group["params"])

    def _names(self) -> Iterator[str]:
        for g, group in enumerate(self.param_groups):
            for i in range(len(group["params"])):
                yield repr(group["param_names"][i]) if "param_names" in group else f"parameter {i} of group {g}"

    def _state(self, p: torch.Tensor) -> dict[str, Any]:
        if not self.state[p]:
            self.state[p] = fresh_state(p)
        return self.state[p]

"""1-bit Adam: an optimizer that exchanges one bit a value, once Adam's variance has settled. Not a hook for DDP.

Sign bits do not add up, so no all-reduce can carry them, and Adam cannot be fed with compressed gradients: its variance
is a sum of squares, in which the errors of compression do not cancel. What 1-bit Adam does about both is below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ddplab._adamsteps import check_options, exact_step, freeze, fresh_state
from ddplab._arguments import flag, instance, shown
from ddplab._frozensteps import FrozenSteps, Part
from ddplab._jointoptimizer import JointOptimizer, Tensors, own_part, require_parameters
from ddplab._localsteps import whole
from ddplab._lockstep import mean_
from ddplab._variance import VarianceWatch
from ddplab.hooks.codec import SignCodec
from ddplab.hooks.twophase import TwoPhase

_KEPT = {"numbers of steps": "step", "momenta": "exp_avg", "variances": "exp_avg_sq"}


class OneBitAdam(JointOptimizer):
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

    `close()` gives the process group back that the exchange runs on.

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
        require_parameters(params, "OneBitAdam")
        check_options(lr, betas, eps, weight_decay, floor)
        self.warmup = whole(warmup, "warmup", least=1)  # without any there is no variance to divide by
        self.bias_correction = flag(bias_correction, "bias_correction")
        self.error_feedback = flag(error_feedback, "error_feedback")
        self.preconditioned = flag(preconditioned, "preconditioned")
        flag(decoupled_weight_decay, "decoupled_weight_decay")
        if exchange is not None and not all(hasattr(exchange, name) for name in ("mean", "shard", "wire_bytes")):
            raise TypeError(f"exchange is a ddplab.TwoPhase or None, not {shown(exchange)}")
        self.floor, self._watch = floor, VarianceWatch(self.warmup, stable, betas[1])
        self._frozen: FrozenSteps | None = None  # from the switch on
        decay = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps} | decay, process_group)
        self._own = TwoPhase(SignCodec(), self.group) if exchange is None else None
        self._exchange = exchange or self._own

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that this rank has put on the wire so far, where the backend's all-reduce is a ring."""
        return self._sent + self._exchange.wire_bytes + self.met_bytes

    @property
    def compressing(self) -> bool:
        """Has the variance been frozen?"""
        return self._frozen is not None

    def residual_norm(self) -> float:
        """The L2 norm of what error feedback holds back on this rank, as worker and as server; 0.0 in the warm-up."""
        return self._frozen.residual_norm() if self.compressing else 0.0

    def close(self) -> None:
        """Give back the process group that was made for the exchange; every rank calls it, after its last step."""
        if self._own is not None:
            self._own.close()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every rank. `closure` computes the loss and the gradients again; its value is returned."""
        loss = None
        if closure is not None:
            instance(closure, Callable, "closure is a function without arguments, or None")
            with torch.enable_grad():
                loss = closure()
        used = self.meet()
        if self.steps < self.warmup and not self.compressing:
            self._warm_up(used)
        else:
            if not self.compressing:
                self._freeze()
            self._frozen.step(self.steps + 1, self.warmup, dist.get_rank(self.group))
        self.steps += 1
        return loss

    def _warm_up(self, used: list[bool]) -> None:
        """Average the gradients, where they lie, and let Adam do the rest."""
        pairs = [pair for pair, anywhere in zip(self.each(), used, strict=True) if anywhere]
        for _, p in pairs:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self._sent += mean_([p.grad for _, p in pairs], self.group)
        for group, p in pairs:
            exact_step(p, p.grad, self._state(p), group, self.bias_correction)
        seen = ((self._state(p), group["betas"][1]) for group, p in self.each())
        self._watch.see(self.steps + 1, seen, speak=dist.get_rank(self.group) == 0)

    def _freeze(self) -> None:
        """The switch: from here on v stays as it is, and what has no v is not sent."""
        self.check_same_values(self._lockstep, "at the switch")
        for group, p in self.each():
            freeze(self._state(p), group, self.bias_correction, self.floor)
        self._lay_out()

    def _lay_out(self) -> None:
        trained = [Part(group, p, self.state[p]) for group, p in self.each() if self._state(p)["step"] > 0]
        known = {part.p for part in trained}
        others = [p for _, p in self.each() if p not in known]
        how = self.preconditioned, self.bias_correction, self.error_feedback
        self._frozen = FrozenSteps(trained, others, self._exchange, *how)

    # -- groups and checkpoints --------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, before the variance is frozen; RuntimeError afterwards."""
        if self.compressing:
            raise RuntimeError("the variance is frozen: a new parameter would have none. Add groups during the warm-up")
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f'a group is a dict with an entry "params", not {shown(param_group)}')
        own = {**self.defaults, **param_group}
        flag(own["decoupled_weight_decay"], "decoupled_weight_decay")
        check_options(own["lr"], own["betas"], own["eps"], own["weight_decay"], own.get("floor", 0.0))
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with an entry "onebit": this rank's residuals and counts. Every rank saves and loads its own.

        Tensors, numbers and text only. A resumed run goes on to the bit.
        """
        worker, server = (self._frozen.worker, self._frozen.server) if self.compressing else (None, None)
        mine = {
            "rank": dist.get_rank(self.group),
            "ranks": dist.get_world_size(self.group),
            "steps": self.steps,
            "wire_bytes": self.wire_bytes,
            "norm_before": self._watch.before,
            "worker_residual": worker,
            "server_residual": server,
        }
        return super().state_dict() | {"onebit": mine}

    def load_state_dict(self, state_dict: dict[str, Any], residuals: bool = True) -> None:
        """Go on from a `state_dict()` of this rank. Every rank does it: in the next step they compare what they share,
        ValueError on every rank if it differs, as after a checkpoint that was loaded on some of them only.

        residuals: False starts with empty residuals, and takes the state of any rank, saved by any number of ranks.
        ValueError without that for another rank's state, or another number of ranks'.
        """
        own = self.state_dict()["onebit"]
        mine = own_part(state_dict, own, "onebit", "OneBitAdam", any_rank=not flag(residuals, "residuals"))
        super().load_state_dict(copy.deepcopy({k: v for k, v in state_dict.items() if k != "onebit"}))
        self.steps, self._watch.before = mine["steps"], float(mine["norm_before"])
        self._sent += mine["wire_bytes"] - self.wire_bytes
        self._frozen, self._loaded = None, True
        if mine["worker_residual"] is not None:
            self._lay_out()
            if residuals:
                self._frozen.restore(mine["worker_residual"], mine["server_residual"])

    def shared(self) -> dict[str, Tensors]:
        states = [self.state.get(p, {}) for _, p in self.each()]
        kept = {name: [state.get(key) for state in states] for name, key in _KEPT.items()}
        return {"stages": [torch.tensor(self.compressing)]} | super().shared() | kept

    def options(self) -> dict[str, Any]:
        mine = ("warmup", "bias_correction", "preconditioned", "floor", "error_feedback")
        return {name: getattr(self, name) for name in mine} | super().options()

    def _state(self, p: torch.Tensor) -> dict[str, Any]:
        if not self.state[p]:
            self.state[p] = fresh_state(p)
        return self.state[p]

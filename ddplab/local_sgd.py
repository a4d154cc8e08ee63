"""Talk less often: train alone for H steps, then agree. What today's training across slow links does.

Compression makes each message smaller; these two send 1/H as many. Both start from equal parameters and keep every
gradient on its rank. What the ranks exchange is the parameters themselves, or how far each has moved them.

|                | every H steps each rank continues from                                     |
|----------------|----------------------------------------------------------------------------|
| `PostLocalSGD` | the mean of the ranks' parameters                                          |
| `DiLoCo`       | what an outer optimizer makes of the mean change since they last agreed    |

Bytes: one all-reduce of the parameters every H steps, so the ring's 2(N-1)/N S over H per step. Bias: the ranks' models
drift apart between two agreements, and more so with a larger H, a larger learning rate, and data that differs between
ranks; with H = 1 and plain SGD inside, both are data parallel training. They lose where the link is fast anyway, and
where a batch on one rank is too small to train on alone.

Streaming DiLoCo (Douillard et al., arXiv 2501.18512) goes three steps further; it is not built here. It agrees on one
fragment of the model at a time, so that the peak of the traffic falls; it goes on computing while a fragment travels;
and it sends the changes as 4-bit floats. The total of the bytes falls only by the last of the three.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddplab._arguments import flag
from ddplab._localsteps import LocalSteps, whole
from ddplab._lockstep import digest, mean_
from ddplab.transfers import number


class PostLocalSGD(LocalSteps):
    """Post-local SGD: average gradients exactly for `warmup` steps, then parameters every H-th step.

        local = PostLocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), every=8, warmup=200)
        for x, y in batches:
            loss_fn(model(x), y).backward()
            local.step()
            local.zero_grad()
        local.finish()

    Early steps are the ones that ranks disagree about most, hence the warm-up (in the paper: until the learning rate
    first decays). Without it this is local SGD. A parameter that only some ranks used counts as zero on the others in
    the warm-up; one that nobody used is left alone. The inner momentum stays local. Memory: a copy of the parameters
    during an average. The other arguments are those of `ddplab._localsteps.LocalSteps`.

    Source: Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD (arXiv 1808.07217).
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        warmup: int = 0,
        process_group: dist.ProcessGroup | None = None,
        buffers: str = "average",
    ):
        self.warmup = whole(warmup, "warmup", least=0)
        super().__init__(module, optimizer, every, process_group, buffers)
        self._common = digest(self._params)  # of the parameters from which the ranks went apart

    def step(self) -> bool:
        if self.steps >= self.warmup:
            return super().step()
        self._average_gradients()
        self.optimizer.step()
        self.steps += 1
        if self.steps == self.warmup:
            self._common = digest(self._params)
        return True

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"common": self._common}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._common = whole(state["common"], "common", least=0)

    @torch.no_grad()
    def _average_gradients(self) -> None:
        used = self._meet(self.steps + 1, [p.grad for p in self._params], "gradient")
        trained = [p for p, anywhere in zip(self._params, used, strict=True) if anywhere]
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self._sent += mean_([p.grad for p in trained], self.group)

    def _due(self) -> bool:
        return (self.steps - self.warmup) % self.every == 0

    def _options(self) -> dict[str, Any]:
        return super()._options() | {"warmup": self.warmup}

    def _shared(self) -> dict[str, list[torch.Tensor | None]]:
        warming = {"parameters": list(self._params)} if self.steps < self.warmup else {}
        return super()._shared() | warming | {"parameters of their last agreement": [torch.tensor(self._common)]}

    def _agree(self) -> None:
        if self.steps > self.warmup:  # before that they never parted
            self._sent += mean_(self._params, self.group)
        self._common = digest(self._params)


class DiLoCo(LocalSteps):
    """DiLoCo: H steps of an inner optimizer, then one step of an outer one along the mean of the ranks' changes.

        diloco = DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=4e-4), every=500)    # then as PostLocalSGD

    In H steps rank i moves from the common parameters x to x_i. The mean of x - x_i over the ranks serves as the
    gradient of an outer SGD with Nesterov momentum; all ranks continue from its result. With `outer_lr=1` and
    `outer_momentum=0` that is the mean of the x_i. Inner momentum and variance stay local.

    Args:
        outer_lr, outer_momentum, nesterov: of the outer SGD. Nesterov needs a momentum; without one it is plain.

    The other arguments are those of `ddplab._localsteps.LocalSteps`. Memory: x, the outer momentum, and a copy of the
    change during the exchange. x and the momentum are at least float32; the change travels in the parameters' dtype.

    Source: Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models (arXiv 2311.08105).
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        process_group: dist.ProcessGroup | None = None,
        buffers: str = "average",
    ):
        number(outer_lr, "outer_lr", 0), number(outer_momentum, "outer_momentum", 0)  # torch takes NaN for both
        flag(nesterov, "nesterov")
        super().__init__(module, optimizer, every, process_group, buffers)
        wide = [torch.promote_types(p.dtype, torch.float32) for p in self._params]
        self._common = [p.detach().to(dtype, copy=True) for p, dtype in zip(self._params, wide, strict=True)]
        nesterov = nesterov and outer_momentum > 0
        self.outer = torch.optim.SGD(self._common, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"common": self._common, "outer": self.outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for x, saved in zip(self._common, state["common"], strict=True):
            x.copy_(saved)
        self.outer.load_state_dict(copy.deepcopy(state["outer"]))

    def _shared(self) -> dict[str, list[torch.Tensor | None]]:
        momenta = [self.outer.state.get(x, {}).get("momentum_buffer") for x in self._common]
        return super()._shared() | {"common parameters": list(self._common), "outer momenta": momenta}

    def _options(self) -> dict[str, Any]:
        outer = self.outer.param_groups[0]
        return super()._options() | {f"outer {key}": outer[key] for key in ("lr", "momentum", "nesterov")}

    @torch.no_grad()
    def _agree(self) -> None:
        pairs = list(zip(self._common, self._params, strict=True))
        changes = [(x - p).to(p.dtype) for x, p in pairs]
        self._sent += mean_(changes, self.group)
        for x, change in zip(self._common, changes, strict=True):
            x.grad = change.to(x.dtype)
        self.outer.step()
        self.outer.zero_grad()
        for x, p in pairs:
            p.copy_(x)

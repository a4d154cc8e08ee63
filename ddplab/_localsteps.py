"""Training alone for some steps: what post-local SGD and DiLoCo share. Counting, agreeing, buffers, checkpoints."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddplab._arguments import choice, flag, shown
from ddplab._exchange import broadcast_from_first, check_same_model
from ddplab._lockstep import Lockstep, mean_
from ddplab.hooks.wire import member_of


class LocalSteps:
    """One rank's model, inner optimizer and count of steps. Subclasses say how the ranks agree (`_agree`).

    Args:
        module: the plain model, no DDP around it. Parameters and buffers become those of the group's first rank.
        optimizer: any torch optimizer over the module's parameters. Its state stays on its rank, as in both papers; a
            learning rate schedule works on it as usual.
        every: H, the number of steps between two agreements; 1 or more, the same on all ranks.
        process_group: the ranks that train together; default all. gloo or NCCL; tensors stay on their device.
        buffers: what happens to the floating-point buffers (BatchNorm's statistics) at an agreement: "average" over
            the ranks, or "keep" each rank's own. Counters (integers) are each rank's own in any case.

    `step()` takes the place of `optimizer.step()` and says whether the ranks hold the same parameters now, to the bit.
    Call `finish()` on every rank after the last step.

    Raises:
        TypeError: a module that averages its gradients itself, or things that are no module and no optimizer.
        ValueError: models that differ between ranks, an optimizer of other parameters, bad options; at an agreement,
            on every rank: NaN or infinity in a parameter, options that differ.
        RuntimeError: no `torch.distributed`; at an agreement, on every rank: ranks took different numbers of steps.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        process_group: dist.ProcessGroup | None = None,
        buffers: str = "average",
    ):
        name = type(self).__name__
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name} takes a torch module, not {shown(module)}")
        if hasattr(module, "require_backward_grad_sync"):
            raise TypeError(f"{type(module).__name__} averages every gradient, which {name} avoids: give it ddp.module")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a torch optimizer over the module's parameters, not {shown(optimizer)}")
        choice(buffers, "buffers", ("average", "keep"))
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(f"{name} needs torch.distributed: use ddplab.launch or torchrun")
        self.every = whole(every, "every", least=1)
        self.group = member_of(process_group, name)
        named = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError("no parameter of this model requires a gradient: there is nothing to train")
        held = {p for group in optimizer.param_groups for p in group["params"]}
        if foreign := held - set(module.parameters()):
            raise ValueError(f"{len(foreign)} of the optimizer's {len(held)} parameters are not the module's")
        check_same_model(module, self.group)
        broadcast_from_first([*module.parameters(), *module.buffers()], self.group)
        self.module, self.optimizer, self.buffers = module, optimizer, buffers
        self.steps = self._agreed = 0  # steps taken, and how many it were when the ranks last agreed
        self._params, self._lockstep = list(named.values()), Lockstep([repr(n) for n in named], self.group)
        self._sent, self._loaded = 0, False  # has a checkpoint been loaded since the last meeting?

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that this rank has put on the wire in steps, where the backend's all-reduce is a ring."""
        return self._sent + self._lockstep.wire_bytes

    def step(self) -> bool:
        """One step of the inner optimizer; every H-th time, agree. True if all ranks now hold the same parameters."""
        self.optimizer.step()
        self.steps += 1
        if self._due():
            self._synchronise()
        return self._agreed == self.steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's."""
        self.optimizer.zero_grad(flag(set_to_none, "set_to_none"))

    def finish(self) -> None:
        """After the last step: agree, unless the ranks just did. RuntimeError on every rank if another goes on."""
        self._lockstep.finish(self.steps, self._agreed)
        if self._agreed != self.steps:
            self._synchronise()

    def state_dict(self) -> dict[str, Any]:
        """All that a rank needs to go on to the bit, also from between two agreements: model, optimizer, counts.

        Every rank saves its own, for no two are equal. Tensors, numbers and text only. Save it at once: the tensors are
        the live ones, as in torch.
        """
        return {
            "method": type(self).__name__,
            "rank": dist.get_rank(self.group),
            "ranks": dist.get_world_size(self.group),
            "steps": self.steps,
            "agreed": self._agreed,
            "wire_bytes": self.wire_bytes,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()` of the same rank. ValueError for another rank's, or another number of ranks', or
        another method's; nothing has changed then.

        Every rank does it. When they next meet they compare what they share: ValueError, on every rank, if a checkpoint
        was loaded on some of them only, or from different steps, or of different runs.
        """
        name = type(self).__name__
        if not isinstance(state, dict) or state.get("method", name) != name:
            what = f"that of {state['method']}" if isinstance(state, dict) else f"{type(state).__name__}"
            raise ValueError(f"this is no checkpoint of {name}, it is {what}")
        here = dist.get_rank(self.group), dist.get_world_size(self.group)
        if (state.get("rank"), state.get("ranks")) != here:
            raise ValueError(
                f"this is the checkpoint of rank {state.get('rank')} of {state.get('ranks')}, loaded on rank {here[0]} "
                f"of {here[1]}: each rank needs its own, from as many ranks"
            )
        if damaged := {key for key in self.state_dict() if key != "method"} - state.keys():
            raise ValueError(f"this checkpoint of {name} is damaged: it has no entry {', '.join(sorted(damaged))}")
        steps, agreed, sent = (whole(state[key], key, least=0) for key in ("steps", "agreed", "wire_bytes"))
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would go on writing into `state`
        self.steps, self._agreed, self._loaded = steps, agreed, True
        self._sent = sent - self._lockstep.wire_bytes

    def _due(self) -> bool:
        return self.steps % self.every == 0

    def _synchronise(self) -> None:
        self._meet(self.steps, self._params, "value")
        self._agree()
        if self.buffers == "average":
            self._sent += mean_([b for b in self.module.buffers() if b.is_floating_point()], self.group)
        self._agreed = self.steps

    def _meet(self, step: int, tensors: list[torch.Tensor | None], what: str) -> list[bool]:
        """Hear of a mistake on any rank before the values travel; which of the tensors any rank has."""
        meeting = self._lockstep.meet(step, tensors, what, self._options(), self._loaded)
        if any(meeting.loaded):
            has = [torch.tensor(self._loaded)]
            self._lockstep.require_shared(meeting.loaded, {"starting points": has} | self._shared())
            self._loaded = False
        return meeting.used

    def _shared(self) -> dict[str, list[torch.Tensor | None]]:
        """What ranks hold alike, by name, whenever they meet."""
        return {"numbers of steps since they agreed": [torch.tensor(self.steps - self._agreed)]}

    def _options(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        rates = [float(group.get("lr", 0)) for group in self.optimizer.param_groups]
        return {"every": self.every, "buffers": self.buffers, "learning rates": rates}

    def _agree(self) -> None:
        """Make the parameters the same on all ranks, and count the bytes in `_sent`."""
        raise NotImplementedError


def whole(value: Any, name: str, least: int) -> int:
    """`value` if it is a number of steps; ValueError otherwise."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"{name} is a whole number of steps, {least} or more, not {shown(value)}")
    return operator.index(value)

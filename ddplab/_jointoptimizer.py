"""An optimizer that all ranks step at once: what they compare before they move, and what a checkpoint must be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddplab._arguments import shown
from ddplab._localsteps import whole
from ddplab._lockstep import Lockstep, check_same_parameters
from ddplab.hooks.wire import member_of

Tensors = list[torch.Tensor | None]


class JointOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose ranks hold the same parameters and meet in every step. Subclasses say what a step is.

    Attributes:
        group: the ranks that train together.  steps: taken so far.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], process_group: dist.ProcessGroup | None):
        self.group, self.steps = member_of(process_group, type(self).__name__), 0
        self._sent = 0  # payload bytes, but for those of meetings and of the exchange
        self._lockstep: Lockstep | None = None  # until the first step, and after a group was added
        self._loaded = False  # has a checkpoint been loaded since the last step?
        super().__init__(params, defaults)

    def options(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in self.param_groups]
        return {"groups": groups}

    def shared(self) -> dict[str, Tensors]:
        """What ranks hold alike between two steps, by name."""
        return {"parameters": [p for _, p in self.each()]}

    @property
    def met_bytes(self) -> int:
        """What meetings have cost since the last group was added."""
        return self._lockstep.wire_bytes if self._lockstep else 0

    def meet(self) -> list[bool]:
        """Before a step: raise on every rank for whatever is wrong on any; which gradients does any rank have?"""
        if self._lockstep is None:
            self._begin()
        grads = [p.grad for _, p in self.each()]
        meeting = self._lockstep.meet(self.steps + 1, grads, "gradient", self.options(), self._loaded)
        if any(meeting.loaded):
            self._lockstep.require_shared(meeting.loaded, self.shared())
            self._loaded = False
        if meeting.alike and self._lockstep.identical(grads):
            raise RuntimeError(
                f"step {self.steps + 1}: all ranks hold the same gradients. If a DDP averages them, run forward and "
                "backward inside `with ddp.no_sync():`, or use the plain model; otherwise give each rank its own data"
            )
        return meeting.used

    def _begin(self) -> None:
        """The first step: do all ranks train the same thing, from the same values?"""
        names = list(self._names())
        check_same_parameters(names, [p for _, p in self.each()], self.group)
        lockstep = Lockstep(names, self.group)
        self.check_same_values(lockstep, "before the first step")
        self._lockstep = lockstep

    def check_same_values(self, lockstep: Lockstep, when: str) -> None:
        """ValueError on every rank unless all hold the same parameters, to the bit."""
        values = [p for _, p in self.each()]
        lockstep.meet(self.steps + 1, values, "value", self.options(), self._loaded)
        if not lockstep.identical(values):
            raise ValueError(f"the ranks hold different parameters {when}: build, seed or broadcast them alike")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Before the next step the ranks compare their models once more."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if not p.is_floating_point():
                raise TypeError(f"{type(self).__name__} trains real parameters, not {p.dtype}")
        self._sent, self._lockstep = self._sent + self.met_bytes, None

    def each(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Group and parameter, in order."""
        return ((group, p) for group in self.param_groups for p in group["params"])

    def _names(self) -> Iterator[str]:
        for g, group in enumerate(self.param_groups):
            for i in range(len(group["params"])):
                yield repr(group["param_names"][i]) if "param_names" in group else f"parameter {i} of group {g}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = type(self).__name__
        raise TypeError(f"{name} belongs to the ranks of its group and cannot be copied: save its state_dict()")


def require_parameters(params: Any, name: str) -> None:
    """TypeError for what is no collection of parameters, RuntimeError without `torch.distributed`."""
    if isinstance(params, (nn.Module, torch.Tensor, str)) or not isinstance(params, Iterable):
        raise TypeError(f"{name} takes parameters: model.parameters() or model.named_parameters(), not {shown(params)}")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(f"{name} needs torch.distributed: use ddplab.launch or torchrun")


def own_part(saved: Any, mine: dict[str, Any], key: str, name: str, any_rank: bool) -> dict[str, Any]:
    """The entry `key` of the checkpoint `saved`, which is like `mine`. ValueError for what is no checkpoint, or, unless
    `any_rank`, one of another rank or of another number of ranks."""
    part = saved.get(key) if isinstance(saved, dict) else None
    if not isinstance(part, dict) or not {"state", "param_groups"} <= saved.keys():
        what = f"it has no entry {key!r}" if isinstance(saved, dict) and part is None else shown(saved)
        raise ValueError(f"this is no checkpoint of {name}: {what}")
    if missing := mine.keys() - part.keys():
        raise ValueError(f"this checkpoint of {name} is damaged: it has no {', '.join(sorted(missing))}")
    if not any_rank and (part["rank"], part["ranks"]) != (mine["rank"], mine["ranks"]):
        raise ValueError(
            f"this is the checkpoint of rank {part['rank']} of {part['ranks']}, loaded on rank {mine['rank']} of "
            f"{mine['ranks']}: load this rank's own, or start with empty residuals: load_state_dict(..., "
            "residuals=False)"
        )
    return part | {count: whole(part[count], f"{count} of a checkpoint", least=0) for count in ("steps", "wire_bytes")}

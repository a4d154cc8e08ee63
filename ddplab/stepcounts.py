"""What a step of training did on this rank, counted: collectives and their bytes, copies, memory of gradients.

DDP's reducer is C++ and takes no printing. But whatever it does to a tensor, it does through torch's dispatcher, and a
dispatch mode sees every call there: the all-reduce of a bucket, the broadcast of a buffer, each copy between a gradient
and its bucket. So nothing has to be hooked, patched or timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What the reducer moves gradients with: scaled into a bucket, copied in or out, and the two batched forms.
_COPIES = {"aten.mul.out", "aten.copy_.default", "aten._foreach_copy_.default", "aten.div_.Scalar"}


class Collective(NamedTuple):
    """One collective of one rank: its name ("allreduce", "broadcast", "allgather"), and the tensors given to it."""

    name: str
    nbytes: int  # of all its tensors
    dtype: str  # of the first
    storages: tuple[tuple[int, int], ...]  # (address, bytes) of the memory behind them


class StepCounts(TorchDispatchMode):
    """Counts what happens inside its block on this rank.

        with dl.StepCounts() as counts:
            ddp(x).sum().backward()
        counts.nbytes, [c.name for c in counts.collectives]

    collectives: a list of `Collective`, in the order in which they were issued; a collective counts when it starts.
    copies: Counter of the operations with which DDP moves gradients, `aten.mul.out` (into a bucket, divided by the
        ranks), `aten.copy_.default`, `aten._foreach_copy_.default` and `aten.div_.Scalar`. A model that copies tensors
        itself counts, too.

    A Python function sees every operation of the block, which takes time: count in one step, measure in another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.copies: Counter[str] = Counter()

    @property
    def nbytes(self) -> int:
        """Bytes given to collectives."""
        return sum(c.nbytes for c in self.collectives)

    def gradient_bytes(self, module: torch.nn.Module) -> int:
        """Bytes of memory that hold gradients: each storage once, of every `.grad` and everything all-reduced.

        Call it right after the block, while the buckets that were seen are still those of `module`.
        """
        behind = {p.grad.untyped_storage() for p in module.parameters() if p.grad is not None}
        memory = {s.data_ptr(): s.nbytes() for s in behind}
        for c in self.collectives:
            if c.name == "allreduce" and getattr(torch, c.dtype).is_floating_point:
                memory.update(c.storages)
        return sum(memory.values())

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            self.collectives.append(_collective(func, args, kwargs or {}))
        elif str(func) in _COPIES:
            self.copies[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _collective(func: Any, args: tuple, kwargs: dict) -> Collective:
    found = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    storages = tuple((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in found)
    dtype = str(found[0].dtype).removeprefix("torch.") if found else ""
    name = func._schema.name.removeprefix("c10d::").rstrip("_")
    return Collective(name, sum(t.nbytes for t in found), dtype, storages)

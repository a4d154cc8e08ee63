"""Four ways to keep replicas equal, in a form that can be timed side by side: two of DataParallel, two of DDP.

Each scheme runs one training step and notes when its collectives ran. They differ in what travels, along which
transfers, and when; the model, the loss and the optimizer are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddplab.ddp import FlatDDP
from ddplab.execute import all_reduce
from ddplab.paced import Paced
from ddplab.schedule import Schedule, chain, star

Loss = Callable[[nn.Module], torch.Tensor]


def reduce_half(schedule: Schedule) -> Schedule:
    """The transfers that add: everything ends on whoever owns it."""
    return _part(schedule, schedule.reduce, "reduce")


def broadcast_half(schedule: Schedule) -> Schedule:
    """The transfers that copy: whoever owns it hands it to the others."""
    return _part(schedule, ~schedule.reduce, "broadcast")


def _part(schedule: Schedule, rows: Any, name: str) -> Schedule:
    columns = [getattr(schedule, c)[rows] for c in ("step", "src", "dst", "chunk", "reduce")]
    if len(columns[0]):
        columns[0] = columns[0] - columns[0].min()
    return Schedule(f"{schedule.name} {name}", schedule.ranks, schedule.chunks, *columns)


class Scheme:
    """One rank's model and how its gradients meet those of the others. `step` is what is timed."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        self.module, self.ranks = module, dist.get_world_size()
        self.spans: list[tuple[float, float]] = []  # when collectives ran in the last step, time.perf_counter()
        self.optimizer = None if isinstance(module, Paced) else torch.optim.SGD(module.parameters(), lr=lr)

    def step(self, loss: Loss) -> None:
        """Forward, backward, gradients, optimizer."""
        raise NotImplementedError

    def settle(self) -> None:
        """After the last step: whatever the next step would have begun with."""

    def update(self) -> None:
        """The optimizer's step; a paced model waits as long as it is said to take."""
        if self.optimizer is None:
            self.module.optimizer_step()
        else:
            self.optimizer.step()

    def timed(self, run: Callable[[], Any]) -> None:
        """Run a collective that nothing else hides."""
        start = time.perf_counter()
        run()
        self.spans.append((start, time.perf_counter()))


class DataParallelTraffic(Scheme):
    """What DataParallel puts on the links, between ranks instead of between one process's GPUs.

    Gradients live in one flat buffer and so do parameters, so that nothing is copied around the collectives.
    DataParallel computes its loss over the gathered outputs of all replicas; here each replica has the loss of its own
    part, so the sum of gradients is divided by the number of replicas. Scattering inputs and gathering outputs is left
    out.
    """

    def __init__(self, module: nn.Module, lr: float) -> None:
        super().__init__(module, lr)
        trained = [p for p in module.parameters() if p.requires_grad]
        if len({(p.dtype, p.device) for p in trained}) != 1:
            raise ValueError("the traffic of DataParallel is emulated for models of one dtype on one device")
        total = sum(p.numel() for p in trained)
        self.gradients = trained[0].new_zeros(total)
        self.parameters = trained[0].new_empty(total)
        at = 0
        for p in trained:
            place = slice(at, at := at + p.numel())
            self.parameters[place] = p.detach().reshape(-1)
            p.data = self.parameters[place].view(p.shape)
            p.grad = self.gradients[place].view(p.shape)

    def backward(self, loss: Loss) -> None:
        self.gradients.zero_()
        (loss(self.module) / self.ranks).backward()


class DpStar(DataParallelTraffic):
    """DataParallel as the article tells it: when backward is over, rank 0 gathers all gradients, adds them up, and
    sends everybody the sum."""

    def step(self, loss: Loss) -> None:
        self.backward(loss)
        self.timed(lambda: all_reduce(self.gradients, star(self.ranks), check=False))
        self.update()


class DpNccl(DataParallelTraffic):
    """DataParallel as it is: every forward begins with a broadcast of the parameters from rank 0, and when backward is
    over the gradients are reduced to rank 0, who alone steps. NCCL does both along a chain, chunk by chunk."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        super().__init__(module, lr)
        both = chain(self.ranks)
        self.reduction, self.broadcast = reduce_half(both), broadcast_half(both)

    def step(self, loss: Loss) -> None:
        self.settle()
        self.backward(loss)
        self.timed(lambda: all_reduce(self.gradients, self.reduction, check=False))
        if dist.get_rank() == 0:
            self.update()

    def settle(self) -> None:
        self.timed(lambda: all_reduce(self.parameters, self.broadcast, check=False))


class Ddp(Scheme):
    """torch's DDP: buckets leave during backward."""

    def __init__(self, module: nn.Module, lr: float, bucket_cap_mb: float | None = None) -> None:
        super().__init__(module, lr)
        self.replica = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
        self.replica.register_comm_hook(None, self._watched)

    def _watched(self, state, bucket):  # no annotations: torch wants exactly its own there, and ours are text
        start = time.perf_counter()

        def note(future: Any) -> Any:
            self.spans.append((start, time.perf_counter()))
            return future.value()[0] if isinstance(future.value(), list) else future.value()

        return allreduce_hook(None, bucket).then(note)

    def step(self, loss: Loss) -> None:
        self.replica.zero_grad()
        loss(self.replica).backward()
        self.finish()
        self.update()

    def finish(self) -> None:
        """torch's backward returns when every bucket is back."""


class DdpNoOverlap(Ddp):
    """DDP without its point: one flat all-reduce of the backend when backward is over."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        Scheme.__init__(self, module, lr)
        self.replica = FlatDDP(module)
        self.replica.register_comm_hook(None, self._watched)

    def finish(self) -> None:
        self.replica.finish()


class Alone(Scheme):
    """One rank, no communication: the baseline of the scaling efficiency, and what a step of compute costs."""

    def step(self, loss: Loss) -> None:
        self.module.zero_grad()
        loss(self.module).backward()
        self.update()


SCHEMES: dict[str, type[Scheme]] = {
    "dp_star": DpStar,
    "dp_nccl": DpNccl,
    "ddp": Ddp,
    "ddp_no_overlap": DdpNoOverlap,
    "alone": Alone,
}

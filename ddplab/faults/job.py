"""A small data-parallel training, with the collectives that such loops have.

A step computes the loss of every sample, lets DDP average the gradients, adds up two statistics in the background,
and reports the mean loss and the samples' losses. The network is a toy; the collectives are torch's own on gloo. The
faults of `catalog.py` override one method each.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddplab.faults.blackbox import BlackBox
from ddplab.faults.plan import Plan

SAMPLES, FEATURES, CLASSES = 8, 16, 5
BUCKET_MB = 0.001  # two buckets: the last two layers, then the first


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)
        self.shallow = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        if not self.shallow:
            x = torch.relu(self.middle(x))
        return self.last(x)


class Job:
    """The training in one rank. Its methods are the seams where a fault takes hold."""

    def __init__(self, plan: Plan, box: BlackBox):
        self.plan, self.box, self.rank, self.step = plan, box, dist.get_rank(), -1
        # gloo, also in a job on NCCL: there a timeout would end the process
        limit = timedelta(seconds=plan.limit_s)
        self.group = dist.new_group(timeout=limit, backend="gloo", group_desc="training")
        if hasattr(c10d, "FlightRecorderHook"):  # torch 2.14: it notes who is in the group, which gloo leaves out
            c10d.FlightRecorderHook.attach(self.group).remove()
        torch.manual_seed(0)
        self.model = Network()
        self.ddp = DistributedDataParallel(self.model, process_group=self.group, bucket_cap_mb=BUCKET_MB)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        torch.manual_seed(1 + self.rank)

    def run(self) -> None:
        for step, (samples, labels) in enumerate(self.batches()):
            self.step = step
            self.box.beat(step)
            self.checkpoint()
            losses = self.train(samples, labels)
            self.statistics(samples, labels)
            self.mean_loss(losses)
            self.all_losses(losses)
        self.box.note(f"training finished after {self.step + 1} steps")

    def train(self, samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.prepare("all_reduce")
        losses = cross_entropy(self.ddp(samples), labels, reduction="none")
        losses.mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses.detach()

    def statistics(self, samples: torch.Tensor, labels: torch.Tensor) -> None:
        """Two sums over all ranks, both under way at once."""
        sums = {"classes": torch.bincount(labels, minlength=CLASSES), "features": samples.sum(0)}
        works = [dist.all_reduce(sums[name], group=self.group, async_op=True) for name in self.order(list(sums))]
        for work in works:
            work.wait()

    def mean_loss(self, losses: torch.Tensor) -> None:
        figures = self.figures(losses)
        if self.takes_part("all_reduce"):
            dist.all_reduce(figures, group=self.group)

    def all_losses(self, losses: torch.Tensor) -> None:
        self.prepare("all_gather")
        mine = self.complete(losses)
        everyone = [torch.empty_like(mine) for _ in range(self.plan.ranks)]
        if self.takes_part("all_gather"):
            dist.all_gather(everyone, mine, group=self.group)

    # -- the seams: what a fault changes. None of them is on the stack when a collective is called. --

    def here(self, operation: str | None = None) -> bool:
        """Is this the rank and the step of the plan, and the operation, where one is asked for?"""
        plan = self.plan
        return (self.rank, self.step) == (plan.rank, plan.step) and operation in (None, plan.operation)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.plan.steps):
            yield torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,))

    def checkpoint(self) -> None:
        """A real training would save something here, now and then."""

    def prepare(self, operation: str) -> None:
        """What comes before a collective: loading a batch, an evaluation."""

    def order(self, names: list[str]) -> list[str]:
        return names

    def figures(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.mean().reshape(1)

    def complete(self, losses: torch.Tensor) -> torch.Tensor:
        return losses

    def takes_part(self, operation: str) -> bool:
        return True

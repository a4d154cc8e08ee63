"""Eight faults of data-parallel jobs: the training of `job.py` with one thing wrong, on one rank, at one step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist

from ddplab.faults.job import Job


class SkippedCollective(Job):
    """The rank leaves one collective out, as a `continue` or a swallowed exception does."""

    def takes_part(self, operation: str) -> bool:
        return not self.here(operation)


class RankGone(Job):
    """The kernel kills the rank, as it does when memory runs out."""

    def prepare(self, operation: str) -> None:
        if self.here(operation):
            os.kill(os.getpid(), signal.SIGKILL)


class UnequalBatches(Job):
    """The rank's share of the data has fewer batches, so it leaves the loop earlier than the others."""

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return islice(super().batches(), self.plan.step if self.rank == self.plan.rank else None)


class UnusedParameter(Job):
    """The rank's forward takes another branch: a layer gets no gradient, and its bucket never becomes full."""

    def prepare(self, operation: str) -> None:
        self.model.shallow = self.here()


class SlowRank(Job):
    """From the step on, the rank is late: its data come late, or it does work that the others do not do."""

    def prepare(self, operation: str) -> None:
        plan = self.plan
        if self.rank == plan.rank and self.step >= plan.step and operation == plan.operation:
            time.sleep(plan.delay_s)


class WrongOrder(Job):
    """The rank starts two collectives in the other order, as a loop over a set of names does."""

    def order(self, names: list[str]) -> list[str]:
        return names[::-1] if self.here() else names


class MismatchedShapes(Job):
    """The rank's tensor is longer or shorter than that of the others: one figure more, a ragged last batch."""

    def figures(self, losses: torch.Tensor) -> torch.Tensor:
        return torch.stack([losses.mean(), losses.std()]) if self.here("all_reduce") else super().figures(losses)

    def complete(self, losses: torch.Tensor) -> torch.Tensor:
        return losses[:-3] if self.here("all_gather") else losses


class OneRankOnly(Job):
    """A collective stands inside `if rank == ...`: the rank waits for partners that never come."""

    def checkpoint(self) -> None:
        if self.here("barrier"):
            dist.barrier(self.group)
        if self.here("broadcast"):
            dist.broadcast(torch.zeros(3), self.rank, group=self.group)


JOBS: dict[str | None, type[Job]] = {
    None: Job,
    "skipped_collective": SkippedCollective,
    "rank_gone": RankGone,
    "unequal_batches": UnequalBatches,
    "unused_parameter": UnusedParameter,
    "slow_rank": SlowRank,
    "wrong_order": WrongOrder,
    "mismatched_shapes": MismatchedShapes,
    "one_rank_only": OneRankOnly,
}

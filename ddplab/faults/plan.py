"""Which fault, on which rank, at which step: chosen, or drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass

# name -> the collectives that it can concern
FAULTS = {
    "skipped_collective": ("all_reduce", "all_gather"),
    "rank_gone": ("all_reduce",),
    "unequal_batches": ("all_reduce",),
    "unused_parameter": ("all_reduce",),
    "slow_rank": ("all_reduce", "all_gather"),
    "wrong_order": ("all_reduce",),
    "mismatched_shapes": ("all_reduce", "all_gather"),
    "one_rank_only": ("barrier", "broadcast"),
}
FIRST_STEP, SPARE_STEPS = 2, 10  # DDP finds its buckets in steps 0 and 1; a slow rank must be late again and again


@dataclass(frozen=True)
class Plan:
    """One run: what goes wrong where, and how long ranks wait for each other.

    fault: a name in FAULTS, or None for a healthy run. rank: from 0; step: from 2 to steps - 10, counted from 0.
    operation: the collective that the fault concerns; None takes the fault's first. ranks, steps: size of the job.
    limit_s: timeout of the process group, in seconds. delay_s: what a slow rank loses in each step, in seconds.
    ValueError for anything else.
    """

    fault: str | None = None
    rank: int = 0
    step: int = FIRST_STEP
    operation: str | None = None
    ranks: int = 4
    steps: int = 16
    limit_s: float = 5.0
    delay_s: float = 0.4

    def __post_init__(self) -> None:
        if self.fault is not None and self.fault not in FAULTS:
            raise ValueError(f"unknown fault {self.fault!r}; faults are {', '.join(FAULTS)}")
        if not 2 <= self.ranks <= 64:
            raise ValueError(f"a fault needs 2 to 64 ranks, not {self.ranks!r}")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank is from 0 to {self.ranks - 1}, not {self.rank!r}")
        last = self.steps - SPARE_STEPS
        if not FIRST_STEP <= self.step <= last:
            raise ValueError(f"step is from {FIRST_STEP} to {last} in a job of {self.steps} steps, not {self.step!r}")
        known = FAULTS.get(self.fault or "", ())
        if self.operation is None and known:
            object.__setattr__(self, "operation", known[0])
        if self.operation is not None and self.operation not in known:
            raise ValueError(f"{self.fault} concerns {' or '.join(known) or 'no collective'}, not {self.operation!r}")
        if self.limit_s <= 0 or self.delay_s <= 0:
            raise ValueError("limit_s and delay_s are seconds, more than 0")


def draw(seed: int, ranks: int = 4, steps: int = 16) -> Plan:
    """A plan with fault, operation, rank and step drawn at random; the same for the same seed."""
    dice = random.Random(seed)
    fault = dice.choice(list(FAULTS))
    step = dice.randint(FIRST_STEP, steps - SPARE_STEPS)
    return Plan(fault, dice.randrange(ranks), step, dice.choice(FAULTS[fault]), ranks, steps)

"""Blind: `why` on jobs whose fault, rank, step and collective were drawn at random.

    python benchmarks/why_blind.py [--faults 40] [--healthy 10] [--seed 0] [--ranks 4] [--save FILE]

Each job runs for real on gloo and leaves a folder; `why` sees that folder and nothing else. Printed: what was drawn
against what was said, a table of confusions, and how long run and diagnosis took. Exit code 1 below the acceptance:
95% named with the right rank and collective, each in under 20 s, and no accusation of a healthy job.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter

import pandas as pd

from ddplab.faults import FAULTS, Plan, draw, run
from ddplab.results import save_results
from ddplab.why import Diagnosis, why

LIMIT_S = 20.0


def judge(plan: Plan, found: Diagnosis) -> bool:
    """Is the diagnosis right in kind, rank and collective?"""
    if plan.fault is None:
        return found.kind is None
    return (found.kind, found.ranks, found.operation) == (plan.fault, (plan.rank,), plan.operation)


def plans(faults: int, healthy: int, seed: int, ranks: int) -> list[Plan]:
    """Drawn, in a drawn order."""
    dice = random.Random(seed)
    drawn = [draw(dice.randrange(2**32), ranks) for _ in range(faults)] + [Plan(ranks=ranks)] * healthy
    dice.shuffle(drawn)
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("faults", 40), ("healthy", 10), ("seed", 0), ("ranks", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--save", metavar="FILE", help="record the table, as the chapter shows it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # loads torch and DDP into the process that ranks are forked from
        run(Plan(ranks=args.ranks), folder)
    rows = []
    for plan in plans(args.faults, args.healthy, args.seed, args.ranks):
        with tempfile.TemporaryDirectory(prefix="ddplab-blind-") as folder:
            start = time.perf_counter()
            run(plan, folder)
            left = time.perf_counter()
            found = why(folder)
            end = time.perf_counter()
        right = judge(plan, found)
        row = {"drawn": plan.fault or "healthy", "said": found.kind or "healthy", "right": right}
        row |= {"step_right": found.step == plan.step if plan.fault else None}
        row |= {"run_s": round(left - start, 2), "why_s": round(end - left, 3)}
        rows.append(row)
        drawn = f"{row['drawn']} rank {plan.rank} step {plan.step} {plan.operation}" if plan.fault else "healthy"
        said = f"{row['said']} {found.ranks} step {found.step} {found.operation}"
        print(f"{'ok ' if right else 'BAD'} {end - start:5.1f} s  {drawn:<55} {said}", flush=True)
        if not right:
            print(found)
    frame = pd.DataFrame(rows)
    print("\n", pd.crosstab(frame.drawn, frame.said).to_string(), sep="")
    if args.save:
        what = f"drawn jobs of {args.ranks} ranks on gloo, seed {args.seed}"
        save_results(args.save, frame, what=what, script=f"benchmarks/why_blind.py --save {args.save}")
    return verdict(frame)


def verdict(frame: pd.DataFrame) -> int:
    faults, healthy = frame[frame.drawn != "healthy"], frame[frame.drawn == "healthy"]
    total = frame.run_s + frame.why_s
    steps = Counter(faults.step_right)
    print(
        f"\nfaults named with the right rank and collective: {faults.right.sum()} of {len(faults)}"
        f" (the step, too: {steps[True]})\nhealthy jobs accused: {(~healthy.right).sum()} of {len(healthy)}"
        f"\nrun and diagnosis: median {total.median():.1f} s, longest {total.max():.1f} s;"
        f" diagnosis alone: longest {frame.why_s.max() * 1e3:.0f} ms"
        f"\nfaults never drawn: {', '.join(set(FAULTS) - set(faults.drawn)) or 'none'}"
    )
    enough = faults.right.sum() >= 0.95 * len(faults)
    return 0 if enough and healthy.right.all() and total.max() < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())

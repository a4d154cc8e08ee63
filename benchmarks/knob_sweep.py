"""Does a sweep keep its word? A/A sweeps must say "no effect", a planted 10% must be found. On real ranks, with gloo.

    python benchmarks/knob_sweep.py [--runs 40] [--save noise.json]

Expected: "no effect" in at least 38 of 40 A/A sweeps; the limits are for 99% of the tables, so 0.4 of 40 go wrong on
average. The planted effect is exact: a step of 11 all-reduces against one of 10. How many rounds it takes to see it
depends on the machine's noise; on a busy one 10% is lost, and the table says how much could hide.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter

import pandas as pd

import ddplab as dl


def step() -> None:
    """As many all-reduces of 64 KiB as the variable says."""
    import torch
    import torch.distributed as dist

    for _ in range(int(os.environ.get("PLANTED", "10"))):
        dist.all_reduce(torch.ones(2**14))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40, help="A/A sweeps (default 40)")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of each sweep (default 24)")
    parser.add_argument("--save", help="write all measurements of the A/A sweeps here")
    args = parser.parse_args()
    common = {"ranks": 2, "rounds": args.rounds, "device": "cpu", "show": False}
    verdicts, noise = Counter(), []
    for run in range(args.runs):
        found = dl.sweep("algorithm", ["backend", "backend"], size="256K", iters=5, seed=run, **common)
        verdicts[found.table["verdict"][1]] += 1
        noise.append(found.observations.assign(run=run))
    print(f"A/A within one launch, {args.runs} sweeps: {dict(verdicts)}", flush=True)
    if args.save:
        dl.save_results(args.save, pd.concat(noise), ranks=2, rounds=args.rounds, size_B=2**18)
    for values, name in ((["10", "10"], "A/A with a launch for each measurement"), (["10", "11"], "10% planted")):
        print(f"\n{name}:", flush=True)
        print(dl.sweep("PLANTED", values, workload=step, iters=9, **common))


if __name__ == "__main__":
    main()

"""What compression does to learning: every method, five paired seeds, a small CNN on real digits, 4 gloo ranks.

    python benchmarks/convergence.py --record     # everything, and labs/results/convergence.json; minutes
    python benchmarks/convergence.py --record --only DiLoCo "1-bit Adam"    # these anew, the others as recorded
    python benchmarks/convergence.py --links      # two methods on emulated hosts: predicted against measured
    python benchmarks/convergence.py              # the tables of what was recorded

Losses and bytes do not depend on how fast the machine is, so launches may run side by side (--jobs). Seconds are
predicted, but for --links: the same two methods on four emulated hosts at 100 Mbit/s. Computing takes as long in both,
so what is compared is the difference between their times, predicted and measured, and the bytes that left a host.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd

import ddplab as dl

LABS = Path(__file__).parents[1] / "labs"
RECORD = LABS / "results" / "convergence.json"
STEPS, EVERY, SEEDS = 160, 20, range(5)
# Once more, with a smaller learning rate: what error feedback is worth depends on it.
AGAIN = ("fp32", "1-bit", "1-bit without feedback", "top-k", "top-k without feedback")
SMALLER = 0.2


def digits() -> tuple[np.ndarray, np.ndarray]:
    with np.load(LABS / "data" / "digits.npz") as file:
        return file["pixels"], file["label"]


def record(jobs: int, only: list[str] | None = None) -> pd.DataFrame:
    """All runs, one launch a method and learning rate; with `only`, of these methods."""
    pixels, labels = digits()
    work = [(name, 1.0) for name in dl.RECIPES] + [(name, SMALLER) for name in AGAIN]
    if only is not None:
        work = [item for item in work if item[0] in only]

    def one(item: tuple[str, float]) -> pd.DataFrame:
        name, lr_factor = item
        how = {"steps": STEPS, "every": EVERY, "lr_factor": lr_factor, "timeout": 3600.0}
        runs = dl.converge(pixels, labels, [name], SEEDS, **how)
        last = runs[runs.step == STEPS]
        print(f"{name}, learning rate x {lr_factor}: loss {last.loss.round(4).tolist()}", flush=True)
        return runs.assign(lr_factor=lr_factor)

    with ThreadPoolExecutor(jobs) as pool:
        return pd.concat(pool.map(one, work), ignore_index=True)


def links(steps: int = 40) -> pd.DataFrame:
    """Seconds and bytes of two methods on emulated hosts, a row each, and their difference."""
    pixels, labels = digits()
    methods = ["fp32", "1-bit"]
    with dl.Hosts(4, link="100mbit") as hosts:
        runs = dl.converge(pixels, labels, methods, [0, 1, 2], steps=steps, every=steps, hosts=hosts)
    last = runs[runs.step == steps].groupby("method", sort=False)
    table = last[["wire_B", "measured_B", "slow_s", "measured_s"]].median() / steps
    table.loc["difference"] = table.loc["fp32"] - table.loc["1-bit"]
    return table.rename(columns={"slow_s": "predicted_s"})


def report(runs: pd.DataFrame) -> None:
    for lr_factor, part in runs.groupby("lr_factor", sort=False):
        for metric in ("loss", "test_loss", "test_accuracy"):
            print(
                f"\nlearning rates x {lr_factor}: {metric} after {part.step.max()} steps, {part.seed.nunique()} pairs"
            )
            print(dl.verdicts(part, metric).to_string(index=False, float_format="{:.4g}".format))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="train everything and record it")
    parser.add_argument("--links", action="store_true", help="measure two methods on emulated hosts")
    parser.add_argument("--only", nargs="+", choices=dl.RECIPES, help="with --record: train only these methods")
    parser.add_argument("--jobs", type=int, default=2, help="launches side by side (default 2)")
    options = parser.parse_args()
    if options.links:
        print(links().to_string(float_format="{:,.4f}".format))
        return
    if options.record:
        runs = record(options.jobs, options.only)
        if options.only:
            known = dl.load_results(RECORD)[0]
            runs = pd.concat([known[~known.method.isin(options.only)], runs], ignore_index=True)
        rounded = runs.round({"loss": 6, "test_loss": 6, "test_accuracy": 4, "slow_s": 6, "fast_s": 6})
        what = "4 gloo ranks, 16 images a rank and step; seconds are predicted: 5 ms a step, 100 Mbit/s and 10 Gbit/s"
        dl.save_results(RECORD, rounded, what=what, script="benchmarks/convergence.py --record")
    report(dl.load_results(RECORD)[0])


if __name__ == "__main__":
    main()

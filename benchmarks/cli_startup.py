"""How long the command line takes to answer: wall time of a fresh process, median of several runs.

    python benchmarks/cli_startup.py

The goal for every --help is 0.5 s.
"""

import statistics
import subprocess
import sys
import time

from ddplab.cli import COMMANDS

RUNS = 7
GOAL_S = 0.5

LINES = ["--version", *(f"{name} --help" for name in COMMANDS), "predict --ranks 8 --size 100M --link 10gbit"]


def seconds(line: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "ddplab", *line.split()], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    print(f"python {sys.version.split()[0]}, median of {RUNS} (slowest) in s; goal for --help: {GOAL_S} s")
    for line in LINES:
        times = [seconds(line) for _ in range(RUNS)]
        print(f"  ddplab {line:<46} {statistics.median(times):.3f}  ({max(times):.3f})")


if __name__ == "__main__":
    main()

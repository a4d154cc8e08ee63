"""DataParallel's traffic against the ring's: measured times over the closed forms, and a whole step of each scheme.

    python benchmarks/dp_vs_ddp.py                 # N = 2, 4, 8 hosts at 1 Gbit/s, 25.6 MB; takes about two minutes
    python benchmarks/dp_vs_ddp.py --steps         # `compare` on a paced ResNet-18, N = 1, 2, 4, 8

Star over ring should be N, and chain over ring N/(N - 1) once its pipe is full. Ranks run with real-time priority where
this user may (root), because emulated hosts share the cores of one machine.
"""

import argparse
import os

import pandas as pd

import ddplab as dl
from ddplab.results import provenance, save_results

SIZE_B = 25_600_000
ROOT = os.geteuid() == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", action="store_true", help="compare whole training steps")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of hosts")
    parser.add_argument("--runs", type=int, default=7, help="timed runs or steps of each")
    parser.add_argument("--save", metavar="FILE", help="record the table as JSON")
    args = parser.parse_args()
    table = steps(args.ranks or [1, 2, 4, 8], args.runs) if args.steps else traffic(args.ranks or [2, 4, 8], args.runs)
    print("; ".join(f"{key} {value}" for key, value in provenance().items()))
    print(table.to_string(index=False, float_format="{:.3f}".format))
    if args.save:
        save_results(args.save, table, link="1gbit", script="benchmarks/dp_vs_ddp.py --save FILE")


def traffic(numbers: list[int], runs: int) -> pd.DataFrame:
    """One row a number of hosts: medians of ring, star and chain, and their ratios to theory."""
    rows = []
    for n in numbers:
        with dl.Hosts(n, link="1gbit") as hosts:
            frame = dl.bench(
                algorithms=["ring", "star", "chain"], hosts=hosts, sizes=[SIZE_B], iters=runs, realtime=ROOT
            ).set_index("algorithm")
        ring, star, chain = (frame.time_us[name] / 1e3 for name in ("ring", "star", "chain"))
        load = dl.predict(dl.star(n), SIZE_B, dl.Topology(n, link=dl.Link.parse("1gbit")))
        rows.append(
            {
                "hosts": n,
                "ring_ms": ring,
                "star_ms": star,
                "chain_ms": chain,
                "star_over_ring": star / ring,
                "that_over_N": star / ring / n,
                "chain_over_ring": chain / ring,
                "that_over_N/(N-1)": chain / ring / (n / (n - 1)),
                "star_busiest_over_mean": load.busiest_over_mean,
            }
        )
    return pd.DataFrame(rows)


def steps(numbers: list[int], runs: int) -> pd.DataFrame:
    """`compare` for each number of hosts, below one another."""
    frames = []
    for n in numbers:
        with dl.Hosts(n, link="1gbit") as hosts:
            frames.append(dl.compare("resnet18", hosts=hosts, steps=runs, realtime=ROOT))
    return pd.concat(frames, ignore_index=True)


if __name__ == "__main__":
    main()

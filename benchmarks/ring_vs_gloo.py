"""Is our ring, in Python over send and receive, as fast as gloo's own all-reduce in C++? On links and on loopback.

    python benchmarks/ring_vs_gloo.py [--runs 15]

Expected: at most 1.03 times gloo's time on four emulated 1 Gbit/s hosts at 25.6 MB, at most 1.10 on loopback with four
ranks at 102.4 MB. On links the wire is the limit, and ours waits at the end of each step until the last segment is
summed. On loopback the limit is the CPU: both cores are busy, every byte goes into the kernel and out of it again, and
each message wakes a thread at both ends.
"""

from __future__ import annotations

import argparse
import os

import pandas as pd

import ddplab as dl


def ratio(frame: pd.DataFrame) -> float:
    """Median time of the ring over that of the backend."""
    times = frame.set_index("algorithm")["time_us"]
    return times["ring"] / times["backend"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15, help="timed runs of each (default 15)")
    runs = parser.parse_args().runs
    realtime = os.geteuid() == 0  # ranks before everything else on the machine
    print(f"ranks scheduled in real time: {realtime}\n")
    with dl.Hosts(4, link="1gbit") as hosts:
        on_links = dl.bench(
            algorithms=["ring", "backend"], sizes="25.6MB", hosts=hosts, iters=runs, warmup=2, realtime=realtime
        )
    payload = 2 * 3 / 4 * 25.6e6
    counted = on_links.set_index("algorithm")["sent_B"]["ring"]
    print(f"\nring over gloo, 4 hosts, 25.6 MB: {ratio(on_links):.3f}")
    print(f"bytes counted by the kernel over 2 (N - 1) / N of the buffer: {counted / payload:.4f}\n")
    on_loopback = dl.bench(
        algorithms=["ring", "backend"], ranks=4, sizes="102.4MB", iters=runs, warmup=2, device="cpu", realtime=realtime
    )
    print(f"\nring over gloo, loopback, 4 ranks, 102.4 MB: {ratio(on_loopback):.3f}")


if __name__ == "__main__":
    main()

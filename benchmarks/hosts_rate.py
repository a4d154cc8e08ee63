"""Whether an emulated link is as fast as it says: one host sends to another, the receiver's clock and the kernel count.

    python benchmarks/hosts_rate.py [--links 100mbit 1gbit] [--seconds 1.0] [--runs 5]

Both directions are busy at once (full duplex). Prints payload bytes a second over `Link.payload_Bps`, and bytes that
the kernel counted over payload.
"""

from __future__ import annotations

import argparse
import statistics
import time

from ddplab.hosts import Hosts, link_bytes
from ddplab.launch import launch


def exchange(nbytes: int, runs: int) -> tuple[list[float], float]:
    """Seconds of each swap of `nbytes` between ranks 0 and 1, and kernel-counted bytes sent over payload."""
    import torch
    import torch.distributed as dist

    peer = 1 - dist.get_rank()
    data, room = torch.ones(nbytes // 4), torch.empty(nbytes // 4)

    def swap() -> None:
        for work in [dist.irecv(room, peer), dist.isend(data, peer)]:
            work.wait()

    swap()
    before, seconds = link_bytes(), []
    for _ in range(runs):
        dist.barrier()
        start = time.perf_counter()
        swap()
        seconds.append(time.perf_counter() - start)
    return seconds, (link_bytes().sent - before.sent) / (runs * nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--seconds", type=float, default=1.0, help="how long one transfer should take")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    print(f"{'link':>8} {'payload MB':>11} {'median s':>9} {'rate / said':>12} {'kernel / payload':>17}   measured")
    for link in args.links:
        start = time.perf_counter()
        with Hosts(2, link) as hosts:
            up = time.perf_counter() - start
            nbytes = int(hosts.link.payload_Bps * args.seconds) // 4 * 4
            results = launch(exchange, nbytes, args.runs, hosts=hosts, timeout=60 + 3 * args.runs * args.seconds)
        seconds = statistics.median(time for times, _ in results for time in times)
        counted = statistics.mean(ratio for _, ratio in results)
        rate = nbytes / seconds / hosts.link.payload_Bps
        print(f"{link:>8} {nbytes / 1e6:>11.1f} {seconds:>9.3f} {rate:>12.3f} {counted:>17.4f}   up in {up:.2f} s")


if __name__ == "__main__":
    main()

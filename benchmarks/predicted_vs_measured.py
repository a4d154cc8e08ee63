"""Is the sum-of-steps model right? Every schedule on emulated 1 Gbit/s links, measured, over what `predict` says.

    python benchmarks/predicted_vs_measured.py [--mb 25.6] [--runs 9] [--link 1gbit] [--hosts 4 8]

Expected at 25.6 MB: between 0.97 and 1.06 with four hosts, between 0.95 and 1.10 with eight. The ring's bytes, counted
by the kernel on each host's link, are 2 (N - 1) / N of the buffer, plus the headers of TCP and Ethernet.
"""

from __future__ import annotations

import argparse
import os

import ddplab as dl

ALGORITHMS = ("ring", "star", "chain", "direct", "tree", "halving_doubling")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=25.6, help="size in MB of 10^6 bytes (default 25.6)")
    parser.add_argument("--runs", type=int, default=9, help="timed runs of each schedule (default 9)")
    parser.add_argument("--link", default="1gbit", help="of each host (default 1gbit)")
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8], help="numbers of hosts (default 4 8)")
    options = parser.parse_args()
    nbytes = round(options.mb * 1e6)
    realtime = os.geteuid() == 0  # ranks before everything else on the machine: 8 on 2 cores must send on time
    print(f"ranks scheduled in real time: {realtime}\n")
    for n in options.hosts:
        with dl.Hosts(n, link=options.link) as hosts:
            frame = dl.bench(
                "all_reduce", ALGORITHMS, sizes=[nbytes], hosts=hosts, iters=options.runs, realtime=realtime
            )
            print(
                f"\n{'N':>2} {'schedule':>17} {'model ms':>9} {'measured ms':>12} {'ratio':>6} {'p25':>6} {'p75':>6}"
                f" {'model MB':>9} {'kernel MB':>10} {'ratio':>6}"
            )
            for row in frame.itertuples():
                schedule = getattr(dl, row.algorithm)(n)
                said = dl.predict(schedule, row.size_B, hosts)
                low, mid, high = (us / said.seconds / 1e6 for us in (row.time_p25_us, row.time_us, row.time_p75_us))
                busiest = max(said.bytes_sent)
                print(
                    f"{n:>2} {row.algorithm:>17} {said.seconds * 1e3:>9.1f} {row.time_us / 1e3:>12.1f} {mid:>6.3f} "
                    f"{low:>6.3f} {high:>6.3f} {busiest / 1e6:>9.2f} {row.sent_B / 1e6:>10.2f} "
                    f"{row.sent_B / busiest:>6.4f}"
                )
            print()


if __name__ == "__main__":
    main()

"""A warm `launch` against `torchrun`: the same four gloo ranks, the same one all-reduce, start to end, side by side.

    python benchmarks/launch_vs_torchrun.py [--ranks 4] [--repeat 5]

Prints the median and the range of each, their ratio, and every socket that the ranks of a launch listen on.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ddplab.launch import launch

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
assert t.item() == dist.get_world_size()
dist.destroy_process_group()
"""


def all_reduce_once() -> float:
    import torch
    import torch.distributed as dist

    t = torch.ones(1)
    dist.all_reduce(t)
    return t.item()


def listeners() -> set[tuple[str, str]]:
    """(table, address) of each socket in the LISTEN state that this rank holds, from the kernel's tables."""
    all_reduce_once()
    own = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(fd))
        except OSError:
            continue
    found = set()
    for table, family, words in (("tcp", socket.AF_INET, 1), ("tcp6", socket.AF_INET6, 4)):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                digits = fields[1].partition(":")[0]
                packed = b"".join(int(digits[8 * i : 8 * i + 8], 16).to_bytes(4, sys.byteorder) for i in range(words))
                found.add((table, socket.inet_ntop(family, packed)))
    return found


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "job.py")
        script.write_text(SCRIPT)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", port, str(script)]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        cold = timed(lambda: launch(all_reduce_once, ranks=args.ranks))
        times: dict[str, list[float]] = {"launch, warm": [], "torchrun": []}
        for _ in range(args.repeat):  # interleaved, so that a disturbance meets both
            times["launch, warm"].append(timed(lambda: launch(all_reduce_once, ranks=args.ranks)))
            times["torchrun"].append(timed(lambda: subprocess.run(torchrun, env=env, check=True)))
    print(f"{args.ranks} gloo ranks, one all-reduce of 4 bytes, start to end, {args.repeat} runs each, measured")
    print(f"  launch, cold   {cold:7.3f} s  (starts the fork server and loads torch, once a session)")
    for name, values in times.items():
        low, high = min(values), max(values)
        print(f"  {name:<14} {statistics.median(values):7.3f} s  ({low:.3f} to {high:.3f})")
    ratio = statistics.median(times["torchrun"]) / statistics.median(times["launch, warm"])
    print(f"  torchrun / launch = {ratio:.1f}")
    sockets = set().union(*launch(listeners, ranks=args.ranks))
    print(f"  listening sockets of the ranks: {', '.join(f'{table} {address}' for table, address in sorted(sockets))}")


if __name__ == "__main__":
    main()

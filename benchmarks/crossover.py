"""From which link speed down does each hook pay? Predicted from its costs without a link, then measured on links.

    python benchmarks/crossover.py --record      (about two minutes; writes labs/results/crossover.json)
    python benchmarks/crossover.py --report

One bucket of 25.6 MB of gradients goes through each hook, on 4 ranks, with no computing beside it. First over this
machine's loopback: what that takes are the hook's costs, encoding in the hook call, the rest until its future is
complete. With them the crossover is predicted. Then on emulated hosts whose links have 0.1 to 3 Gbit/s, hook after
hook in turn, so that a noisy minute meets all of them. Needs root, for the hosts and the ranks' priority.

Expected: the speed-up over torch's all-reduce lies within 15% of the predicted one on links up to 1 Gbit/s, within 25%
on 3 Gbit/s, where moving bytes keeps these two cores busy; and every hook wins and loses where it is predicted to.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import ddplab as dl
from ddplab.crossover import FP32, FREE

RESULTS = Path(__file__).parents[1] / "labs" / "results" / "crossover.json"
RANKS, NBYTES = 4, 25_600_000
LINKS = ("100mbit", "300mbit", "1gbit", "3gbit")
BASIS = "one bucket of 25.6 MB through each hook, 4 ranks on emulated hosts; speed-up over torch's allreduce_hook"
TIMES = "medians of the passes: when the last rank's hook call was over, and when the last rank had the mean"
METHODS = {one.name: one for one in FREE}


def passes(nbytes: int, repeats: int) -> dict[str, np.ndarray]:
    """Inside a rank: for each method (repeats, 2) seconds: the hook call, and from there to the mean."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from ddplab._buckets import Bucket

    parameter = torch.nn.Parameter(torch.zeros(nbytes // 4))
    bucket, source = Bucket([parameter], 0, True), torch.randn(nbytes // 4)
    hooks = {
        "fp32": (None, default_hooks.allreduce_hook),
        "fp16": dl.fp16(),
        "int8": dl.int8(),
        "1-bit": dl.onebit(),
        "top-k 1%": dl.topk(0.01),
    }
    seen: dict[str, list] = {name: [] for name in hooks}
    for _ in range(repeats + 1):  # the first pass allocates
        for name, (state, hook) in hooks.items():
            bucket.buffer().copy_(source)
            dist.barrier()
            start = time.perf_counter()
            future = hook(state, bucket)
            called = time.perf_counter()
            future.wait()
            seen[name].append((called - start, time.perf_counter() - called))
    for state, _ in hooks.values():
        if state is not None:
            state.close()
    return {name: np.array(times[1:]) for name, times in seen.items()}


def middle(seen: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """For each method (hook call, rest): until the last rank's call is over, then until the last one has the mean.

    Medians of the passes. A rank whose call ends early waits in its rest for the others: the slowest rank's of both
    would count that time twice.
    """
    ends = {
        name: np.median(np.max([np.cumsum(one[name], axis=-1) for one in seen], axis=0), axis=0) for name in seen[0]
    }
    return {name: np.diff(times, prepend=0.0) for name, times in ends.items()}


def calibrated(repeats: int) -> list[dl.Compressor]:
    """Every method with the costs that it has here without a link, all ranks at once."""
    seen = middle(dl.launch(passes, NBYTES, repeats, ranks=RANKS, device="cpu", realtime=True))
    for name, (call, rest) in seen.items():
        print(f"{name:>9}: hook call {call * 1e3:6.1f} ms, rest {rest * 1e3:6.1f} ms without a link", flush=True)
    return [priced(METHODS[name], call, rest, seen["fp32"][1]) for name, (call, rest) in seen.items()]


def priced(one: dl.Compressor, call: float, rest: float, fp32_rest: float) -> dl.Compressor:
    """`one` with its costs. Seconds: of the hook call, from there to the mean, and the latter for fp32.

    fp32 decodes nothing: its rest is what moving and adding bytes takes without a link. On a link slower than that it
    hides behind the transfer, so everybody's rest is taken without its own share of it, by bytes sent.
    """
    moving = fp32_rest * one.bytes_sent(RANKS, NBYTES) / FP32.bytes_sent(RANKS, NBYTES)
    encode = call / NBYTES
    # `Compressor.beside_s` solved for what one decoding costs
    times = {"ring": 1, "two-phase": 2, "all-gather": RANKS}[one.routing]
    again = encode / RANKS * (one.routing == "two-phase")
    return dl.Compressor(
        one.name, one.factor, one.routing, encode, max(0.0, ((rest - moving) / NBYTES - again) / times)
    )


def measure(link: str, x: dl.Crossover, repeats: int) -> list[dict[str, Any]]:
    """One row a method on this link."""
    with dl.Hosts(RANKS, link=link) as hosts:
        seconds = {
            name: times.sum()
            for name, times in middle(dl.launch(passes, NBYTES, repeats, hosts=hosts, realtime=True)).items()
        }
    rate = dl.Link.parse(link).rate_Bps
    return [
        {
            "compressor": one.name,
            "rate_Gbps": rate * 8 / 1e9,
            "measured_ms": seconds[one.name] * 1e3,
            "predicted_ms": x.seconds(one, rate) * 1e3,
            "speedup": seconds["fp32"] / seconds[one.name],
            "predicted_speedup": x.speedup(one, rate),
        }
        for one in x.compressors
    ]


def report(frame: pd.DataFrame, about: dict[str, Any]) -> None:
    """The table, and how far off the prediction is."""
    compressors = [dl.Compressor(*one) for one in json.loads(about["compressors"])]
    x = dl.crossover(compressors, RANKS, NBYTES, baseline=compressors[0])
    print(
        x.frame()[["compressor", "sent_MB", "encode_ms", "beside_ms", "crossover_Gbps"]].round(2).to_string(index=False)
    )
    print(frame.round(3).to_string(index=False))
    error = (frame.predicted_speedup / frame.speedup - 1)[frame.compressor != FP32.name]
    for rate, values in error.groupby(frame.rate_Gbps):
        print(f"{rate:g} Gbit/s: predicted over measured speed-up, worst {values.abs().max():.1%}")
    hooks = frame[frame.compressor != FP32.name]
    right = ((hooks.speedup > 1) == (hooks.predicted_speedup > 1)).sum()
    print(f"{right} of {len(hooks)} points lie on the predicted side of 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="measure, and write labs/results/crossover.json")
    parser.add_argument("--report", action="store_true", help="only print what has been recorded")
    parser.add_argument("--repeats", type=int, default=5, help="passes of every hook on every link (default 5)")
    options = parser.parse_args()
    if not options.record and not options.report:
        parser.error("say --record or --report")
    if options.record:
        compressors = calibrated(options.repeats)
        x = dl.crossover(compressors, RANKS, NBYTES, baseline=compressors[0])
        rows = []
        for link in LINKS:
            rows += measure(link, x, options.repeats)
            print(f"{link} is measured", flush=True)
        costs = json.dumps(
            [[c.name, c.factor, c.routing, c.encode_s_per_byte, c.decode_s_per_byte] for c in compressors]
        )
        about = {"basis": BASIS, "times": TIMES, "script": "benchmarks/crossover.py", "ranks": RANKS, "nbytes": NBYTES}
        dl.save_results(RESULTS, pd.DataFrame(rows), **about, compressors=costs)
    report(*dl.load_results(RESULTS))


if __name__ == "__main__":
    main()

"""What does a 1-bit step cost the processor, against the two casts of torch's fp16 hook?

    python benchmarks/onebit_cost.py [--values 25600000] [--ranks 4] [--runs 9] [--record]

One thread, no network: this process is one rank of N and hears its own bytes N times. Interleaved runs; medians of the
ratios. Expected: encode plus decode at most 1.8 times the casts, the whole two-phase step (encode with the residual,
decode N shards and average them, encode the mean with the server's residual, decode the result) at most 3.0 times.
Two clocks: the wall's, and the thread's own processor time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

import ddplab as dl
from ddplab.hooks.codec import Codec
from ddplab.hooks.wire import Wire

RESULT = Path(__file__).parents[1] / "labs/results/onebit_cost.json"


class Echo(Wire):
    """A group of `size` ranks of which this process plays one; every other rank sends what it sends."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.bytes = 0, size, 0

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(self.size, -1)


def tasks(codec: Codec, values: int, ranks: int) -> dict[str, Callable[[], object]]:
    """The parts of a step, as functions to be timed."""
    two = dl.TwoPhase(codec, Echo(ranks))
    torch.manual_seed(0)
    gradient = torch.randn(values)
    out = torch.empty(values)
    old, new = torch.zeros(values), torch.zeros(values)
    server = torch.zeros(two.shard(values).stop), torch.zeros(two.shard(values).stop)
    rows, _ = two.encode(gradient, old, new)
    data = torch.empty(codec.nbytes(values), dtype=torch.uint8)
    codec.encode(gradient, data, old, new)

    def casts() -> None:  # what torch's fp16_compress_hook does around its all-reduce
        out.copy_(gradient.to(torch.float16).div_(ranks))

    def step() -> None:
        two.exchange(two.encode(gradient, old, new)[0], out, *server)

    return {
        "casts": casts,
        "encode": lambda: two.encode(gradient, old, new),
        "decode": lambda: codec.decode(data, out),
        "exchange": lambda: two.exchange(rows, out, *server),
        "step": step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=25_600_000, help="gradient elements (default 25.6 million)")
    parser.add_argument("--ranks", type=int, default=4, help="N (default 4)")
    parser.add_argument("--runs", type=int, default=9, help="timed runs of each part (default 9)")
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, codec in {"1-bit": dl.SignCodec(), "int8": dl.Int8Codec()}.items():
        parts = tasks(codec, args.values, args.ranks)
        seen: dict[str, list[tuple[float, float]]] = {part: [] for part in parts}
        for _ in range(args.runs + 1):
            for part, run in parts.items():
                wall, own = time.perf_counter(), time.thread_time()
                run()
                seen[part].append((time.perf_counter() - wall, time.thread_time() - own))
        for clock, at in (("wall", 0), ("processor", 1)):
            ms = {part: [1e3 * t[at] for t in times[1:]] for part, times in seen.items()}
            runs = list(zip(*ms.values(), strict=True))
            codec_ratio = statistics.median((encode + decode) / casts for casts, encode, decode, _, _ in runs)
            step_ratio = statistics.median(step / casts for casts, _, _, _, step in runs)
            medians = {f"{part}_ms": statistics.median(times) for part, times in ms.items()}
            ratios = {"encode_decode_over_casts": codec_ratio, "step_over_casts": step_ratio}
            rows.append({"codec": name, "clock": clock, **medians, **ratios})
    frame = pd.DataFrame(rows)
    print(frame.round(2).to_string(index=False))
    if args.record:
        dl.save_results(RESULT, frame, values=args.values, ranks=args.ranks, runs=args.runs, kind="measured")


if __name__ == "__main__":
    main()

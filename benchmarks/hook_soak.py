"""Do communication hooks hang, abort, or part the ranks? Many steps with random delays everywhere.

    python benchmarks/hook_soak.py [--runs 10] [--steps 50] [--methods onebit ...]

Each run: 4 ranks train with every hook, with and without `find_unused_parameters`, in at least 6 buckets, while
backward and the communication lane of each rank sleep for random times. Expected: no hang, no abort, and after each
training the same bits on all ranks. (Hooks whose collectives start in callbacks fail here within a few steps.)
"""

from __future__ import annotations

import argparse
import random
import time

import torch
import torch.distributed as dist
from torch import nn

import ddplab as dl

METHODS = ("fp16", "bf16", "onebit", "int8", "topk", "randomk", "powersgd")
LONGEST_S = 0.004


def train(method: str, unused: bool, steps: int, seed: int) -> tuple[bool, int]:
    """On one rank: (the parameters are those of every rank, buckets)."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [layer for _ in range(7) for layer in (nn.Linear(24, 24), nn.Tanh())]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1e-3, find_unused_parameters=unused)
    state, hook = getattr(dl, method)()
    dice = random.Random(1000 * seed + dist.get_rank())
    indices = set()

    def watching(state, bucket):
        indices.add(bucket.index())
        return hook(state, bucket)

    exchange = state.exchange

    def late(work):
        time.sleep(dice.random() * LONGEST_S)
        return exchange(work)

    state.exchange = late
    ddp.register_comm_hook(state, watching)
    for p in ddp.parameters():
        p.register_hook(lambda grad: time.sleep(dice.random() * LONGEST_S / 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        (ddp(torch.randn(4, 24, generator=generator)).sin() ** 2).mean().backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()]).view(torch.int32)
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    state.close()
    return all(torch.equal(flat, row) for row in rows), len(indices)


def one_run(methods: list[str], steps: int, seed: int) -> dict[tuple[str, bool], tuple[bool, int]]:
    return {(m, unused): train(m, unused, steps, seed) for m in methods for unused in (False, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="runs in a row (default 10)")
    parser.add_argument("--steps", type=int, default=50, help="steps of each training (default 50)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="which hooks (default all)")
    args = parser.parse_args()
    bad = 0
    for run in range(args.runs):
        started = time.perf_counter()
        ranks = dl.launch(one_run, list(args.methods), args.steps, run, ranks=4, device="cpu", timeout=900, show=False)
        parted = [key for key in ranks[0] if not all(found[key][0] for found in ranks)]
        fewest = min(found[key][1] for found in ranks for key in found)
        bad += bool(parted) or fewest < 6
        print(
            f"run {run + 1}: {len(ranks[0])} trainings of {args.steps} steps, at least {fewest} buckets, "
            f"parted {parted or 'none'}, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    print(f"{args.runs - bad} of {args.runs} runs without a hang, an abort or a difference")


if __name__ == "__main__":
    main()

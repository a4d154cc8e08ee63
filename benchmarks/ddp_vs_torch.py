"""BucketedDDP against torch's DDP and against FlatDDP: ResNet-18 on four emulated hosts at 1 Gbit/s.

    python benchmarks/ddp_vs_torch.py [--steps 12] [--only measured|paced]

Expected: the same number of collectives and the same bytes as torch's DDP, and at most 1.05 times its step time, with
real compute and with paced compute where communication takes 0.8 of the compute time; there BucketedDDP is at least
1.4 times faster than FlatDDP. All contestants run in the same ranks and take turns step by step, so that whatever
else happens on the machine hits all of them. A step is timed on its own: a barrier, forward, backward, gradients
reduced; and it lasts as long as its slowest rank. Ratios are medians over the ratios of neighbouring steps.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddplab as dl

RATE_BPS = 1e9 / 8 * 1448 / 1514  # payload on a 1 Gbit/s link, in bytes per second
COMMUNICATION_SHARE = 0.8  # of the compute time, in the paced run


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18()


def real() -> tuple[Callable[[], nn.Module], torch.Tensor]:
    return resnet18, torch.randn(2, 3, 64, 64)


def recorded() -> dl.Profile:
    """When each gradient of ResNet-18 is ready, on images of the usual size, on one core of this machine."""
    return dl.record(resnet18(), torch.randn(4, 3, 224, 224), repeats=5)


def paced(profile: dl.Profile) -> tuple[Callable[[], nn.Module], torch.Tensor]:
    """The recording, slowed down or sped up until the ring's 2 (N - 1) / N of the bytes take 0.8 of the compute."""
    n = dist.get_world_size()
    compute_s = 2 * (n - 1) / n * profile.nbytes / RATE_BPS / COMMUNICATION_SHARE
    return lambda: dl.paced(profile.scaled(compute_s / profile.compute_s)), torch.ones(1)


def contest(setup: Callable[..., Any], arguments: tuple, steps: int, cap: float | None) -> pd.DataFrame:
    """One row per contestant and step, measured on this rank."""
    make, x = setup(*arguments)
    contestants = {
        "torch DDP": DistributedDataParallel(make(), bucket_cap_mb=cap),
        "BucketedDDP": dl.BucketedDDP(make(), bucket_cap_mb=cap),
        "FlatDDP": dl.FlatDDP(make()),
    }
    count = dist.group.WORLD._get_sequence_number_for_group
    rows = []
    for step in range(-3, steps):  # the first three warm up: buckets are rebuilt there
        names = list(contestants)
        for name in names[step % 3 :] + names[: step % 3]:
            ddp = contestants[name]
            ddp.zero_grad()
            dist.barrier()
            sent, collectives, start = dl.link_bytes().sent, count(), time.perf_counter()
            ddp(x).sum().backward()
            if name == "FlatDDP":
                ddp.finish()
            seconds = time.perf_counter() - start
            rows.append((name, step, seconds, dl.link_bytes().sent - sent, count() - collectives))
    frame = pd.DataFrame(rows, columns=["contestant", "step", "seconds", "sent_B", "collectives"])
    return frame[frame.step >= 0]


def report(title: str, ranks: list[pd.DataFrame]) -> None:
    table = pd.concat(ranks, keys=range(len(ranks)), names=["rank"])
    slowest = table.groupby(["contestant", "step"])["seconds"].max().unstack("contestant")
    summary = pd.DataFrame(
        {
            "step_ms": slowest.median() * 1e3,
            "fastest_ms": slowest.min() * 1e3,
            "slowest_ms": slowest.max() * 1e3,
            "collectives": table.groupby("contestant")["collectives"].median(),
            "sent_MB": table.groupby("contestant")["sent_B"].median() / 1e6,
        }
    )
    print(f"\n{title}\n{summary.round(2).to_string()}")
    for ours, theirs in (("BucketedDDP", "torch DDP"), ("FlatDDP", "BucketedDDP")):
        print(f"step time of {ours} over {theirs}: {(slowest[ours] / slowest[theirs]).median():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each contestant (default 12)")
    parser.add_argument("--only", choices=["measured", "paced"], help="one of the two runs")
    options = parser.parse_args()
    with dl.Hosts(4, link="1gbit") as hosts:
        if options.only != "paced":
            ranks = dl.launch(contest, real, (), options.steps, None, hosts=hosts, timeout=300)
            report("measured: real compute, 2 images of 64 x 64 a rank, buckets of 1 and 25 MiB", ranks)
        if options.only != "measured":
            profile = dl.launch(recorded, ranks=1)[0]
            print(f"\nrecorded: {profile}")
            realtime = os.geteuid() == 0  # ranks before everything else on the machine
            ranks = dl.launch(contest, paced, (profile,), options.steps, 5, hosts=hosts, timeout=300, realtime=realtime)
            report("paced: communication takes 0.8 of compute, buckets of 5 MiB", ranks)


if __name__ == "__main__":
    main()

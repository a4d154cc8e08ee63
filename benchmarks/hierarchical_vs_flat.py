"""Hierarchical all-reduce against a flat ring, on emulated hosts that several ranks share.

    python benchmarks/hierarchical_vs_flat.py [--runs 7]      the acceptance: 2 x 4 ranks, 100 Mbit/s, 25.6 MB
    python benchmarks/hierarchical_vs_flat.py --record        this and other shapes and links, to labs/results

Five contestants, in the same ranks and taking turns: the flat ring (rank = host * g + local, so it crosses into a host
once and out of it once), gloo's own all-reduce, the hierarchical schedule step by step, `hierarchical_all_reduce` on
the groups of a mesh, which overlaps its phases, and what one would compose from gloo's own collectives. A run lasts as
long as its slowest rank; a ratio is the median over the ratios to the flat ring's run of the same round. Bytes are the
kernel's count on the link of the host that sent most, with about 0.2% of headers in them.

Expected on 2 x 4 at 100 Mbit/s: `groups` at least 1.65 times faster than the flat ring (1.75 in theory), 1.0 S leaves
each host against 1.75 S.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ddplab as dl

RESULTS = Path(__file__).parents[1] / "labs" / "results" / "hierarchical_vs_flat.json"
ACCEPTANCE = (2, 4, "100mbit", 25_600_000)  # hosts, ranks on each, link, bytes
OTHERS = [
    (2, 4, "1gbit", 25_600_000),
    (2, 3, "100mbit", 6_400_000),
    (2, 2, "100mbit", 6_400_000),
    (2, 1, "100mbit", 6_400_000),
    (3, 2, "100mbit", 6_400_000),
    (4, 2, "100mbit", 6_400_000),
]
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def contestants(k: int, g: int) -> dict[str, Callable[[torch.Tensor], object]]:
    mesh = init_device_mesh("cpu", (k, g), mesh_dim_names=("inter", "intra"))
    intra, inter = mesh.get_group("intra"), mesh.get_group("inter")
    ring, levels = dl.ring(k * g), dl.hierarchical(k, g)

    def composed(tensor: torch.Tensor) -> None:
        block = tensor.new_empty(tensor.numel() // g)
        _scatter(block, tensor, group=intra)
        dist.all_reduce(block, group=inter)
        _gather(tensor, block, group=intra)

    return {
        "ring": lambda t: dl.all_reduce(t, ring, check=False),
        "backend": dist.all_reduce,
        "schedule": lambda t: dl.all_reduce(t, levels, check=False),
        "groups": lambda t: dl.hierarchical_all_reduce(t, mesh, check=False),
        "composed": composed,
    }


def contest(k: int, g: int, nbytes: int, runs: int) -> pd.DataFrame:
    """In a rank: one row per contestant and run: seconds, bytes counted on this host's link, largest error."""
    ways, rows = contestants(k, g), []
    names = list(ways)
    source = torch.randn(nbytes // 4 // g * g)  # seeded by rank; gloo's reduce-scatter wants whole blocks
    expected = source.clone()
    dist.all_reduce(expected)
    for run in range(-1, runs):
        for turn in range(len(names)):
            name = names[(turn + run) % len(names)]
            tensor = source.clone()
            before = dl.link_bytes().sent
            dist.barrier()
            start = time.perf_counter()
            ways[name](tensor)
            seconds = time.perf_counter() - start
            dist.barrier()
            sent = dl.link_bytes().sent - before
            apart = float(((tensor - expected).abs() / expected.abs().clamp(min=1)).max())
            if run >= 0:
                rows.append((name, run, seconds, sent, apart))
    return pd.DataFrame(rows, columns=["algorithm", "run", "seconds", "sent_B", "error"])


def measure(k: int, g: int, link: str, nbytes: int, runs: int) -> pd.DataFrame:
    """One row per contestant: time, ratio to the flat ring, bytes, and what the model says of the two schedules."""
    with dl.Hosts(k, link=link, ranks_per_host=g) as hosts:
        realtime = os.geteuid() == 0  # ranks before everything else on the machine
        ranks = dl.launch(contest, k, g, nbytes, runs, hosts=hosts, timeout=500, realtime=realtime, show=False)
        priced = {"ring": dl.predict(dl.ring(k * g), nbytes, hosts)}
        priced["schedule"] = priced["groups"] = dl.predict(dl.hierarchical(k, g), nbytes, hosts)
    slowest = pd.concat(ranks).groupby(["algorithm", "run"])[["seconds", "sent_B", "error"]].max()
    seconds = slowest["seconds"].unstack("algorithm")
    gains = seconds[["ring"]].to_numpy() / seconds
    return pd.DataFrame(
        {
            "hosts": k,
            "ranks_per_host": g,
            "link": link,
            "size_B": nbytes,
            "algorithm": name,
            "time_s": seconds[name].median(),
            "predicted_s": priced[name].seconds if name in priced else None,
            "gain": gains[name].median(),
            "gain_min": gains[name].min(),
            "gain_max": gains[name].max(),
            "sent_over_S": slowest["sent_B"].unstack("algorithm")[name].median() / nbytes,
            "error": slowest["error"].unstack("algorithm")[name].max(),
        }
        for name in ("ring", "backend", "schedule", "groups", "composed")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="timed runs of each (default 7)")
    parser.add_argument("--record", action="store_true", help="measure the other shapes too, and keep the result")
    options = parser.parse_args()
    frames = []
    for k, g, link, nbytes in [ACCEPTANCE, *OTHERS] if options.record else [ACCEPTANCE]:
        frames.append(measure(k, g, link, nbytes, options.runs))
        print(f"\n{k} x {g} ranks, {link}, {nbytes / 1e6:.1f} MB")
        shown = frames[-1].drop(columns=["hosts", "ranks_per_host", "link", "size_B"])
        print(shown.to_string(index=False, float_format="{:.4g}".format))
        if options.record:  # after each, so that an interrupted run keeps what it has
            dl.save_results(
                RESULTS, pd.concat(frames), basis="emulated hosts", script="benchmarks/hierarchical_vs_flat.py --record"
            )
    first = frames[0].set_index("algorithm")
    print(f"\nhierarchical over flat ring, 2 x 4 at 100 Mbit/s: {first.gain['groups']:.3f} times faster (theory 1.75)")
    print(f"bytes that leave a host: {first.sent_over_S['groups']:.4f} S, flat {first.sent_over_S['ring']:.4f} S")
    print(f"largest difference to gloo's result: {first.error['groups']:.1e}, relative")


if __name__ == "__main__":
    main()

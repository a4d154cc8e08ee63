"""What DDP's options cost: collectives, bytes, gradient memory, copies and step time, each beside plain DDP.

    python benchmarks/ddp_options.py --part 1 ... 4     (a minute or two each; 3 and 4 need emulated hosts)
    python benchmarks/ddp_options.py --report

1  ResNet-18, real compute, 2 images of 64 x 64 a rank, on this machine's loopback: one rank a core, 4 at most. More of
   them would measure how the cores are shared out.
2  The same with 200 small layers, 400 parameters: what an option costs for each parameter rather than for each byte.
3  Paced: ResNet-18's parameters on four emulated hosts at 1 Gbit/s, communication takes 0.8 of the compute. The first
   iteration, and a model whose layers are defined in the opposite order of their use.
4  Compiled: four layers of 4 MiB on the same hosts, whose backward waits on the clock inside the compiled graph.

Counts come from one step under `ddplab.StepCounts`, times from other steps. All contestants live in the same ranks and
take turns in rounds, in random order. A step is timed on its own, after a barrier, and lasts as long as its slowest
rank. A ratio is the median over the ratios to plain DDP's step of the same round, with the quartiles. "defined
backwards" without an option is the control: the same step as plain DDP, by other names. Options that this torch lacks
are left out.
"""

from __future__ import annotations

import argparse
import inspect
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ddplab as dl

RESULTS = Path(__file__).parents[1] / "labs" / "results" / "ddp_options.json"
RATE_BPS = 1e9 / 8 * 1448 / 1514  # payload on a 1 Gbit/s link, in bytes per second
COMMUNICATION_SHARE = 0.8  # of the compute time, in part 3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_cap_mb_list": {"bucket_cap_mb_list": [1, 25]},
    "batched_grad_copy": {"batched_grad_copy": True},
}
KNOWN = inspect.signature(DistributedDataParallel).parameters
OPTIONS = {name: options for name, options in OPTIONS.items() if options.keys() <= KNOWN.keys()}
WARM_UP = 4  # buckets are rebuilt before the second step, with static_graph before the third

Contestants = dict[str, Callable[[], Any]]  # each builds a module that is wrapped, or wrapped and compiled


def with_each_option(model: Callable[[], nn.Module]) -> Contestants:
    return {name: lambda o=o: DistributedDataParallel(model(), **o) for name, o in OPTIONS.items()}


def resnet18() -> tuple[Contestants, torch.Tensor]:
    from torchvision.models import resnet18

    return with_each_option(resnet18), torch.rand(2, 3, 64, 64)


def small_layers() -> tuple[Contestants, torch.Tensor]:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(200)))

    return with_each_option(model), torch.rand(8, 32)


def paced() -> tuple[Contestants, torch.Tensor]:
    n = dist.get_world_size()
    profile = dl.assumed_profile("resnet18")
    compute_s = 2 * (n - 1) / n * profile.nbytes / RATE_BPS / COMMUNICATION_SHARE
    profile = profile.scaled(compute_s / profile.compute_s)
    last = len(profile.gradients) - 1
    backwards = dl.Profile(
        [g._replace(position=last - g.position) for g in profile.gradients], profile.forward_s, profile.backward_s
    )

    def ddp(played: dl.Profile, **options: Any) -> Callable[[], Any]:
        return lambda: DistributedDataParallel(dl.paced(played), bucket_cap_mb=5, **options)

    return {
        "plain": ddp(profile),
        "first iteration": ddp(profile),
        "find_unused_parameters": ddp(profile, find_unused_parameters=True),
        "defined backwards": ddp(backwards),
        "defined backwards, find_unused_parameters": ddp(backwards, find_unused_parameters=True),
    }, torch.ones(1)


def waiting_layers(seconds: float, log: list[str]) -> type[nn.Module]:
    """Four linear layers of 4 MiB. Before each one's backward an operator waits, which a compiler keeps in place."""

    def wait(g: torch.Tensor) -> torch.Tensor:
        log.append("layer")
        time.sleep(seconds)
        return g.clone()

    there = torch.library.custom_op("bench::there", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor")
    back = torch.library.custom_op("bench::back", wait, mutates_args=(), schema="(Tensor g) -> Tensor")
    there.register_fake(torch.empty_like)
    back.register_fake(torch.empty_like)
    there.register_autograd(lambda ctx, g: back(g))

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = there(layer(x))
            return x

    return Layers


def compiled(backend: str, log: list[str], graphs: Counter[str]) -> tuple[Contestants, torch.Tensor]:
    from torch._dynamo import config, lookup_backend

    layers, x = waiting_layers(0.04, log), torch.ones(2, 1024)

    def noted(state, bucket):  # no annotations: torch wants exactly its own there, and ours are text
        log.append("bucket")
        return default_hooks.allreduce_hook(state, bucket)

    def ddp() -> DistributedDataParallel:
        made = DistributedDataParallel(layers(), bucket_cap_mb=4)
        made.register_comm_hook(None, noted)
        return made

    def build(name: str, optimize: bool) -> torch.nn.Module:
        def counted(graph: Any, inputs: Any) -> Any:
            graphs[name] += 1
            return lookup_backend(backend)(graph, inputs)

        made = torch.compile(ddp(), backend=counted)
        with config.patch(optimize_ddp=optimize):
            made(x).sum().backward()  # compiled here
        return made

    whole = "compiled, optimize_ddp=False"
    return {
        "plain": ddp,
        "compiled": lambda: build("compiled", True),
        whole: lambda: build(whole, False),
    }, x


# Each part: its setting, what it needs, and how many steps are timed.
PARTS: dict[int, tuple[str, Callable[..., Any], int]] = {
    1: ("ResNet-18, real compute, {ranks} ranks on loopback", resnet18, 50),
    2: ("400 small parameters, real compute, {ranks} ranks on loopback", small_layers, 200),
    3: ("ResNet-18's parameters, paced, 4 hosts at 1 Gbit/s", paced, 9),
    4: ("4 layers of 4 MiB, paced, compiled by {backend}, 4 hosts at 1 Gbit/s", compiled, 15),
}


def step(ddp: Any, x: torch.Tensor) -> None:
    ddp.zero_grad()
    ddp(x).sum().backward()


def count(ddp: Any, x: torch.Tensor) -> dict[str, Any]:
    """Backward of the first iteration and of the last of the warm-up, counted."""
    found = []
    for _ in range(WARM_UP):
        ddp.zero_grad()
        loss = ddp(x).sum()
        with dl.StepCounts() as counts:
            loss.backward()
        found.append(counts)
    first, last = found[0], found[-1]
    return {
        "all_reduces_first": sum(c.name == "allreduce" for c in first.collectives),
        "all_reduces": sum(c.name == "allreduce" for c in last.collectives),
        "reduced_B": sum(c.nbytes for c in last.collectives if c.name == "allreduce"),
        "gradient_B": last.gradient_bytes(ddp),
        "copies": sum(last.copies.values()),
    }


def contest(setup: Callable[..., Any], arguments: tuple, steps: int) -> tuple[dict[str, dict], pd.DataFrame]:
    """In a rank: counts by contestant, and one row per contestant and timed step."""
    log: list[str] = []
    graphs: Counter[str] = Counter()
    compiles = setup.__name__ == "compiled"
    contestants, x = setup(*arguments, log, graphs) if compiles else setup(*arguments)
    made = {name: build() for name, build in contestants.items()}
    counts: dict[str, dict[str, Any]] = {}
    for name, ddp in made.items():
        if not compiles:  # a dispatch mode would keep the compiler out
            counts[name] = count(ddp, x)
            continue
        for _ in range(WARM_UP):
            log.clear()
            step(ddp, x)
        early = max(i for i, what in enumerate(log) if what == "layer")
        counts[name] = {"all_reduces": log.count("bucket"), "left_early": log[:early].count("bucket")}
    rows, chance = [], random.Random(0)  # the same order on all ranks, another one in each round
    for i in range(steps):
        for name in chance.sample(list(made), len(made)):
            ddp = contestants[name]() if name == "first iteration" else made[name]
            dist.barrier()
            start = time.perf_counter()
            step(ddp, x)
            rows.append((name, i, time.perf_counter() - start))
    for name, n in graphs.items():
        counts[name]["graphs"] = n  # read at the end: nothing was compiled again
    return counts, pd.DataFrame(rows, columns=["option", "step", "seconds"])


def summarise(setting: str, ranks: list[tuple[dict[str, dict], pd.DataFrame]]) -> pd.DataFrame:
    """One row per contestant: what was counted, the same on all ranks, and its time over that of plain DDP."""
    counts = ranks[0][0]
    for other, _ in ranks[1:]:
        assert other == counts, f"ranks counted differently: {counts} and {other}"
    table = pd.concat([times for _, times in ranks])
    slowest = table.groupby(["option", "step"])["seconds"].max().unstack("option")
    ratios = slowest.div(slowest["plain"], axis=0).quantile([0.25, 0.5, 0.75])
    return pd.DataFrame(
        {
            "setting": setting,
            "option": name,
            **counted,
            "step_ms": slowest[name].median() * 1e3,
            "ratio": ratios.loc[0.5, name],
            "ratio_p25": ratios.loc[0.25, name],
            "ratio_p75": ratios.loc[0.75, name],
        }
        for name, counted in counts.items()
    )


def measure(part: int, backend: str) -> pd.DataFrame:
    setting, setup, steps = PARTS[part]
    arguments = (backend,) if setup is compiled else ()
    with dl.Hosts(4, link="1gbit") if part > 2 else nullcontext() as hosts:
        realtime = hosts is not None and os.geteuid() == 0  # ranks before everything else on the machine
        how = {"hosts": hosts} if hosts else {"ranks": max(2, min(4, os.cpu_count() or 2))}
        ranks = dl.launch(
            contest, setup, arguments, steps, **how, device="cpu", timeout=300, realtime=realtime, show=False
        )
    return summarise(setting.format(ranks=len(ranks), backend=backend), ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, choices=PARTS, help="measure this part and merge it")
    parser.add_argument("--report", action="store_true", help="only print what has been measured")
    parser.add_argument("--backend", default="aot_eager", help="torch.compile's, in part 4 (default aot_eager)")
    options = parser.parse_args()
    if not options.report and not options.part:
        parser.error("say --part N or --report")
    known = dl.load_results(RESULTS)[0] if RESULTS.exists() else pd.DataFrame()
    if options.part:
        new = measure(options.part, options.backend)
        if len(known):
            known = known[known.setting != new.setting[0]]
        known = pd.concat([known, new]).sort_values("setting", kind="stable", ignore_index=True)
        dl.save_results(RESULTS, known, basis="torch's DDP over gloo", script="benchmarks/ddp_options.py")
    for setting, rows in known.groupby("setting", sort=False):
        print(f"\n{setting}\n{rows.drop(columns='setting').dropna(axis=1, how='all').round(3).to_string(index=False)}")


if __name__ == "__main__":
    main()

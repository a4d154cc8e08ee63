"""Cores of the labs on collectives: DataParallel's traffic (01), the ring (02), the backend (03), two levels (09)."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddplab.cores.job import Job, Row, at_least, at_most, equal, here, largest, leaving_bytes
from ddplab.execute import all_reduce
from ddplab.schedule import ring as ring_of

SCHEMES = ("dp_star", "dp_nccl", "ddp_no_overlap", "ddp")
STEPS, BATCH, LR = 3, 4, 0.01
RINGS = {"the article's": (+1, +1), "the textbooks'": (0, +1), "NCCL's": (-1, +1), "gloo's": (+1, -1)}
NUMEL = 1 << 20  # 4 MiB of float32
PERSONAL = ("IFNAME", "IB_HCA", "TOPO_FILE", "DEBUG_FILE")  # what may well differ from machine to machine


# -- lab 01 -----------------------------------------------------------------------------------------------------------


def dp_vs_ddp(job: Job) -> list[Row]:
    """Four ways to keep replicas equal train the same model on the same data: they must end where one process ends."""
    seen = job.launch(_four_schemes)
    rows = [at_most("4 schemes against one process", largest(one["apart"] for one in seen), 1e-10)]
    for name in SCHEMES:
        slowest = max(sorted(one[name])[len(one[name]) // 2] for one in seen)
        rows.append(Row(f"{name}: a step", f"{slowest * 1e3:.1f} ms"))
    return rows


class _Small(nn.Module):
    """Images to 10 logits, in float64, so that an order of addition is no difference."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.AvgPool2d(16), nn.Flatten(), nn.Linear(48, 12), nn.Tanh(), nn.Linear(12, 10)
        self.layers = nn.Sequential(*layers).double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images.double())


def _four_schemes() -> dict[str, Any]:
    """Inside a rank: seconds of each scheme's steps, and the largest distance from one process on all batches."""
    from ddplab.compare import _steps

    seen: dict[str, Any] = {}
    apart, whole = [], _one_process()
    for name in SCHEMES:
        out = _steps(name, _Small, BATCH, False, 0.0, None, STEPS - 1, 1)
        seen[name] = out["step_s"]
        apart += [abs(a - b) for a, b in zip(out["parameters"], whole, strict=True)]
    return {**seen, "apart": largest(apart)}


def _one_process() -> list[float]:
    """The sum of each parameter after training on the batches of all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _Small()
    batches = []
    for rank in range(dist.get_world_size()):
        seeded = torch.Generator().manual_seed(1 + rank)
        images = torch.randn(BATCH, 3, 64, 64, generator=seeded)
        batches.append((images, torch.randint(10, (BATCH,), generator=seeded)))
    images, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(images), labels)
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.data.sub_(LR * grad)
    return [float(p.detach().sum()) for p in model.parameters()]


# -- lab 02 -----------------------------------------------------------------------------------------------------------


def ring(job: Job) -> list[Row]:
    """Four rings that differ in who owns what, on real ranks; and gloo's own, which is one of them bit for bit."""
    seen = job.launch(_rings)
    rows = [equal(f"{name} ring: wrong elements", sum(one[name] for one in seen), 0) for name in RINGS]
    if job.backend == "gloo" and job.device == "cpu":
        rows.append(equal("ranks on which gloo's bits are our ring's", sum(one["same"] for one in seen), job.ranks))
    return rows


def _rings() -> dict[str, Any]:
    rank, n = dist.get_rank(), dist.get_world_size()
    place = torch.arange(1.0, 4100.0, dtype=torch.float64, device=here())  # 4099, a prime: no chunk is like the others
    seen: dict[str, Any] = {}
    for name, (first_chunk, direction) in RINGS.items():
        summed = all_reduce(place * (rank + 1), ring_of(n, first_chunk=first_chunk, direction=direction))
        seen[name] = int((summed != place * (n * (n + 1) // 2)).sum())
    mine = torch.randn(1024 * n, generator=torch.Generator().manual_seed(rank)).to(here())
    theirs = mine.clone()
    dist.all_reduce(theirs)
    seen["same"] = torch.equal(all_reduce(mine, ring_of(n, first_chunk=+1, direction=-1)), theirs)
    return seen


# -- lab 03 -----------------------------------------------------------------------------------------------------------


def nccl_knobs(job: Job) -> list[Row]:
    """The backend's all-reduce against our ring, in nccl-tests' measures; and the variables that steer it."""
    from ddplab._measure import measure

    counts, schedules = [1 << 14, NUMEL], [ring_of(job.ranks), None]
    seen = job.launch(measure, counts, schedules, "sum", "float32", 3, 1, True)
    rows = []
    for i, count in enumerate(counts):
        for a, name in enumerate(("ring", job.backend)):
            times = [one["times"][i][a] for one in seen]
            seconds = sorted(max(runs) for runs in zip(*(t.seconds for t in times), strict=True))[1]
            busbw = 4 * count / seconds * 2 * (job.ranks - 1) / job.ranks
            rows.append(Row(f"{name}, {4 * count >> 10} KiB: busbw", f"{busbw / 1e9:.3g} GB/s"))
            rows.append(equal(f"{name}, {4 * count >> 10} KiB: wrong elements", sum(t.wrong for t in times), 0))
    said = job.launch(_variables)
    others = sum(one["all"] != said[0]["all"] for one in said)
    rows.append(equal("ranks whose variables differ from rank 0's", others, 0))
    found = sorted({finding for one in said for finding in one["findings"]})
    rows += [Row("ddplab nccl check", finding) for finding in found]
    return rows


def _variables() -> dict[str, Any]:
    """Inside a rank: the variables of NCCL, gloo and torch that all machines should share, and what is wrong."""
    from ddplab.nccl.env import check_env

    ours = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))}
    shared = {k: v for k, v in ours.items() if not k.endswith(PERSONAL)}
    return {"all": shared, "findings": [str(finding) for finding in check_env(ours)]}


# -- lab 09 -----------------------------------------------------------------------------------------------------------


def hierarchical(job: Job) -> list[Row]:
    """A two-level all-reduce over the machines; on one machine over two halves of it, which play two."""
    several = len(job.hosts) > 1
    half = job.ranks // 2
    hosts = job.hosts if several else (tuple(range(half)), tuple(range(half, job.ranks)))
    seen = job.launch(_two_levels, None if several else hosts, several and job.counted)
    k, size = len(hosts), 4 * NUMEL
    rows = []
    if several:
        found = seen[0]["hosts"]
        sizes, said = ([str(n) for n in each] for each in (map(len, found), (seen[h[0]]["local"] for h in found)))
        rows.append(equal("ranks of each machine", " + ".join(sizes), " + ".join(said)))
    rows.append(equal("wrong elements", sum(one["wrong"] for one in seen), 0))
    even = len({len(host) for host in hosts}) == 1
    across, share = sum(one["across"] for one in seen) / k, 2 * (k - 1) / k * size
    if even:  # a block that its hosts do not divide costs some bytes more
        right = abs(across - share) < 64 * job.ranks
        rows.append(Row("sent to others by a host", f"{across / 1e6:.2f} MB", f"{share / 1e6:.2f} MB", right))
    if several and job.counted and even:
        flat = 2 * (job.ranks - 1) / job.ranks * size
        least, most = (pick(one["left"] for one in seen) / 1e6 for pick in (min, max))
        rows.append(at_least("the kernel's count, the least", least, share / 1e6, " MB"))
        if len(hosts[0]) > 1:
            rows.append(at_most("the kernel's count, the most; a flat ring's bytes", most, flat / 1e6, " MB"))
    return rows


def _two_levels(hosts: Any, count: bool) -> dict[str, Any]:
    from ddplab.hierarchy import Hierarchy
    from ddplab.twolevel import hierarchical_all_reduce, reduce_in_place

    rank, n = dist.get_rank(), dist.get_world_size()
    levels = Hierarchy(hosts)
    place = torch.arange(NUMEL, dtype=torch.float32, device=here()) % 997
    summed = hierarchical_all_reduce(place * (rank + 1), levels)
    wrong = int((summed != place * (n * (n + 1) // 2)).sum())
    across = reduce_in_place(place.clone(), levels, "sum").across
    left = leaving_bytes(lambda: hierarchical_all_reduce(place.clone(), levels, check=False), False) if count else 0
    local = int(os.environ.get("LOCAL_WORLD_SIZE", n))
    return {"hosts": levels.hosts, "local": local, "wrong": wrong, "across": across, "left": left}

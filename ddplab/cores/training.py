"""Cores of the labs on training: DDP by hand (04), accumulation (05), compression (10), the step in parts (11)."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddplab._insync import assert_grads_in_sync
from ddplab._tiny import TOLERANCE, batch_of, build, gradients, loss_of, tiny, trained_parameters
from ddplab.cores.job import Job, Row, at_least, at_most, equal, here, largest

STEPS = 3
SIDE = 512  # of the square matrix whose gradient is compressed
SHARE = {"fp16": 1 / 2, "int8": 1 / 4, "onebit": 1 / 32}  # of the fp32 ring's bytes
COMPUTE_S = 0.03


# -- lab 04 -----------------------------------------------------------------------------------------------------------


def ddp_four_steps(job: Job) -> list[Row]:
    """The four DDPs of the lab and torch's, against one process on the whole batch."""
    seen = job.launch(_four_steps)
    worst = {name: largest(one[name] for one in seen) for name in seen[0]}
    return [at_most(f"{name} against one process", apart, TOLERANCE) for name, apart in worst.items()]


def _four_steps() -> dict[str, float]:
    """Inside a rank: each wrapper's largest distance from the mean gradient of all ranks' batches."""
    from ddplab.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP

    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    apart = {}
    for wrap in (NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP, DistributedDataParallel):
        model, whole = build(tiny, rank).to(here()), build(tiny, 0)  # what other ranks begin with, wrap() replaces
        ddp, distances = wrap(model), []
        for step in range(1, STEPS + 1):
            model.zero_grad()
            loss_of(ddp(batch_of(rank, step).to(here()))).backward()
            getattr(ddp, "finish", lambda: None)()
            mean = gradients(whole, ranks, step)
            for name, p in trained_parameters(model).items():
                distances.append(float((p.grad.cpu() - mean[name]).abs().max()))
        apart[wrap.__name__] = largest(distances)
    return apart


# -- lab 05 -----------------------------------------------------------------------------------------------------------


def accumulation(job: Job) -> list[Row]:
    """A window of micro-batches of unequal sizes, against one process on all samples of all ranks."""
    seen = job.launch(_window)
    return [
        at_most("a window against one big batch", largest(apart for apart, _ in seen), TOLERANCE),
        equal("synchronisations of 4 micro-batches", max(syncs for _, syncs in seen), 1),
    ]


def _micro_batch(rank: int, i: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(100 * i + rank)
    return torch.randn(1 + (rank + i) % 3, 4, generator=seeded, dtype=torch.float64)


def _window() -> tuple[float, int]:
    from ddplab.accumulate import accumulate

    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    model, whole = build(tiny, 0).to(here()), build(tiny, 0)
    ddp, syncs = DistributedDataParallel(model), 0
    for step in accumulate(ddp, [_micro_batch(rank, i).to(here()) for i in range(4)], every=4):
        with step:
            step.backward(loss_of(ddp(step.batch)))
        syncs += step.syncs
    assert_grads_in_sync(ddp)
    everything = torch.cat([_micro_batch(r, i) for r in ranks for i in range(4)])
    trained = trained_parameters(whole)
    mean = torch.autograd.grad(loss_of(whole(everything)), list(trained.values()))
    own = trained_parameters(model)
    return largest(float((own[n].grad.cpu() - g).abs().max()) for n, g in zip(trained, mean, strict=True)), syncs


# -- lab 10 -----------------------------------------------------------------------------------------------------------


def compression(job: Job) -> list[Row]:
    """Hooks that send less: their bytes against the closed form, and replicas that stay equal bit for bit."""
    seen = job.launch(_compressed)
    ring_B = 2 * (job.ranks - 1) / job.ranks * 4 * SIDE * SIDE
    rows = []
    for name, share in SHARE.items():
        found = max(one[name]["bytes"] for one in seen) / ring_B
        right = abs(found / share - 1) < 0.02  # scales and flags come on top
        rows.append(Row(f"{name}: share of fp32's bytes", f"{found:.4f}", f"{share:.4f}", right))
    for name in seen[0]:
        rows.append(equal(f"{name}: versions of the gradient", len({one[name]["bits"] for one in seen}), 1))
    rows.append(
        at_most("fp16 against the mean", largest(one["fp16"]["apart"] for one in seen), (job.ranks + 1) * 2.0**-11)
    )
    rows.append(at_most("two levels against the mean", largest(one["two levels"]["apart"] for one in seen), 1e-6))
    return rows


class _Given(nn.Module):
    """One matrix whose gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIDE, SIDE))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def _draw(rank: int) -> torch.Tensor:
    """The gradient of a rank, from -1 to 1."""
    return torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(7 + rank)) * 2 - 1


def _compressed() -> dict[str, dict[str, Any]]:
    from ddplab.hooks.cast import fp16
    from ddplab.hooks.hierarchical import Hierarchical, hierarchical_hook
    from ddplab.hooks.int8 import int8
    from ddplab.hooks.onebit import onebit

    mean = sum(_draw(r).double() for r in range(dist.get_world_size())) / dist.get_world_size()
    makers = {"fp16": fp16, "int8": int8, "onebit": onebit, "two levels": lambda: (Hierarchical(), hierarchical_hook)}
    seen = {}
    for name, make in makers.items():
        ddp = DistributedDataParallel(_Given().to(here()))
        state, hook = make()
        ddp.register_comm_hook(state, hook)
        ddp(_draw(dist.get_rank()).to(here())).backward()
        grad = ddp.module.weight.grad.cpu()
        apart = float((grad.double() - mean).abs().max())
        seen[name] = {"bytes": state.wire_bytes, "bits": zlib.crc32(grad.numpy().tobytes()), "apart": apart}
        state.close()
    return seen


# -- lab 11 -----------------------------------------------------------------------------------------------------------


def resnet50(job: Job) -> list[Row]:
    """The capstone's three runs in small: a recorded step, played with hooks that send nothing, all, and half."""
    from ddplab.capstone import noop_hook
    from ddplab.measured import measure_timeline

    profile = job.first(_recorded)
    rows = []
    for name, hook in {"noop": noop_hook, "fp32": "none", "fp16": "fp16"}.items():
        where = {key: value for key, value in job.options if key != "timeout"}
        seen = measure_timeline(profile, hook=hook, bucket_cap_mb=0.5, steps=3, **where)
        steps = sorted(seen.about["steps_s"])
        if name == "noop":
            rows.append(equal("bytes in buckets", sum(b.nbytes for b in seen.buckets), profile.nbytes))
            rows.append(at_least("noop: a step, against its computing", steps[1] * 1e3, profile.compute_s * 1e3, " ms"))
        else:
            rows.append(Row(f"{name}: a step", f"{steps[1] * 1e3:.1f} ms"))
    return rows


def _recorded() -> Any:
    """On rank 0: a profile of a small network, its times scaled to what a step shall take."""
    from ddplab.profile import record

    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    profile = record(nn.Sequential(*layers).to(here()), torch.randn(32, 256, device=here()))
    return profile.scaled(COMPUTE_S / profile.compute_s)

"""Inside a rank: time all-reduce algorithms against each other and against the backend, and check every result."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ddplab.execute import REDUCE_OPS, all_reduce
from ddplab.hosts import link_bytes
from ddplab.schedule import Schedule

_PERIOD = 997  # prime: a chunk or segment that lands in the wrong place is a wrong result


class Times(NamedTuple):
    """What one rank saw of one algorithm at one size."""

    seconds: list[float]  # one a timed run, by this rank's clock
    sent: list[int] | None  # bytes that the kernel counted on this rank's link in each timed run
    wrong: int | None  # elements that differ from the backend's result, over all runs


def measure(
    counts: list[int], algorithms: list[Schedule | None], op: str, dtype: str, iters: int, warmup: int, check: bool
) -> dict:
    """Time each algorithm (None: the backend's own all-reduce) `iters` times at each element count.

    Algorithms take turns, in an order that rotates, so that a disturbance hits all of them alike. Every run starts
    from the same input and a barrier, and ends with a barrier, before any other work of this rank could slow others.
    """
    device = torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")
    on_host = bool(os.environ.get("DDPLAB_HOST"))
    native = next(known for known, name in REDUCE_OPS.items() if name == op)
    results = []
    for count in counts:
        source = _input(count, op, dtype).to(device)
        target = source.clone()
        expected = None
        if check:
            expected = source.clone()
            dist.all_reduce(expected, native)
        seconds = [[] for _ in algorithms]
        sent = [[] for _ in algorithms]
        wrong = [0 for _ in algorithms]
        for run in range(warmup + iters):
            for turn in range(len(algorithms)):
                a = (turn + run) % len(algorithms)
                target.copy_(source)
                before = link_bytes().sent if on_host else 0
                _settle(device)
                start = time.perf_counter()
                if algorithms[a] is None:
                    dist.all_reduce(target, native)
                else:
                    all_reduce(target, algorithms[a], op, check=False)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                took = time.perf_counter() - start
                _settle(device)
                if run >= warmup:
                    seconds[a].append(took)
                    sent[a].append(link_bytes().sent - before if on_host else 0)
                if expected is not None:
                    wrong[a] += _differing(target, expected, op)
        results.append(
            [
                Times(seconds[a], sent[a] if on_host else None, wrong[a] if check else None)
                for a in range(len(algorithms))
            ]
        )
    nccl = "NCCL " + ".".join(map(str, torch.cuda.nccl.version())) if dist.get_backend() == "nccl" else ""
    return {
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": ", ".join(filter(None, (f"torch {torch.__version__}", nccl))),
        "item_bytes": source.element_size(),
        "times": results,
    }


def _settle(device: torch.device) -> None:
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _input(count: int, op: str, dtype: str) -> torch.Tensor:
    """Small whole numbers, different on each rank: whatever the order of summing, the result is the same to the bit."""
    low = 1 if op == "product" else 0
    pattern = np.random.default_rng(dist.get_rank()).integers(low, 3, _PERIOD)
    return torch.from_numpy(pattern).to(getattr(torch, dtype)).repeat(-(-count // _PERIOD))[:count].clone()


def _differing(ours: torch.Tensor, theirs: torch.Tensor, op: str) -> int:
    if op == "mean":  # multiplying by 1/n before the sum and dividing by n after it may round differently
        tolerance = 2 * dist.get_world_size() * torch.finfo(ours.dtype).eps
        return int((~torch.isclose(ours, theirs, rtol=tolerance, atol=0.0)).sum())
    return 0 if torch.equal(ours, theirs) else int((ours != theirs).sum())

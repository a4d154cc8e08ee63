"""Inside a rank: time one setting, or several in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Step = Callable[[], None]


def measure(
    knob: str, order: list[list[Any]], workload: Any, nbytes: int, iters: int, warmup: int
) -> list[list[float]]:
    """Seconds for each round of `order` and each value in it: the median over `iters` steps, on every rank the same.

    workload: "all_reduce", "ddp", or a function that does one step. Every measurement builds its model anew, and
    all-reduces share one buffer: where memory happens to lie makes a difference of percents, and must not look like
    one between values.
    """
    device = _device()
    buffer = torch.ones(max(1, nbytes // 4), device=device)
    return [[_measure(_step(knob, value, workload, buffer), iters, warmup, device) for value in turn] for turn in order]


def _measure(step: Step, iters: int, warmup: int, device: torch.device) -> float:
    for _ in range(warmup):
        _timed(step, device)
    return _slowest([_timed(step, device) for _ in range(iters)])


def _slowest(seconds: list[float]) -> float:
    """The median over the steps of the slowest rank's time: every rank gets the same."""
    times = torch.tensor(seconds, dtype=torch.float64)
    times = times.to(_device()) if dist.get_backend() == "nccl" else times
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(np.median(times.cpu().numpy()))


def _timed(step: Step, device: torch.device) -> float:
    _settle(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _settle(device: torch.device) -> None:
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")


def _step(knob: str, value: Any, workload: Any, buffer: torch.Tensor) -> Step:
    if callable(workload):
        return workload
    if workload == "ddp":
        return _ddp_step({} if knob.isupper() or value is None else {knob: value}, buffer.nbytes, buffer.device)
    if knob == "algorithm" and value not in (None, "backend"):
        from ddplab import schedule
        from ddplab.execute import all_reduce

        plan = getattr(schedule, value)(dist.get_world_size())
        return lambda: all_reduce(buffer, plan, "max", check=False)
    return lambda: dist.all_reduce(buffer, dist.ReduceOp.MAX)  # the maximum of ones stays one, however often


def _ddp_step(options: dict[str, Any], nbytes: int, device: torch.device) -> Step:
    """Forward, backward and optimizer of eight equal layers whose gradients make up `nbytes`."""
    from torch.nn.parallel import DistributedDataParallel

    width = max(8, int((nbytes / 4 / 8) ** 0.5))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(8))).to(device)
    ddp = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    batch = torch.randn(8, width, device=device)

    def step() -> None:
        ddp(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

"""What any communication hook costs: its encoding and all the rest, on all ranks at once, without a link.

The hook runs on a model's real buckets, outside of DDP and over this machine's loopback, where bytes cost next to
nothing. What it takes there it takes on any link, on top of the transfer. So a step that is predicted with these costs
is a prediction: no step was measured for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ddplab.profile import Profile
from ddplab.timeline import Compression
from ddplab.transfers import count

if TYPE_CHECKING:
    from ddplab.hosts import Hosts

CAPS_MIB = (5, 25, 100)  # several bucket sizes tell seconds a bucket from seconds a byte


def calibrate_hook(
    make: Callable[[], tuple[Any, Callable]],
    profile: Profile,
    ranks: int = 4,
    hosts: Hosts | None = None,
    name: str | None = None,
    factor: float | None = None,
    repeats: int = 2,
    device: str = "auto",
    realtime: bool = False,
) -> Compression:
    """A `Compression` for `predict_step`: the costs of a hook on `profile`'s gradients, on `ranks` ranks at once.

    make: a function that returns (state, hook) on each rank, such as `ddplab.onebit`.  hosts: only for hooks that
        depend on who shares a host; with a link so fast that it does not count.
    factor: wire bytes over those of the fp32 ring; None takes what `state.wire_bytes` counted.
    repeats: passes over all buckets after one to warm up; of each bucket the slowest rank counts, and the median pass.
    device, realtime: as for `launch`.
    """
    from ddplab.launch import launch

    if not isinstance(profile, Profile):
        raise TypeError(f"a hook is calibrated on the gradients of a ddplab.Profile, not on a {type(profile).__name__}")
    count(repeats, "repeats", error=ValueError)
    seen = launch(_passes, make, profile, repeats, ranks=ranks, hosts=hosts, device=device, realtime=realtime)
    # (buckets, [encode, encode and rest]): a rank that has encoded waits for the others, so rests overlap with encoding
    ends = np.median(np.max([np.cumsum(one["times"], axis=-1) for one in seen], axis=0), axis=0)
    times = np.diff(ends, axis=-1, prepend=0.0)
    sizes = np.array(seen[0]["sizes"], dtype=float)
    if factor is None:
        sent = max(one["sent"] for one in seen)
        factor = float(sent / (2 * (len(seen) - 1) / len(seen) * sizes.sum()))
    encode = float(times[:, 0].sum() / sizes.sum())
    per_byte, fixed = _line(sizes, times[:, 1])
    return Compression(name or getattr(make, "__name__", "hook"), factor, encode, per_byte, None, fixed)


def _line(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """(seconds a byte, seconds a bucket) through the points, neither negative."""
    slope, fixed = np.polyfit(sizes, seconds, 1)
    if fixed < 0:
        slope, fixed = (sizes * seconds).sum() / (sizes**2).sum(), 0.0
    if slope < 0:
        slope, fixed = 0.0, seconds.mean()
    return float(slope), float(fixed)


def _passes(make: Callable[[], tuple[Any, Callable]], profile: Profile, repeats: int) -> dict[str, Any]:
    """Inside a rank: (repeats, buckets, 2) seconds of encoding and of the rest, the buckets' bytes, and bytes sent."""
    import torch
    import torch.distributed as dist

    from ddplab._buckets import MIB, Bucket, assign_buckets
    from ddplab.paced import paced

    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    params = {g: p for g, p in zip(
        sorted(profile.gradients, key=lambda g: g.position), paced(profile).parameters(), strict=True
    )}  # fmt: skip
    order = [params[g].to("cuda") if cuda else params[g] for g in profile.gradients]
    times, sizes, sent = [], [], 0
    for cap in CAPS_MIB:
        groups = assign_buckets(order, cap * MIB, cap * MIB)
        buckets = [Bucket(group, i, i == len(groups) - 1) for i, group in enumerate(groups)]
        sizes += [b.buffer().nbytes for b in buckets]
        state, hook = make()
        before, passes = getattr(state, "wire_bytes", 0), []
        for _ in range(repeats + 1):
            seconds = []
            for bucket in buckets:
                bucket.buffer().normal_()
                dist.barrier()
                start = time.perf_counter()
                future = hook(state, bucket)
                middle = time.perf_counter()
                future.wait()
                if cuda:
                    torch.cuda.synchronize()
                seconds.append((middle - start, time.perf_counter() - middle))
            passes.append(seconds)
        sent += (getattr(state, "wire_bytes", 0) - before) / (repeats + 1)
        times.append(np.array(passes[1:]))
        if hasattr(state, "close"):
            state.close()
    return {"times": np.concatenate(times, axis=1), "sizes": sizes, "sent": sent}

"""What communication costs here: a short measurement of all-reduce, copies and casts, with all ranks at it at once.

The ring's closed form knows the link and nothing of the processors. gloo also adds up (slowly for fp16), DDP copies
gradients into buckets and back, a hook casts. With more ranks than cores they wait for each other. `calibrate`
measures these terms on their own, without DDP, so that a prediction made with them is still a prediction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ddplab.cost import fit, ring_seconds
from ddplab.link import Link
from ddplab.profile import ITEM_BYTES
from ddplab.timeline import Compression
from ddplab.transfers import count

if TYPE_CHECKING:
    from ddplab.hosts import Hosts

MIB = 2**20
SIZES = (MIB // 2, 2 * MIB, 8 * MIB)
LOCAL_BYTES = 32 * MIB  # far more than a cache holds, as a model's gradients are
GLOO_THREADS = 2  # what torch gives a gloo group on one device; each runs one collective at a time


@dataclass(frozen=True)
class Costs:
    """Measured seconds of the terms of a step. Made by `calibrate`; `predict_step(..., costs=costs)` uses it.

    links: for each wire dtype the `Link` that explains the measured all-reduces as a ring: latency a step, payload
    bytes a second.  worst: the largest relative error of those fits.  copy_s_per_byte: a gradient into its bucket, or
    back.  divide_s_per_byte: what torch's plain hook does before the all-reduce.  cast_s_per_byte: to fp16, divided;
    uncast_s_per_byte: back. These four are seconds a byte of fp32 gradient, on all ranks at once, while an all-reduce
    is under way.  lanes: all-reduces that the backend runs at once.
    """

    ranks: int
    links: dict[str, Link]
    copy_s_per_byte: float
    divide_s_per_byte: float
    cast_s_per_byte: float
    uncast_s_per_byte: float
    lanes: int
    worst: float
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict, repr=False)

    def all_reduce_seconds(self, nbytes: float, dtype: str, ranks: int | None = None) -> float:
        """Seconds of one all-reduce of `nbytes` wire bytes. ValueError for a dtype that was not calibrated."""
        if dtype not in self.links:
            raise ValueError(f"{dtype} was not calibrated, only {', '.join(self.links)}: calibrate(dtypes=[{dtype!r}])")
        return ring_seconds(ranks or self.ranks, nbytes, self.links[dtype])

    def compression(self, name: str) -> Compression:
        """torch's allreduce_hook ("none") or fp16_compress_hook ("fp16") at the measured costs."""
        if name == "none":
            return Compression("none", encode_s_per_byte=self.divide_s_per_byte)
        return Compression("fp16", 0.5, self.cast_s_per_byte, self.uncast_s_per_byte, "float16")

    def __str__(self) -> str:
        each = ", ".join(
            f"{dtype} {link.payload_Bps / 1e6:.4g} MB/s and {link.latency_s * 1e6:.4g} us a step"
            for dtype, link in self.links.items()
        )
        return f"calibrated on {self.ranks} ranks: {each}; copy {self.copy_s_per_byte * 1e9:.3g} ns/B"


def calibrate(
    ranks: int | None = None,
    hosts: Hosts | None = None,
    dtypes: Sequence[str] = ("float32", "float16"),
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    device: str = "auto",
    realtime: bool = False,
) -> Costs:
    """Measure `Costs` on `ranks` ranks of this machine, or on emulated `hosts`. Takes a few seconds.

    dtypes: of the wire.  sizes: of the all-reduces, in wire bytes, at least three.  repeats: runs of each, of which the
    median of the slowest rank counts. device, realtime: as for `launch`.  ValueError for what cannot be measured.
    """
    from ddplab.launch import launch

    if isinstance(dtypes, str) or not dtypes or any(dtype not in ITEM_BYTES for dtype in dtypes):
        raise ValueError(f"dtypes is a list of {', '.join(ITEM_BYTES)}, not {dtypes!r}")
    sizes = sorted({count(size, "a size, in bytes,", least=8, error=ValueError) for size in sizes})
    if len(sizes) < 3:
        raise ValueError(f"three different sizes or more tell a latency from a rate, not {sizes}")
    count(repeats, "repeats", error=ValueError)
    seen = launch(
        _measure, list(dtypes), list(sizes), repeats, ranks=ranks, hosts=hosts, device=device, realtime=realtime
    )
    n = len(seen)
    slowest = {key: np.max([one[key] for one in seen], axis=0) for key in seen[0] if key != "backend"}
    links, points, worst = {}, {}, 0.0
    for dtype in dtypes if n > 1 else ():
        points[dtype] = [(size, float(np.median(slowest[dtype, size]))) for size in sizes]
        fitted = fit([(n, size, seconds) for size, seconds in points[dtype]])
        worst = max(worst, fitted.worst)
        size, seconds = max(points[dtype])
        # a busy machine can make small messages look dearer than large ones: then the largest alone sets the rate
        through = Link(2 * (n - 1) / n * size / seconds, latency_s=0.0, wire_efficiency=1.0, name="fitted")
        links[dtype] = fitted.link if fitted.beta_s_per_byte else through
    each = [float(np.median(slowest[name])) for name in ("copy", "divide", "cast", "uncast")]
    return Costs(n, links, *each, lanes=1 if seen[0]["backend"] == "nccl" else GLOO_THREADS, worst=worst, points=points)


def _measure(dtypes: list[str], sizes: list[int], repeats: int) -> dict[Any, Any]:
    """Inside a rank: seconds of every run, by (dtype, size) and by the name of the local work (there a byte)."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")

    def timed(work: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    out: dict[Any, Any] = {"backend": dist.get_backend()}
    for dtype in dtypes:
        for size in sizes:
            item = getattr(torch, dtype).itemsize
            tensor = torch.zeros(size // item, dtype=getattr(torch, dtype), device=device)
            runs = [timed(lambda t=tensor: dist.all_reduce(t)) for _ in range(repeats + 1)]
            out[dtype, size] = runs[1:]
    n, items = dist.get_world_size(), LOCAL_BYTES // 4
    a, b, traffic = (torch.ones(items, device=device) for _ in range(3))
    half = a.half()
    local = {
        "copy": lambda: b.copy_(a),
        "divide": lambda: a.div_(n),
        "cast": lambda: a.to(torch.float16).div_(n),
        "uncast": lambda: a.copy_(half),
    }
    for name in local:
        out[name] = []
    for _ in range(repeats):
        # DDP copies and casts while a bucket is on its way, and on a CPU the network then wants the same cores
        under_way = dist.all_reduce(traffic[: max(sizes) // 4], async_op=True) if device.type == "cpu" else None
        for name, work in local.items():
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            out[name].append((time.perf_counter() - start) / LOCAL_BYTES)
        if under_way:
            under_way.wait()
        dist.barrier()
    return out

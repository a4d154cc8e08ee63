"""What a schedule costs on a topology: the alpha-beta model, summed over steps, and the bytes on every link.

Steps are synchronised: a step begins when the one before is over everywhere. It costs the latency alpha, then as long
as its most loaded link needs. Nothing else is in the model: sums are hidden behind transfers, hosts have time to send,
the switch has no limit of its own. A step that carries no byte costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ddplab.link import Link, Topology
from ddplab.transfers import Schedule, count, whole

LinkKey = tuple[str, int, str]
_MOST_BYTES = 2**53  # whole numbers of a float64 end there


@dataclass(frozen=True, eq=False)
class Prediction:
    """What the model says of one all-reduce. Nothing in it was measured.

    seconds: the whole all-reduce.  step_seconds: float64 (steps,), sums to `seconds`.  bytes_sent: int64 (ranks,),
    payload that each rank sends, also to ranks on its own host.  bytes_per_link: payload by ("host", i, "up" or
    "down"), and by ("rank", r, "up" or "down") for the links inside a host where the topology has them.
    """

    schedule: str
    nbytes: int
    topology: Topology
    seconds: float
    step_seconds: np.ndarray = field(repr=False)
    bytes_sent: np.ndarray = field(repr=False)
    bytes_per_link: dict[LinkKey, int] = field(repr=False)

    @cached_property
    def busiest(self) -> LinkKey:
        """The host link that carries most bytes; the first of several."""
        return max((key for key in self.bytes_per_link if key[0] == "host"), key=self.bytes_per_link.__getitem__)

    @cached_property
    def busiest_over_mean(self) -> float:
        """Bytes on the busiest host link over the mean of all host links, both directions; 1.0 is a perfect balance."""
        loads = [load for key, load in self.bytes_per_link.items() if key[0] == "host"]
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0

    @property
    def algbw_GBps(self) -> float:
        """Algorithm bandwidth as nccl-tests defines it: nbytes / seconds; nan where nothing is sent."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else float("nan")

    @property
    def busbw_GBps(self) -> float:
        """Bus bandwidth as nccl-tests defines it: algbw * 2 (n - 1) / n."""
        return self.algbw_GBps * 2 * (self.topology.ranks - 1) / self.topology.ranks

    def __str__(self) -> str:
        kind, index, way = self.busiest
        return (
            f"{self.schedule}, {self.nbytes / 1e6:g} MB on {self.topology}: {self.seconds * 1e3:.4g} ms predicted in "
            f"{len(self.step_seconds)} steps; at most {self.bytes_sent.max() / 1e6:.4g} MB sent by a rank; "
            f"busiest link {kind} {index} {way}, {self.bytes_per_link[self.busiest] / 1e6:.4g} MB, "
            f"{self.busiest_over_mean:.2f} x the mean; busbw {self.busbw_GBps:.4g} GB/s"
        )

    def __repr__(self) -> str:
        return f"<Prediction: {self}>"


def predict(schedule: Schedule, nbytes: int, topology: Topology | Any, itemsize: int = 1) -> Prediction:
    """Seconds and bytes of `schedule` on a buffer of `nbytes` bytes over `topology`.

    topology: as many ranks as the schedule has; or an object with a `.topology`, such as `ddplab.Hosts`.  itemsize:
    bytes of one element; chunks are cut between elements, as when the schedule runs, so their sizes are exact.
    A link with a burst is a token bucket: it starts full, refills while it idles (also during alpha), and what it holds
    passes at once. Raises ValueError where ranks, bytes or item size do not fit.
    """
    topology = getattr(topology, "topology", topology)
    for value, kind, example in ((schedule, Schedule, "ring(4)"), (topology, Topology, "Topology(hosts=4)")):
        if not isinstance(value, kind):
            raise TypeError(f"predict needs a {kind.__name__}, such as ddplab.{example}, not {value!r}.")
    nbytes = count(whole(nbytes), "nbytes", least=0, error=ValueError)
    itemsize = count(itemsize, "itemsize", error=ValueError)
    if nbytes > _MOST_BYTES:
        raise ValueError(f"nbytes must be at most 2^53 (9 PB), not {nbytes}.")
    if nbytes % itemsize:
        raise ValueError(f"{nbytes} bytes are not a whole number of elements of {itemsize} bytes.")
    if schedule.ranks != topology.ranks:
        raise ValueError(
            f"{schedule.name} is for {schedule.ranks} ranks, but the topology has {topology.ranks} "
            f"({topology.hosts} hosts x {topology.ranks_per_host})."
        )
    chunk_bytes = np.diff(np.array(schedule.bounds(nbytes // itemsize))) * itemsize
    size, host = chunk_bytes[schedule.chunk], np.arange(schedule.ranks, dtype=np.int32) // topology.ranks_per_host
    src_host, dst_host = host[schedule.src], host[schedule.dst]
    outer = src_host != dst_host
    loads = [(_loads(schedule, src_host, dst_host, np.where(outer, size, 0), topology.hosts), topology.link, "host")]
    if topology.inner_link:
        inner = np.where(outer, 0, size)
        loads.append((_loads(schedule, schedule.src, schedule.dst, inner, schedule.ranks), topology.inner_link, "rank"))
    step_seconds = _step_seconds([(load, link) for load, link, _ in loads])
    return Prediction(
        schedule=schedule.name,
        nbytes=nbytes,
        topology=topology,
        seconds=float(step_seconds.sum()),
        step_seconds=step_seconds,
        bytes_sent=np.bincount(schedule.src, size, schedule.ranks).astype(np.int64),
        bytes_per_link={
            (kind, i, way): int(total)
            for load, _, kind in loads
            for way, totals in zip(("up", "down"), np.split(load.sum(axis=0), 2), strict=True)
            for i, total in enumerate(totals)
        },
    )


def _loads(schedule: Schedule, src: np.ndarray, dst: np.ndarray, size: np.ndarray, ends: int) -> np.ndarray:
    """Bytes by step and link, float64 (steps, 2 * ends): the uplinks of all ends, then their downlinks."""
    first = schedule.step.astype(np.int64) * ends
    up, down = (np.bincount(first + end, size, schedule.steps * ends) for end in (src, dst))
    return np.hstack([up.reshape(-1, ends), down.reshape(-1, ends)])


def _step_seconds(loads: Sequence[tuple[np.ndarray, Link]]) -> np.ndarray:
    """Seconds of each step, given the loads on each kind of link."""
    if not any(link.burst_bytes for _, link in loads):
        most = [(load.max(axis=1), link) for load, link in loads]
        return np.max([np.where(m > 0, link.latency_s + m / link.payload_Bps, 0.0) for m, link in most], axis=0)
    burst = [link.burst_bytes * link.wire_efficiency for _, link in loads]  # in payload bytes, as the loads are
    tokens = [np.full(load.shape[1], b) for (load, _), b in zip(loads, burst, strict=True)]
    since = [np.zeros(load.shape[1]) for load, _ in loads]  # when `tokens` was right
    ends = np.zeros(len(loads[0][0]) + 1)
    for step in range(len(ends) - 1):
        ends[step + 1] = ends[step]
        for kind, (load, link) in enumerate(loads):
            if not load[step].any():
                continue
            start = ends[step] + link.latency_s
            held = np.minimum(burst[kind], tokens[kind] + link.payload_Bps * (start - since[kind]))
            wait = np.maximum(0.0, load[step] - held) / link.payload_Bps
            tokens[kind], since[kind] = np.maximum(0.0, held - load[step]), start + wait
            ends[step + 1] = max(ends[step + 1], start + wait.max())
    return np.diff(ends)

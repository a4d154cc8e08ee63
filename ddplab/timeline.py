"""One step of DistributedDataParallel as a timeline: two lanes, and what sticks out.

The compute lane is forward, backward, optimizer. During backward buckets fill up and leave for the communication lane,
in bucket order. What communication still has to do when backward has ended is *exposed*: the step waits for it.
`predict_step` works that out from a recorded backward (`ddplab.Profile`), for any number of ranks, link, bucket size
and compression. `ddplab.measure_timeline` gives the same object, measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from ddplab.cost import ring_seconds
from ddplab.lanes import Parcel, run_lanes
from ddplab.link import Link, Topology
from ddplab.profile import Gradient, Profile
from ddplab.steptimes import MIB, BucketTimes, Timeline
from ddplab.transfers import count, number

if TYPE_CHECKING:
    import pandas as pd

    from ddplab.calibration import Costs

__all__ = [
    "COMPRESSIONS",
    "BucketTimes",
    "Compression",
    "Timeline",
    "all_reduce_seconds",
    "assign",
    "best_bucket_cap",
    "predict_step",
    "slowest_of",
]

CAPS_MB = (0.5, 1, 2, 5, 10, 25, 50, 100, 200)
MOST_JITTER = 0.5  # one rank's 5th percentile of a normal with a larger sigma comes near no time at all, or below


@dataclass(frozen=True)
class Compression:
    """What a communication hook does to a bucket: wire bytes over gradient bytes, and what that costs.

    encode_s_per_byte, decode_s_per_byte: seconds a byte of gradient. Encoding stands in the compute lane (DDP calls the
    hook from backward), decoding at the end of the bucket's transfer.  wire_dtype: what is reduced, for calibrated
    costs; None means the gradient's own dtype.  bucket_s: seconds of the transfer that do not depend on the bytes.
    """

    name: str = "none"
    factor: float = 1.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0
    wire_dtype: str | None = None
    bucket_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("factor", "encode_s_per_byte", "decode_s_per_byte", "bucket_s"):
            number(getattr(self, field), f"a compression's {field}", 0)


# Free of charge unless calibrated: the bound that a perfect implementation approaches.
COMPRESSIONS = {c.name: c for c in (Compression(), Compression("fp16", 0.5, wire_dtype="float16"))}


def assign(profile: Profile, bucket_cap_mb: float | None = None, iteration: int = 1) -> list[list[Gradient]]:
    """Which gradients travel together in torch's DDP, in the order of communication.

    iteration 0: one bucket for everything (one a dtype), in the order of the module's parameters: nobody knows yet in
    which order gradients become ready, so torch waits for all of them. From iteration 1 on: in the recorded order of
    readiness, closed at `bucket_cap_mb` MiB; None means 25 MiB, and 1 MiB for the first bucket. Where several dtypes
    leave buckets half full, torch keeps those in a hash map: their order is its own. Claim C13; source:
    torch/nn/parallel/distributed.py (the size limits), torch/csrc/distributed/c10d/reducer.cpp (the rule).
    """
    from ddplab._buckets import assign_buckets

    if not isinstance(profile, Profile):
        kind = type(profile).__name__
        raise TypeError(f"buckets are filled from a ddplab.Profile (record, assumed_profile), not from a {kind}")
    if bucket_cap_mb is not None:
        number(bucket_cap_mb, "bucket_cap_mb, in MiB,", above=True)
    if iteration not in (0, 1):
        raise ValueError(f"iteration is 0 (the first) or 1 (all others), not {iteration!r}")
    if iteration == 0:
        return assign_buckets(sorted(profile.gradients, key=lambda g: g.position), math.inf, math.inf)[::-1]
    cap = int((25 if bucket_cap_mb is None else bucket_cap_mb) * MIB)
    return assign_buckets(profile.gradients, MIB if bucket_cap_mb is None else cap, cap)


def all_reduce_seconds(nbytes: float, topology: Topology) -> float:
    """What one all-reduce of `nbytes` costs: the ring, or the two-level ring where ranks share hosts.

    Two levels, g ranks on each of k hosts: 2 (g - 1) (alpha_i + S / (g B_i)) inside, and 2 (k - 1) (alpha + S / (k B))
    on the host's link, which its g ranks share; nothing inside where the topology has no inner link.
    """
    k, g, inner = topology.hosts, topology.ranks_per_host, topology.inner_link
    inside = ring_seconds(g, nbytes, inner) if inner and g > 1 else 0.0
    return inside + ring_seconds(k, nbytes, topology.link)


def predict_step(
    profile: Profile,
    ranks: int | None = None,
    link: str | Link = "1gbit",
    bucket_cap_mb: float | None = None,
    compression: str | Compression = "none",
    *,
    topology: Topology | Any = None,
    costs: Costs | None = None,
    slowdown: float = 1.0,
    jitter: float = 0.0,
    lanes: int | None = None,
    contention: float = 1.0,
    iteration: int = 1,
) -> Timeline:
    """Predict one step of torch's DDP; see `Timeline` for what comes back.

    ranks, link: one rank a host (4 ranks where nothing is said); or `topology`, a `Topology` or `Hosts`.
    bucket_cap_mb: as for DDP.  compression: "none", "fp16" or a `Compression`.
    costs: `ddplab.calibrate(hosts)`, the measured seconds of an all-reduce, a cast and a copy; None takes the ring's
        closed form on the link and nothing for the rest.
    slowdown: compute takes this many times longer while communication runs, because its kernels take processors
        away; 1.0 is none.  jitter: standard deviation of one rank's compute time over its mean. The slowest of N ranks
        sets the pace: normal, independent, the median of the maximum; `band_s` has its 5th and 95th percentile.
    lanes: all-reduces that may run at once and then share the link: 1 (NCCL's stream) or what `costs` says.
    contention: encoding one bucket and decoding another take this many times longer while both are done; 1.0 where
        they have processors of their own.
    iteration: 0 for the first, in which everything travels in one bucket; 1 for all others.
    Raises ValueError for numbers that make no sense.
    """
    if not isinstance(profile, Profile):
        raise TypeError(f"predict_step takes a ddplab.Profile (record, assumed_profile), not {type(profile).__name__}")
    topology = getattr(topology, "topology", topology) or Topology(4 if ranks is None else ranks, 1, Link.parse(link))
    if not isinstance(topology, Topology):
        raise TypeError(f"topology is a ddplab.Topology or Hosts, not {topology!r}")
    if costs is not None and not hasattr(costs, "all_reduce_seconds"):
        raise TypeError(f"costs is what ddplab.calibrate returns, not {costs!r}")
    if ranks is not None and ranks != topology.ranks:
        raise ValueError(f"ranks={ranks}, but the topology has {topology.ranks}")
    if isinstance(compression, str):
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression is {', '.join(COMPRESSIONS)} or a ddplab.Compression, not {compression!r}")
        compression = costs.compression(compression) if costs else COMPRESSIONS[compression]
    if not isinstance(compression, Compression):
        raise ValueError(f"compression is {', '.join(COMPRESSIONS)} or a ddplab.Compression, not {compression!r}")
    number(slowdown, "slowdown", 1), number(jitter, "jitter", 0, MOST_JITTER), number(contention, "contention", 1)
    lanes = (costs.lanes if costs else 1) if lanes is None else count(lanes, "lanes", error=ValueError)
    parcels = _parcels(assign(profile, bucket_cap_mb, iteration), topology, compression, costs)
    low, middle, high = (1 + jitter * slowest_of(topology.ranks, q) for q in (0.05, 0.5, 0.95))
    speeds = (slowdown, lanes, contention)
    one = _at_pace(profile, parcels, costs, speeds, middle)
    if jitter:
        ends = [_at_pace(profile, parcels, costs, speeds, pace).step_s for pace in (low, high)]
        one = replace(one, band_s=(ends[0], ends[1]))
    about = {
        "ranks": topology.ranks,
        "link": str(topology.link),
        "bucket_cap_mb": bucket_cap_mb,
        "compression": compression.name,
        "slowdown": slowdown,
        "jitter": jitter,
        "profile": str(profile),
        "costs": str(costs) if costs else f"ring, {topology.link.latency_s * 1e6:g} us a step; hooks and copies free",
    }
    return replace(one, about=about)


def slowest_of(n: int, quantile: float = 0.5) -> float:
    """The quantile of the maximum of n independent standard normal variables: by how many sigma is the slowest late?"""
    return NormalDist().inv_cdf(quantile ** (1 / n)) if n > 1 or quantile != 0.5 else 0.0


def best_bucket_cap(profile: Profile, caps_mb: Iterable[float] = CAPS_MB, **step: Any) -> tuple[float, pd.DataFrame]:
    """The fastest `bucket_cap_mb` of a list, and the table it was chosen from.

    step: arguments of `predict_step`.  Columns: bucket_cap_mb, buckets, communication_ms, exposed_ms, step_ms. Of
    equally fast ones (1 part in 10,000) the largest: fewer messages depend less on the latency that was assumed.
    """
    import pandas as pd

    if not isinstance(caps_mb, Iterable) or isinstance(caps_mb, str):
        raise ValueError(f"caps_mb is a list of numbers of MiB to choose from, not {caps_mb!r}")
    rows = []
    for cap in caps_mb:
        t = predict_step(profile, bucket_cap_mb=cap, **step)
        rows.append((cap, len(t.buckets), t.communication_s * 1e3, t.exposed_s * 1e3, t.step_s * 1e3))
    if not rows:
        raise ValueError("best_bucket_cap needs at least one bucket_cap_mb to choose from")
    frame = pd.DataFrame(rows, columns=["bucket_cap_mb", "buckets", "communication_ms", "exposed_ms", "step_ms"])
    good = frame[frame.step_ms <= frame.step_ms.min() * 1.0001]
    return float(good.bucket_cap_mb.max()), frame


def _parcels(
    buckets: Sequence[Sequence[Gradient]], topology: Topology, how: Compression, costs: Costs | None
) -> list[Parcel]:
    parcels = []
    for members in buckets:
        nbytes = sum(g.nbytes for g in members)
        if topology.ranks == 1:
            transfer = 0.0
        elif costs:
            transfer = costs.all_reduce_seconds(nbytes * how.factor, how.wire_dtype or members[0].dtype, topology.ranks)
        else:
            transfer = all_reduce_seconds(nbytes * how.factor, topology)
        parcels.append(
            Parcel(
                members, nbytes, how.encode_s_per_byte * nbytes, transfer, how.decode_s_per_byte * nbytes + how.bucket_s
            )
        )
    return parcels


def _at_pace(
    profile: Profile,
    parcels: Sequence[Parcel],
    costs: Costs | None,
    speeds: tuple[float, int, float],
    pace: float,
) -> Timeline:
    """The timeline where every piece of the model's own compute takes `pace` times its recorded time."""
    copy = costs.copy_s_per_byte if costs else 0.0
    backward, times = profile.backward_s * pace, [g.ready_s * pace for g in profile.gradients]
    lane = run_lanes(list(zip(profile.gradients, times, strict=True)), backward, parcels, copy, *speeds)
    buckets = tuple(
        BucketTimes(i, p.nbytes, lane.ready[i], lane.start[i], lane.end[i], tuple(g.name for g in p.gradients))
        for i, p in enumerate(parcels)
    )
    done = lane.compute_end
    for bucket in buckets:  # DDP waits for the buckets one by one and copies each result back into the gradients
        done = max(done, bucket.end_s) + copy * bucket.nbytes
    ends = (profile.forward_s * pace, lane.compute_end, done, profile.optimizer_s * pace)
    return Timeline(buckets, *ends, basis="predicted")

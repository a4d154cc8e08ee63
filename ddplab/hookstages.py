"""What a communication hook does, stage by stage: encode, work, transfer, work, transfer, work.

A hook is more than an encoder and a decoder. PowerSGD sends twice for each bucket, with products and a QR between. Here
its stages are timed apart from each other, on a model's real buckets, outside of DDP, over this machine's loopback, on
all ranks at once: a piece of work until the last rank is through with it, a transfer from the moment when the last rank
is there. No link and no training step is involved, so a step that is predicted from this is a prediction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddplab.processors import Job, here, slice_s
from ddplab.profile import Profile
from ddplab.transfers import count

if TYPE_CHECKING:
    from ddplab.hosts import Hosts

CAPS_MIB = (5, 25, 100)
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")  # of `ddplab.hooks.wire.Wire`


class BucketStages(NamedTuple):
    """One bucket on its own. Seconds of one rank's processor: encode_s, and work_s before, between and after the
    transfers.  loopback_s: seconds of each transfer without a link.  sent: payload bytes of each, of one rank."""

    nbytes: float
    encode_s: float
    work_s: tuple[float, ...]
    loopback_s: tuple[float, ...]
    sent: tuple[float, ...]


@dataclass(frozen=True)
class HookStages:
    """The stages of a hook on some buckets. Made by `calibrate_stages`; `StepFit.predict` takes it.

    buckets: as measured.  ranks: at it at once.  processors: that they shared, None where each had its own.  slice_s:
    how long one of their threads keeps a processor that others want.
    """

    name: str
    buckets: tuple[BucketStages, ...]
    ranks: int
    processors: int | None
    slice_s: float

    @property
    def turns(self) -> int:
        """How many ranks one processor served, one after the other."""
        return math.ceil(self.ranks / self.processors) if self.processors else 1

    def at(self, nbytes: float) -> BucketStages:
        """A bucket of this size: the mean of those measured of exactly that size, else on a line through all."""
        sizes = np.array([b.nbytes for b in self.buckets], dtype=float)
        table = np.array([[b.encode_s, *b.work_s, *b.loopback_s, *b.sent] for b in self.buckets])
        same = sizes == nbytes
        row = table[same].mean(axis=0) if same.any() else [_on_line(sizes, column, nbytes) for column in table.T]
        encode, k = float(row[0]), len(self.buckets[0].sent)
        work, loopback, sent = (tuple(map(float, part)) for part in np.split(row[1:], [k + 1, 2 * k + 1]))
        return BucketStages(nbytes, encode, work, loopback, sent)

    def job(self, gradients: Any, nbytes: int, payload_Bps: float) -> Job:
        """This hook's bucket on a link of this rate: a transfer lasts as long as its bytes take there, or as without a
        link where that is longer."""
        one = self.at(nbytes)
        transfers = tuple(max(s, sent / payload_Bps) for s, sent in zip(one.loopback_s, one.sent, strict=True))
        return Job(gradients, nbytes, one.encode_s, one.work_s, transfers)

    def __str__(self) -> str:
        sizes = sum(b.nbytes for b in self.buckets)
        encode = sum(b.encode_s for b in self.buckets) / sizes * 1e9
        work = " + ".join(f"{sum(w) / sizes * 1e9:.2f}" for w in zip(*(b.work_s for b in self.buckets), strict=True))
        sent = sum(sum(b.sent) for b in self.buckets) / sizes * self.ranks / (2 * (self.ranks - 1))
        k = len(self.buckets[0].sent)
        return (
            f"{self.name}: {sent:.4f} of the bytes in {k} transfer{'s' * (k > 1)}, processor ns a byte: encode "
            f"{encode:.2f}, lane {work}"
        )


def calibrate_stages(
    make: Callable[[], tuple[Any, Callable]],
    profile: Profile,
    ranks: int = 4,
    hosts: Hosts | None = None,
    name: str | None = None,
    caps_mb: tuple[float, ...] = CAPS_MIB,
    repeats: int = 2,
    realtime: bool = False,
) -> HookStages:
    """Time the stages of one of ddplab's hooks on `profile`'s gradients, on `ranks` ranks at once, on processors.

    make: a function that returns (state, hook) on each rank, such as `ddplab.powersgd`.  hosts: for a hook whose
        exchange depends on who shares a host; that is then one transfer, which takes what it takes on their links.
    caps_mb: bucket sizes in MiB; buckets of these are predicted best.  repeats: passes after one to warm up, of which
        the median counts.  realtime: as for `launch`.
    """
    from ddplab.launch import launch

    if not isinstance(profile, Profile):
        raise TypeError(f"a hook is calibrated on the gradients of a ddplab.Profile, not on a {type(profile).__name__}")
    count(repeats, "repeats", error=ValueError)
    seen = launch(
        _passes, make, profile, tuple(caps_mb), repeats, ranks=ranks, hosts=hosts, device="cpu", realtime=realtime
    )
    processors = here()
    turns = math.ceil(len(seen) / processors)
    # (ranks, passes, buckets, pieces, [begin, end]) on the one clock of this machine
    work, moved, sent = (np.array([one[key] for one in seen]) for key in ("work", "moved", "sent"))
    worked = np.median(work[..., 1].max(axis=0) - work[..., 0].min(axis=0), axis=0) / turns
    took = np.median(moved[..., 1].max(axis=0) - moved[..., 0].max(axis=0), axis=0)
    rows = zip(seen[0]["sizes"], worked.tolist(), took.tolist(), sent.max(axis=(0, 1)).tolist(), strict=True)
    buckets = tuple(BucketStages(size, w[0], tuple(w[1:]), tuple(m), tuple(b)) for size, w, m, b in rows)
    return HookStages(name or getattr(make, "__name__", "hook"), buckets, len(seen), processors, slice_s(realtime))


def _on_line(sizes: np.ndarray, seconds: np.ndarray, nbytes: float) -> float:
    """Where the line through the points is at `nbytes`; never below 0. In proportion, where all have one size."""
    if np.ptp(sizes) == 0:
        return float(seconds.mean() / sizes[0] * nbytes)
    slope, fixed = np.polyfit(sizes, seconds, 1)
    return float(max(0.0, slope * nbytes + fixed))


def _passes(make: Callable, profile: Profile, caps: tuple[float, ...], repeats: int) -> dict[str, Any]:
    """Inside a rank: (passes, buckets, pieces, [begin, end]) of work and of transfers; the bytes of those; sizes."""
    from ddplab._buckets import MIB, Bucket, assign_buckets
    from ddplab.hooks.base import HookState
    from ddplab.paced import paced

    by_position = sorted(profile.gradients, key=lambda g: g.position)
    params = dict(zip(by_position, paced(profile).parameters(), strict=True))
    order = [params[g] for g in profile.gradients]
    seen: dict[str, list] = {"work": [], "moved": [], "sent": []}
    sizes = []
    for cap in caps:
        groups = assign_buckets(order, int(cap * MIB), int(cap * MIB))
        buckets = [Bucket(group, i, i == len(groups) - 1) for i, group in enumerate(groups)]
        sizes += [b.buffer().nbytes for b in buckets]
        state, _ = make()
        if not isinstance(state, HookState):
            raise TypeError(f"stages are those of a hook of ddplab, not of {state!r}: calibrate_hook times any other")
        watch, passes = _Watch(state), []
        for _ in range(repeats + 1):
            state.begin()
            for bucket in buckets:
                bucket.buffer().normal_()
            passes.append([watch.bucket(bucket) for bucket in buckets])
        for key in seen:
            seen[key].append([[getattr(bucket, key) for bucket in one] for one in passes[1:]])
        state.close()
    return {key: np.concatenate(parts, axis=1) for key, parts in seen.items()} | {"sizes": sizes}


class _Pieces(NamedTuple):
    """(begin, end) of each piece of work, encoding first, and of each transfer; bytes of each transfer."""

    work: list[tuple[float, float]]
    moved: list[tuple[float, float]]
    sent: list[int]


class _Watch:
    """Looks at the clock before and after each piece of a hook's work and each collective of its wire. All ranks begin
    each of them together: who is through first must not take the processors from those who are not."""

    def __init__(self, state: Any) -> None:
        self.state, self.mark, self.seen = state, 0.0, _Pieces([], [], [])
        for name in COLLECTIVES:
            setattr(state.wire, name, self._timed(getattr(state.wire, name)))

    def bucket(self, bucket: Any) -> _Pieces:
        """One bucket, from encoding to its mean."""
        self.seen = _Pieces([], [], [])
        self._together()
        work = self.state.encode(bucket)
        self._worked()
        self.state.exchange(work)
        self._worked()
        if not self.seen.sent:  # by other ways than the wire: one transfer, with all that it does
            begin, end = self.seen.work.pop()
            return _Pieces([*self.seen.work, (0.0, 0.0), (0.0, 0.0)], [(begin, end)], [0])
        return self.seen

    def _together(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        self.mark = time.perf_counter()

    def _worked(self) -> None:
        self.seen.work.append((self.mark, time.perf_counter()))
        self._together()

    def _timed(self, collective: Callable) -> Callable:
        def timed(tensor: Any) -> Any:
            self._worked()
            before = self.state.wire.bytes
            out = collective(tensor)
            self.seen.moved.append((self.mark, time.perf_counter()))
            self.seen.sent.append(self.state.wire.bytes - before)
            self._together()
            return out

        return timed

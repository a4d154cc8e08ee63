"""What one step of DistributedDataParallel looked like: buckets, two lanes, and the part that sticks out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from ddplab.figures.overlap import OverlapFigure

MIB = 2**20


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of a step; times in seconds since backward began.

    ready_s: its last gradient is there.  start_s, end_s: its transfer, decoding included.  names: its parameters, in
    the order of the buffer (empty where a measurement does not know them).
    """

    index: int
    nbytes: int
    ready_s: float
    start_s: float
    end_s: float
    names: tuple[str, ...] = ()

    @property
    def wait_s(self) -> float:
        """From ready to the start of the transfer: encoding, and buckets before it."""
        return self.start_s - self.ready_s


@dataclass(frozen=True)
class Timeline:
    """One step of one rank, predicted or measured; times in seconds.

    buckets: in the order of communication.  compute_end_s: when backward itself has ended; done_s: when every gradient
    is the mean, both since backward began.  basis: "predicted", "measured" or "paced".  band_s: (5th, 95th percentile)
    of the step where jitter was given, else None.  about: what the numbers rest on, by name.
    """

    buckets: tuple[BucketTimes, ...]
    forward_s: float
    compute_end_s: float
    done_s: float
    optimizer_s: float
    basis: str
    band_s: tuple[float, float] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """forward + backward until every gradient is the mean + optimizer."""
        return self.forward_s + self.done_s + self.optimizer_s

    @property
    def compute_s(self) -> float:
        """The compute lane: forward + backward + optimizer, with what DDP and its hook add to them."""
        return self.forward_s + self.compute_end_s + self.optimizer_s

    @property
    def exposed_s(self) -> float:
        """How long the step waits for communication after backward's own work has ended."""
        return self.done_s - self.compute_end_s

    @property
    def communication_s(self) -> float:
        """How long the communication lane is busy (its intervals united)."""
        busy, until = 0.0, -math.inf
        for b in sorted(self.buckets, key=lambda b: b.start_s):
            busy += max(0.0, b.end_s - max(b.start_s, until))
            until = max(until, b.end_s)
        return busy

    @property
    def hidden(self) -> float:
        """Part of communication that runs beside backward, 0 to 1; 1.0 where there is none."""
        total = self.communication_s
        beside = total - Timeline.communication_s.fget(replace(self, buckets=self._after(self.compute_end_s)))
        return beside / total if total else 1.0

    def _after(self, moment: float) -> tuple[BucketTimes, ...]:
        return tuple(replace(b, start_s=max(b.start_s, moment)) for b in self.buckets if b.end_s > moment)

    def frame(self) -> pd.DataFrame:
        """One row a bucket: bucket, size_MiB, parameters, ready_ms, wait_ms, start_ms, end_ms, exposed_ms."""
        import pandas as pd

        rows = [
            {
                "bucket": b.index,
                "size_MiB": b.nbytes / MIB,
                "parameters": len(b.names) or None,
                "ready_ms": b.ready_s * 1e3,
                "wait_ms": b.wait_s * 1e3,
                "start_ms": b.start_s * 1e3,
                "end_ms": b.end_s * 1e3,
                "exposed_ms": max(0.0, b.end_s - max(b.start_s, self.compute_end_s)) * 1e3,
            }
            for b in self.buckets
        ]
        return pd.DataFrame(rows)

    def figure(self, **options: Any) -> OverlapFigure:
        """This timeline as a picture: `ddplab.OverlapFigure`."""
        from ddplab.figures.overlap import OverlapFigure

        return OverlapFigure(timeline=self, **options)

    def __str__(self) -> str:
        return (
            f"step {self.step_s * 1e3:.4g} ms {self.basis}: compute {self.compute_s * 1e3:.4g} ms, communication "
            f"{self.communication_s * 1e3:.4g} ms in {len(self.buckets)} buckets, {self.exposed_s * 1e3:.4g} ms exposed"
        )

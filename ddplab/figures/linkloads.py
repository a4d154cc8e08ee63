"""Link loads: how many bytes each GPU's link carries in one all-reduce, out and in, for a star, a chain and a ring."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddplab.figures.base import Figure, still_svg
from ddplab.schedule import Schedule, chain, ring, star

SHAPES = {"star": star, "chain": chain, "ring": ring}
RANKS = range(2, 9)


class LinkLoads(Figure):
    """Bars for the link of every rank, both directions; the reader chooses shape, ranks (2 to 8) and payload.

    shape: "star", "chain" or "ring", the one it opens with.  ranks: 2 to 8.  nbytes: the payload S in bytes.
    caption: shown below the figure. Every number is counted from the schedules of `ddplab.schedule`.
    Raises ValueError for another shape, number of ranks or payload.
    """

    module = "linkloads.js"

    def __init__(self, shape: str = "star", ranks: int = 4, *, nbytes: float = 25.6e6, caption: str = "") -> None:
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}; not {shape!r}.")
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks not in RANKS:
            raise ValueError(f"LinkLoads draws {RANKS[0]} to {RANKS[-1]} ranks, not {ranks!r}.")
        if not (isinstance(nbytes, (int, float)) and math.isfinite(nbytes) and nbytes >= 1):
            raise ValueError(f"nbytes is the payload in bytes, at least 1; not {nbytes!r}.")
        loads = {name: {str(n): link_loads(build(n)) for n in RANKS} for name, build in SHAPES.items()}
        super().__init__(caption, shape=shape, ranks=ranks, nbytes=nbytes, loads=loads)

    @property
    def _now(self) -> dict[str, Any]:
        return self.state["loads"][self.state["shape"]][str(self.state["ranks"])]

    def text(self) -> str:
        """Bytes of every link, and the busiest over the mean."""
        size, now = self.state["nbytes"] / 1e6, self._now
        links = zip(now["sent"], now["received"], strict=True)
        rows = "; ".join(
            f"GPU{r} {sum(o) * size:.4g} MB out, {sum(i) * size:.4g} MB in" for r, (o, i) in enumerate(links)
        )
        return (
            f"{self.state['shape']} of {self.state['ranks']} GPUs, {size:.4g} MB each: {rows}. "
            f"Busiest direction over the mean: {now['busiest_over_mean']:.2f}. Busy {now['busy']:.1%} of the time."
        )

    def svg(self) -> str:
        """The opening frame: two bars a rank, out above in."""
        size, now, n = self.state["nbytes"] / 1e6, self._now, self.state["ranks"]
        parts, scale = [], 300 / (n - 1)
        for r, links in enumerate(zip(now["sent"], now["received"], strict=True)):
            parts.append(f'<text x="8" y="{44 * r + 30}">GPU{r}</text>')
            for row, (way, (adds, copies)) in enumerate(zip(("out", "in"), links, strict=True)):
                y, wide = 44 * r + 10 + 17 * row, (adds + copies) * scale
                parts.append(
                    f'<text x="60" y="{y + 11}">{way}</text><rect x="84" y="{y}" width="{wide:.1f}" height="13"'
                    f' fill="#9cc3ef" stroke="#2076d6"/><rect x="84" y="{y}" width="{adds * scale:.1f}" height="13"'
                    f' fill="#2076d6"/><text x="{90 + wide:.1f}" y="{y + 11}">{(adds + copies) * size:.4g} MB</text>'
                )
        return still_svg(480, 44 * n + 12, "".join(parts))


def link_loads(schedule: Schedule) -> dict[str, Any]:
    """What one all-reduce puts on the links, in buffers of S bytes, each rank on a link of its own.

    sent, received: for every rank (in the transfers that add, in those that copy).  pairs: (source, destination,
    buffers).  busiest_over_mean: of all directions of all links.  time: in S/B, with B the rate of a link in one
    direction, what the steps of the schedule take when latency costs nothing.  busy: the share of that time in which a
    direction of a link carries something, on average.
    """
    n, chunks = schedule.ranks, schedule.chunks
    halves = [schedule.reduce, ~schedule.reduce]
    sent, received = (
        np.stack([np.bincount(end[half], minlength=n) for half in halves], axis=1)
        for end in (schedule.src, schedule.dst)
    )
    busiest = 0
    for end in (schedule.src, schedule.dst):
        per_step = np.bincount(schedule.step * n + end, minlength=schedule.steps * n).reshape(-1, n).max(axis=1)
        busiest = np.maximum(busiest, per_step)
    pair, count = np.unique(schedule.src * n + schedule.dst, return_counts=True)
    both = np.concatenate([sent.sum(axis=1), received.sum(axis=1)])
    return {
        "sent": (sent / chunks).tolist(),
        "received": (received / chunks).tolist(),
        "pairs": [[int(p) // n, int(p) % n, c / chunks] for p, c in zip(pair, count.tolist(), strict=True)],
        "busiest_over_mean": float(both.max() / both.mean()),
        "time": float(np.sum(busiest) / chunks),
        "busy": float(both.mean() / np.sum(busiest)),
    }

"""What a collective costs: `predict` any schedule, the ring in closed form, and `fit` the model to measured times.

The model itself is in `ddplab.pricing`, links and topologies in `ddplab.link`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

from ddplab import schedule as builders
from ddplab.link import EMULATED_BURST_BYTES, FIELD_LINKS, TCP_EFFICIENCY, Link, Topology
from ddplab.pricing import Prediction, predict
from ddplab.transfers import Schedule, count, whole

__all__ = [
    "EMULATED_BURST_BYTES",
    "FIELD_LINKS",
    "TCP_EFFICIENCY",
    "Fit",
    "Link",
    "Prediction",
    "Topology",
    "fit",
    "predict",
    "ring_seconds",
]

Builder = Callable[[int], Schedule]

_LEAST_POINTS = 3  # two unknowns and one residual
_LEAST_ANGLE = 1e-6  # below this the two columns of the system point the same way


def ring_seconds(n: int, nbytes: float, link: Link | str) -> float:
    """The ring in closed form, for any number of ranks: 2 (n - 1) (alpha + nbytes / (n B)), B = `link.payload_Bps`.

    One rank a host, no burst, chunks of equal size. Source: NCCL 2.30.7,
    src/graph/tuning.cc:289, 379, 412 and 653; claim C27.
    """
    n, link = count(n, "ring_seconds' number of ranks", error=ValueError), Link.parse(link)
    if not isinstance(nbytes, Real) or not 0 <= nbytes < math.inf:
        raise ValueError(f"nbytes must be 0 or more, not {nbytes!r}.")
    return 2 * (n - 1) * (link.latency_s + nbytes / (n * link.payload_Bps)) if nbytes else 0.0


@dataclass(frozen=True, eq=False)
class Fit:
    """seconds = alpha * steps + beta * bytes through the busiest link of each step.

    alpha_s: seconds a step.  beta_s_per_byte: seconds a payload byte.  residuals: measured over fitted minus 1, one a
    point, in the order given, float64.
    """

    family: str
    alpha_s: float
    beta_s_per_byte: float
    residuals: np.ndarray = field(repr=False)
    builder: Builder = field(repr=False)

    @property
    def payload_Bps(self) -> float:
        """Bytes of payload a second: 1 / beta."""
        return 1 / self.beta_s_per_byte if self.beta_s_per_byte else math.inf

    @property
    def link(self) -> Link:
        """The fitted link, in payload bytes (wire efficiency 1, no burst), to predict with."""
        return Link(self.payload_Bps, latency_s=self.alpha_s, wire_efficiency=1.0, name="fitted")

    @property
    def worst(self) -> float:
        """Largest residual by magnitude."""
        return float(np.abs(self.residuals).max())

    def seconds(self, ranks: int, nbytes: int) -> float:
        """What the fit says for another point."""
        steps, load = _terms(self.builder(ranks), nbytes)
        return self.alpha_s * steps + self.beta_s_per_byte * load

    def __repr__(self) -> str:
        return (
            f"<Fit of {self.family} to {len(self.residuals)} points: alpha {self.alpha_s * 1e6:.4g} us a step, "
            f"beta {self.beta_s_per_byte * 1e9:.4g} ns/B ({self.payload_Bps / 1e9:.4g} GB/s), "
            f"worst residual {self.worst:.1%}>"
        )


def fit(points: Iterable[Sequence[float]], family: str | Builder = "ring") -> Fit:
    """Least squares on relative errors, so that small and large messages weigh alike.

    points: (ranks, nbytes, seconds) measured with one rank a host, at least 3.  family: "ring", "star", ... or a
    builder, a function from a number of ranks to a `Schedule`. Neither alpha nor beta comes out negative: the one that
    would is 0 and the other is fitted alone. Raises ValueError for too few points, impossible ones (named), or points
    that cannot tell alpha from beta.
    """
    if isinstance(family, str):
        names = ("ring", "star", "chain", "direct", "tree", "halving_doubling")
        if family not in names:
            raise ValueError(f"No schedule family is called {family!r}: take {', '.join(names)}, or pass a builder.")
        family = getattr(builders, family)
    points = [_point(i, point) for i, point in enumerate(points)]
    if len(points) < _LEAST_POINTS:
        raise ValueError(f"A fit needs at least {_LEAST_POINTS} points (ranks, nbytes, seconds), not {len(points)}.")
    schedules = {ranks: family(ranks) for ranks, _, _ in points}
    terms = np.array([_terms(schedules[ranks], nbytes) for ranks, nbytes, _ in points], dtype=float)
    seconds = np.array([s for _, _, s in points])
    system = terms / seconds[:, None]
    lengths = np.linalg.norm(system, axis=0)
    if np.linalg.svd(system / lengths, compute_uv=False)[-1] < _LEAST_ANGLE:
        raise ValueError(
            "These points cannot tell latency from rate, for bytes grow as steps do in all of them: vary the size, "
            "from a few kB to many MB."
        )
    answer = np.linalg.lstsq(system / lengths, np.ones(len(points)), rcond=None)[0] / lengths
    if (answer < 0).any():
        kept = int(np.argmax(answer))
        answer = np.zeros(2)
        answer[kept] = system[:, kept].sum() / lengths[kept] ** 2
    alpha, beta = map(float, answer)
    name = next(iter(schedules.values())).name
    return Fit(name, alpha, beta, seconds / (terms @ answer) - 1, family)


def _terms(schedule: Schedule, nbytes: int) -> tuple[float, float]:
    """(steps that carry bytes, bytes through the busiest link of each step, summed), with one rank a host."""
    unit = Topology(schedule.ranks, link=Link(1.0, latency_s=0.0, wire_efficiency=1.0))  # a second is a byte
    loads = predict(schedule, nbytes, unit).step_seconds
    return float(np.count_nonzero(loads)), float(loads.sum())


def _point(index: int, point: Sequence[float]) -> tuple[int, int, float]:
    try:
        ranks, nbytes, seconds = point
    except (TypeError, ValueError):
        raise ValueError(f"Point {index} must be (ranks, nbytes, seconds), not {point!r}.") from None
    ranks = count(whole(ranks), f"Point {index}'s ranks", least=2, error=ValueError)
    nbytes = count(whole(nbytes), f"Point {index}'s nbytes", error=ValueError)
    if not isinstance(seconds, Real) or not 0 < seconds < math.inf:
        raise ValueError(f"Point {index}'s seconds must be a positive number, not {seconds!r}.")
    return ranks, nbytes, float(seconds)

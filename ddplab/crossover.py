"""When does compression pay? From which link speed down a method beats plain fp32 gradients.

Compressing trades processor time for bytes. What it costs does not depend on the link, what it saves does: on a slow
enough link every method that sends less wins, on a fast enough one none does. The speed in between is the method's
*crossover*. It has a closed form, for the time of a step is linear in the seconds that a byte takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddplab._arguments import choice, flag, instance, several
from ddplab.link import Link
from ddplab.transfers import count, number

if TYPE_CHECKING:
    import pandas as pd

    from ddplab.figures.crossover import CrossoverFigure

BACKWARD = 2 / 3  # of compute: two matrix products where forward has one
ROUTINGS = {
    "ring": "an all-reduce of encoded values, which must be summable",
    "two-phase": "everybody sends each shard to its owner, who averages, encodes again and sends to all",
    "all-gather": "everybody gets everybody's encoded values and adds by himself",
}


@dataclass(frozen=True)
class Compressor:
    """One way to exchange gradients: how many bytes it sends, on which route, and what its codec costs.

    factor: encoded bytes over gradient bytes, of one rank's whole gradient.  routing: "ring", "two-phase" or
    "all-gather".  encode_s_per_byte, decode_s_per_byte: seconds a byte of (decoded) gradient. Encoding happens in
    backward, the rest beside it: a two-phase exchange decodes twice and encodes one shard again, an all-gather decodes
    what each rank sent.  Raises ValueError for numbers below 0 and for another routing.
    """

    name: str
    factor: float = 1.0
    routing: str = "ring"
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        instance(self.name, str, "a compressor's name is text")
        for field in ("factor", "encode_s_per_byte", "decode_s_per_byte"):
            number(getattr(self, field), f"a compressor's {field}", 0)
        choice(self.routing, "a compressor's routing", ROUTINGS)

    def bytes_sent(self, ranks: int, nbytes: float) -> float:
        """Payload bytes that each rank sends, and receives, for `nbytes` of gradient. ValueError for fewer than 1 rank
        or 0 bytes, here and below."""
        ranks, nbytes = _size(ranks, nbytes)
        return (ranks - 1 if self.routing == "all-gather" else 2 * (ranks - 1) / ranks) * self.factor * nbytes

    def latencies(self, ranks: int) -> int:
        """Messages that wait for each other. Two-phase: one round to all owners at once, then a ring of shards."""
        ranks, _ = _size(ranks)
        return {"ring": 2 * (ranks - 1), "two-phase": ranks, "all-gather": ranks - 1}[self.routing] * (ranks > 1)

    def encoding_s(self, nbytes: float) -> float:
        """Seconds that encoding adds to backward."""
        return self.encode_s_per_byte * _size(1, nbytes)[1]

    def beside_s(self, ranks: int, nbytes: float) -> float:
        """Seconds of decoding (and encoding again), which stand beside backward, with the transfer."""
        ranks, nbytes = _size(ranks, nbytes)
        e, d = self.encode_s_per_byte, self.decode_s_per_byte
        times = {"ring": d, "two-phase": 2 * d + e / ranks, "all-gather": ranks * d}
        return times[self.routing] * nbytes

    def seconds(
        self, ranks: int, nbytes: float, link: Link | str, *, compute_s: float = 0.0, overlap: bool = False
    ) -> float:
        """Seconds of one step: compute, encoding, exchange, decoding. `link` gives rate and latency.

        compute_s: forward, backward and optimizer.  overlap: False adds all of it up; True hides the exchange behind
        backward (two thirds of compute) and encoding: rest + max(backward + encoding, exchange + decoding), the bound
        for many small buckets. `ddplab.predict_step` knows the buckets.
        """
        link, (ranks, nbytes) = Link.parse(link), _size(ranks, nbytes)
        number(compute_s, "compute_s", 0), flag(overlap, "overlap")
        lane, fixed, sent = self._terms(ranks, nbytes, link, compute_s * BACKWARD)
        beside = fixed + sent / link.payload_Bps
        return compute_s * (1 - BACKWARD) + (max(lane, beside) if overlap else lane + beside)

    def _terms(self, ranks: int, nbytes: float, link: Link, backward_s: float) -> tuple[float, float, float]:
        """(seconds of backward with encoding, seconds beside it that no rate changes, payload bytes beside it)."""
        if ranks == 1:
            return backward_s, 0.0, 0.0
        fixed = self.latencies(ranks) * link.latency_s + self.beside_s(ranks, nbytes)
        return backward_s + self.encoding_s(nbytes), fixed, self.bytes_sent(ranks, nbytes)


def _size(ranks: int, nbytes: float = 0) -> tuple[int, float]:
    return count(ranks, "ranks", error=ValueError), number(nbytes, "nbytes", 0)


FP32 = Compressor("fp32")

# What a perfect implementation approaches: no time for encoding, scales and indices of large buckets only.
FREE = (
    FP32,
    Compressor("fp16", 1 / 2),
    Compressor("int8", 1 / 4, "two-phase"),
    Compressor("1-bit", 1 / 32, "two-phase"),
    Compressor("top-k 1%", 0.02, "all-gather"),  # 4 bytes of value and 4 of index for one element in a hundred
)


def crossover(
    compressors: Iterable[Compressor] = FREE,
    ranks: int = 4,
    nbytes: float = 102_228_128,
    link: Link | str = "1gbit",
    *,
    compute_s: float = 0.0,
    overlap: bool = False,
    baseline: Compressor = FP32,
) -> Crossover:
    """From which link speed down each compressor pays, and by how much on `link`.

    nbytes: bytes of fp32 gradient of one step; the default is a ResNet-50.  link: its latency and wire efficiency hold
    for all speeds.  compute_s, overlap: as for `Compressor.seconds`.  baseline: what it must beat.
    Raises ValueError or TypeError for what makes no sense.
    """
    ranks = count(ranks, "ranks", error=ValueError)
    compressors = tuple(several(compressors, "compressors are a list of ddplab.Compressor objects"))
    for one in (*compressors, baseline):
        _compressor(one)
    number(nbytes, "nbytes", above=True), number(compute_s, "compute_s", 0), flag(overlap, "overlap")
    return Crossover(compressors, ranks, nbytes, Link.parse(link), compute_s, overlap, baseline)


def _compressor(one: Any) -> Compressor:
    return instance(one, Compressor, "crossover compares ddplab.Compressor objects")


@dataclass(frozen=True)
class Crossover:
    """Compressors against a baseline over link speeds. Made by `crossover`."""

    compressors: tuple[Compressor, ...]
    ranks: int
    nbytes: float
    link: Link
    compute_s: float
    overlap: bool
    baseline: Compressor

    def seconds(self, compressor: Compressor, rate_Bps: float | None = None) -> float:
        """Seconds of a step at this rate on the wire, bytes a second; None is the link's own."""
        _compressor(compressor)
        link = self.link if rate_Bps is None else replace(self.link, rate_Bps=rate_Bps)
        return compressor.seconds(self.ranks, self.nbytes, link, compute_s=self.compute_s, overlap=self.overlap)

    def speedup(self, compressor: Compressor, rate_Bps: float | None = None) -> float:
        """The baseline's time over this one's: above 1 it pays. 1.0 where there is nothing to do."""
        seconds = self.seconds(compressor, rate_Bps)
        return self.seconds(self.baseline, rate_Bps) / seconds if seconds else 1.0

    def rate_Bps(self, compressor: Compressor) -> float:
        """The crossover: on every slower link the compressor pays. Bytes a second on the wire.

        inf: it pays on any link.  0.0: there is no such speed, because it sends as much as the baseline or more.

        Without overlap both times are a + v/B, and they cross at B = (v0 - v) / (a - a0). With overlap the baseline's
        time max(p0, a0 + v0/B) must exceed max(p, a + v/B): below min(v0 / (p - a0), (v0 - v) / (a - a0)).
        """
        _compressor(compressor)
        at = self.ranks, self.nbytes, self.link, self.compute_s * BACKWARD
        (p0, a0, v0), (p, a, v) = self.baseline._terms(*at), compressor._terms(*at)
        if not self.overlap:
            p0, a0, p, a = -math.inf, a0 + p0, -math.inf, a + p
        if v > v0 or (v == v0 and a >= a0):
            return 0.0
        slow = max(0.0, (p - a0) / v0, (a - a0) / (v0 - v) if v < v0 else 0.0)  # s a byte above which it surely pays
        if p0 > p and p0 > a + v * slow:  # and it has paid before that, too: the baseline's compute lane is longer
            return math.inf
        return self.link.rate_Bps / self.link.payload_Bps / slow if slow else math.inf

    def frame(self) -> pd.DataFrame:
        """One row a compressor: compressor, routing, sent_MB (a rank, one way), of_baseline (its bytes over the
        baseline's), encode_ms (encoding), beside_ms (latency, decoding), step_ms and speedup on `link`,
        crossover_Gbps (on the wire; inf pays always, 0 never).
        """
        import pandas as pd

        base, rows = self.baseline.bytes_sent(self.ranks, self.nbytes), []
        for one in self.compressors:
            _, fixed, sent = one._terms(self.ranks, self.nbytes, self.link, 0.0)
            rows.append(
                {
                    "compressor": one.name,
                    "routing": one.routing,
                    "sent_MB": sent / 1e6,
                    "of_baseline": sent / base if base else math.nan,
                    "encode_ms": one.encoding_s(self.nbytes) * 1e3,
                    "beside_ms": fixed * 1e3,
                    "step_ms": self.seconds(one) * 1e3,
                    "speedup": self.speedup(one),
                    "crossover_Gbps": self.rate_Bps(one) * 8 / 1e9,
                }
            )
        return pd.DataFrame(rows)

    def figure(self, points: Sequence[Any] | Any = (), **options: Any) -> CrossoverFigure:
        """The chart with its sliders; points: measured ones, see `ddplab.CrossoverFigure`."""
        from ddplab.figures.crossover import CrossoverFigure

        return CrossoverFigure(self, points, **options)

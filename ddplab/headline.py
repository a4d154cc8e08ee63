"""A headline as arithmetic: what three published numbers imply, and what three measured ones do. No hardware needed.

"Compression takes communication from 120 to 45 ms a step, and training gets 1.7 times faster": two times and a ratio
fix the compute time, the bandwidth, the bits a value and the scaling efficiency. Whether these fit together is a
question of arithmetic alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddplab.transfers import count, number

RESNET50_PARAMETERS = 25_557_032
FP32_BITS = 32


@dataclass(frozen=True)
class Headline:
    """Communication took `before_s` a step, with compression it takes `after_s`, and a step is `speedup` times faster.

    parameters: fp32 values a step.  ranks: of the ring.  ValueError for numbers that cannot be a headline. Made by
    `headline`.
    """

    before_s: float
    after_s: float
    speedup: float
    parameters: int
    ranks: int

    @property
    def nbytes(self) -> int:
        """Bytes of the fp32 gradients."""
        return 4 * self.parameters

    @property
    def compute_s(self) -> float:
        """C of (C + before) / (C + after) = speedup: the computing, if nothing of the communication is hidden."""
        return (self.before_s - self.speedup * self.after_s) / (self.speedup - 1)

    @property
    def overlapped_compute_s(self) -> float:
        """C of max(C, before) / max(C, after) = speedup: the computing, if everything is hidden that can be."""
        return self.before_s / self.speedup

    @property
    def step_s(self) -> tuple[float, float]:
        """The step before and after, nothing hidden."""
        return self.compute_s + self.before_s, self.compute_s + self.after_s

    @property
    def efficiency(self) -> tuple[float, float]:
        """Scaling efficiency before and after, nothing hidden: computing over step."""
        return tuple(self.compute_s / step for step in self.step_s)

    @property
    def ceiling(self) -> float:
        """The speed-up of communication that costs nothing, against before."""
        return self.step_s[0] / self.compute_s

    @property
    def busbw_Bps(self) -> float:
        """Bytes a second through every link of a ring that takes `before_s`: 2 (N - 1) / N of the gradients."""
        return 2 * (self.ranks - 1) / self.ranks * self.nbytes / self.before_s

    @property
    def bits(self) -> float:
        """Bits a value on the wire, if the time is that of the bytes."""
        return FP32_BITS * self.after_s / self.before_s

    @property
    def fixed_s(self) -> float:
        """If fp16 did it: the a of time = a + b * bytes through both points. Negative: it cannot have, alone."""
        return 2 * self.after_s - self.before_s

    def worth(self, busbw_Bps: float) -> float:
        """The speed-up that the same compression brings on a link of this bus bandwidth, with nothing hidden."""
        link = 2 * (self.ranks - 1) / self.ranks * self.nbytes / number(busbw_Bps, "busbw_Bps", above=True)
        return (self.compute_s + link) / (self.compute_s + link * self.after_s / self.before_s)


def headline(
    before_s: float = 0.120,
    after_s: float = 0.045,
    speedup: float = 1.7,
    parameters: int = RESNET50_PARAMETERS,
    ranks: int = 8,
) -> Headline:
    """What a headline implies; the defaults are the article's. ValueError where no compute time makes it true.

    A step without any computing would gain before / after; no step gains more.
    """
    number(after_s, "after_s", 0), number(before_s, "before_s", above=True), number(speedup, "speedup", 1, above=True)
    count(parameters, "parameters", error=ValueError), count(ranks, "ranks", least=2, error=ValueError)
    if after_s >= before_s:
        raise ValueError(f"after_s is less than before_s, {before_s:g}, not {after_s:g}: otherwise nothing was gained")
    if speedup * after_s >= before_s:
        raise ValueError(
            f"{before_s:g} s that become {after_s:g} make no step {speedup:g} times faster, "
            f"not even one without computing: that would be {before_s / after_s:.3g} times"
        )
    return Headline(before_s, after_s, speedup, parameters, ranks)


@dataclass(frozen=True)
class ThreeRuns:
    """Three measured steps, and what they say without a timeline; seconds. Made by `three_runs`.

    noop_s: a hook that sends nothing.  fp32_s: DDP as it is.  fp16_s: half the bytes.
    """

    noop_s: float
    fp32_s: float
    fp16_s: float
    parameters: int
    ranks: int

    @property
    def exposed_s(self) -> float:
        """What an fp32 step waits for communication."""
        return self.fp32_s - self.noop_s

    @property
    def communication_s(self) -> float:
        """fp32's communication: fp16 saves half of it. A lower bound if fp16 waits for nothing, or its cast costs."""
        return 2 * (self.fp32_s - self.fp16_s)

    @property
    def hidden_s(self) -> float:
        """The part of it that runs beside computing; never negative."""
        return max(0.0, self.communication_s - self.exposed_s)

    @property
    def busbw_Bps(self) -> float:
        """Bus bandwidth of fp32's communication."""
        return 2 * (self.ranks - 1) / self.ranks * 4 * self.parameters / self.communication_s

    @property
    def efficiency(self) -> float:
        """Scaling efficiency of fp32: computing over step."""
        return self.noop_s / self.fp32_s

    @property
    def ceiling(self) -> float:
        """What free communication would bring."""
        return self.fp32_s / self.noop_s

    def step_s(self, bits: float) -> float:
        """A step with `bits` a value on the wire and a codec that costs nothing: what was hidden stays hidden."""
        return self.noop_s + max(0.0, self.communication_s * number(bits, "bits", 0) / FP32_BITS - self.hidden_s)

    def bits_for(self, speedup: float) -> float | None:
        """Bits a value that make a step `speedup` times faster than fp32, or None: not even 0 bits do."""
        left = self.fp32_s / number(speedup, "speedup", above=True) - self.noop_s
        return FP32_BITS * (left + self.hidden_s) / self.communication_s if left >= 0 else None


def three_runs(
    noop_s: float, fp32_s: float, fp16_s: float, parameters: int = RESNET50_PARAMETERS, ranks: int = 4
) -> ThreeRuns:
    """What three measured step times say. ValueError where they contradict each other, naming how."""
    for name, value in (("noop_s", noop_s), ("fp32_s", fp32_s), ("fp16_s", fp16_s)):
        number(value, name, above=True)
    count(parameters, "parameters", error=ValueError), count(ranks, "ranks", least=2, error=ValueError)
    if noop_s >= fp32_s:
        raise ValueError(
            f"fp32 ({fp32_s:g} s) is no slower than no communication at all ({noop_s:g} s): nothing is exposed, "
            "and nothing about the link can be read off"
        )
    if fp16_s >= fp32_s:
        raise ValueError(
            f"fp16 ({fp16_s:g} s) is no faster than fp32 ({fp32_s:g} s): its cast costs more than its bytes save, "
            "and the link's speed cannot be read off"
        )
    return ThreeRuns(noop_s, fp32_s, min(max(fp16_s, noop_s), fp32_s), parameters, ranks)

"""The crossover chart: speed-up by compression over link speed, predicted lines and measured points, with sliders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from ddplab.crossover import BACKWARD, Compressor, Crossover
from ddplab.figures.base import Figure, still_svg
from ddplab.figures.stepper import COLOURS

if TYPE_CHECKING:
    import pandas as pd

RANKS = tuple(2**k for k in range(1, 11))
BYTES = (4e6, 25.6e6, 46.8e6, 102.2e6, 438e6, 1.42e9, 5.2e9, 28e9)
COMPUTE = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
FASTER = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
LOW, HIGH = -2, 4  # powers of ten of Gbit/s, as in the JavaScript
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 2 1 2", "1 4", "14 3 3 3")  # as in the JavaScript
MOST = len(DASHES)
_SHOWN = ("speedup", "time")


class CrossoverFigure(Figure):
    """Each compressor's speed-up over link speed; where a line falls below 1 the compressor stops to pay.

    prediction: what `ddplab.crossover` returns, with at most 8 compressors. The reader moves ranks, bytes of gradient,
        compute, the speed of the codecs and a link to read off; and chooses whether communication overlaps. The figure
        computes as `Crossover` does.
    points: measured ones, a DataFrame or rows (dicts) with compressor, rate_Gbps (on the wire) and speedup, for the
        ranks, bytes, compute and overlap of `prediction`: the figure shows them there only.
    show: "speedup" or "time" (of a step, predicted).
    Raises ValueError or TypeError for other things.
    """

    module = "crossover.js"

    def __init__(
        self,
        prediction: Crossover,
        points: pd.DataFrame | Sequence[dict[str, Any]] = (),
        *,
        show: str = "speedup",
        caption: str = "",
    ) -> None:
        if not isinstance(prediction, Crossover):
            raise TypeError(f"CrossoverFigure draws what ddplab.crossover returns, not {prediction!r}")
        if len(prediction.compressors) > MOST:
            raise ValueError(f"at most {MOST} compressors can be told apart, not {len(prediction.compressors)}")
        if show not in _SHOWN:
            raise ValueError(f'show is "speedup" or "time", not {show!r}')
        self.prediction, self.points = prediction, _checked(points, prediction)
        link, names = prediction.link, {"ranks": RANKS, "nbytes": BYTES, "compute_s": COMPUTE}
        lists = {key: sorted({*some, getattr(prediction, key)}) for key, some in names.items()}
        rates = [10 ** (LOW + i / 20) for i in range((HIGH - LOW) * 20 + 1)]
        rates = sorted({*rates, link.rate_Bps * 8 / 1e9})
        super().__init__(
            caption,
            compressors=[facts(one) for one in prediction.compressors],
            baseline=facts(prediction.baseline),
            latency_s=link.latency_s,
            efficiency=link.payload_Bps / link.rate_Bps,
            backward=BACKWARD,
            points=self.points,
            measured_at={key: lists[key].index(getattr(prediction, key)) for key in lists},
            measured_overlap=prediction.overlap,
            lists=lists,
            rank_at=lists["ranks"].index(prediction.ranks),
            size_at=lists["nbytes"].index(prediction.nbytes),
            compute_at=lists["compute_s"].index(prediction.compute_s),
            faster=list(FASTER),
            faster_at=0,
            rates=rates,
            rate_at=rates.index(link.rate_Bps * 8 / 1e9),
            overlap=prediction.overlap,
            show=show,
        )

    def text(self) -> str:
        """Who pays on which links, in words."""
        at = self.prediction
        said = [f"{one.name} {pays(at.rate_Bps(one))}" for one in at.compressors if one != at.baseline]
        measured = f" {len(self.points)} measured points." if self.points else ""
        return f"{at.ranks} ranks, {at.nbytes / 1e6:.4g} MB of gradients: {'; '.join(said)}.{measured}"

    def svg(self) -> str:
        """The opening state."""
        left, right, top, bottom = 64, 640, 44, 300
        at, grid = self.prediction, [LOW + i / 10 for i in range((HIGH - LOW) * 10 + 1)]
        is_time = self.state["show"] == "time"
        drawn = [one for one in at.compressors if is_time or one != at.baseline]

        def value(one: Compressor, power: float) -> float:
            rate = 10**power * 1e9 / 8
            return at.seconds(one, rate) * 1e3 if is_time else at.speedup(one, rate)

        lines = [[value(one, power) for power in grid] for one in drawn]
        seen = [v for line in lines for v in line] + [p["speedup"] for p in self.points if not is_time] + [1.0]
        low, high = math.floor(math.log10(min(seen))), math.ceil(math.log10(max(seen)) + 1e-9)

        def x(power: float) -> float:
            return left + (power - LOW) / (HIGH - LOW) * (right - left)

        def y(v: float) -> float:
            return bottom - (math.log10(v) - low) / max(1, high - low) * (bottom - top)

        parts = [f'<text x="10" y="18" font-size="11">{_escaped(self.text())}</text>']
        for decade in range(low, high + 1):
            strong = ' stroke-width="2"' * (decade == 0 and not is_time)
            label = f"{10.0**decade:g} ms" if is_time else f"{10.0**decade:g}x"
            parts.append(f'<path d="M{left} {y(10.0**decade):.1f}H{right}" stroke="#ccc"{strong}/>')
            parts.append(f'<text x="{left - 5}" y="{y(10.0**decade) + 4:.1f}" text-anchor="end">{label}</text>')
        for power in range(LOW, HIGH + 1):
            parts.append(f'<path d="M{x(power):.1f} {top}V{bottom}" stroke="#ddd"/>')
            parts.append(
                f'<text x="{x(power):.1f}" y="{bottom + 16}" text-anchor="middle">{_speed(10.0**power)}</text>'
            )
        for one, line in zip(drawn, lines, strict=True):
            i = at.compressors.index(one)
            path = "L".join(f"{x(power):.1f} {y(v):.1f}" for power, v in zip(grid, line, strict=True))
            dash = f' stroke-dasharray="{DASHES[i]}"' * bool(DASHES[i])
            parts.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[i]}" stroke-width="2"{dash}/>')
            parts.append(
                f'<text x="{right + 5}" y="{bottom - 16 * i:g}" fill="{COLOURS[i]}">{_escaped(one.name)}</text>'
            )
        for p in self.points if not is_time else ():
            i = [one.name for one in at.compressors].index(p["compressor"])
            cx, cy = x(math.log10(p["rate_Gbps"])), y(p["speedup"])
            parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4.5" fill="{COLOURS[i]}" stroke="#222"/>')
        return still_svg(740, bottom + 26, "".join(parts))


def facts(one: Compressor) -> list[Any]:
    """A compressor as the JavaScript wants it: name, factor, routing, encode and decode seconds a byte."""
    return list(astuple(one))


def pays(rate_Bps: float) -> str:
    """A crossover in words."""
    if rate_Bps in (0.0, math.inf):
        return "pays on any link" if rate_Bps else "never pays"
    return f"pays below {_speed(rate_Bps * 8 / 1e9)}"


def _speed(gbps: float) -> str:
    for limit, factor, unit in ((1, 1e3, "Mbit/s"), (1e3, 1, "Gbit/s"), (math.inf, 1e-3, "Tbit/s")):
        if gbps < limit * 0.9995:
            return f"{gbps * factor:.3g} {unit}"
    raise ValueError(f"no link speed: {gbps!r}")


def _checked(points: Any, prediction: Crossover) -> list[dict[str, Any]]:
    rows = points.to_dict("records") if hasattr(points, "to_dict") else list(points)
    names = [one.name for one in prediction.compressors]
    checked = []
    for i, row in enumerate(rows):
        try:
            name, rate, speedup = row["compressor"], float(row["rate_Gbps"]), float(row["speedup"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"point {i} needs compressor, rate_Gbps and speedup, not {row!r}") from None
        if name not in names:
            raise ValueError(f"point {i}: no compressor of the prediction is called {name!r}, but {', '.join(names)}")
        if not (0 < rate < math.inf and 0 < speedup < math.inf):
            raise ValueError(f"point {i}: rate_Gbps and speedup are positive numbers, not {rate!r} and {speedup!r}")
        checked.append({"compressor": name, "rate_Gbps": rate, "speedup": speedup})
    return checked


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")

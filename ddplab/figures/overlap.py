"""The overlap timeline: what a step of DDP hides behind backward and what sticks out, predicted and measured."""

from __future__ import annotations

import html
from typing import Any

from ddplab.figures.base import Figure, still_svg
from ddplab.figures.stepper import COLOURS
from ddplab.link import Link
from ddplab.profile import Profile
from ddplab.steptimes import Timeline
from ddplab.timeline import CAPS_MB, Compression, predict_step

RANKS = tuple(2**k for k in range(11))
GBITS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 25, 50, 100, 200, 400, 800, 1600, 2400)
FACTORS = {"none": 1.0, "fp16": 1 / 2, "int8": 1 / 4, "1 bit": 1 / 32}


class OverlapFigure(Figure):
    """One step of DDP: the compute lane, the communication lane, the exposed part hatched.

    profile: a `ddplab.Profile`. The reader moves ranks (1 to 1024), link, bucket cap, compression, the cost of encoding
        and the slowdown of compute; the figure predicts again by itself, as `ddplab.predict_step` does with a ring.
    ranks, link, bucket_cap_mb, compression ("none", "fp16", "int8", "1 bit"), encode_ns (a byte of gradient, where
        something is compressed), slowdown, lanes: where it opens.  The link's latency and wire efficiency hold for all
        links of the slider.
    timeline: a `ddplab.Timeline`, most often `measure_timeline(...)`, drawn below on the same axis; or alone, without a
        profile and without sliders.
    Raises ValueError where there is nothing to draw or a setting is not possible, TypeError for another kind of thing.
    """

    module = "overlap.js"

    def __init__(
        self,
        profile: Profile | None = None,
        *,
        ranks: int = 4,
        link: str | Link = "1gbit",
        bucket_cap_mb: float | None = 25,
        compression: str = "none",
        encode_ns: float = 0.0,
        slowdown: float = 1.0,
        lanes: int = 1,
        timeline: Timeline | None = None,
        caption: str = "",
    ) -> None:
        if profile is None and timeline is None:
            raise ValueError("OverlapFigure draws a profile, a timeline or both; it got neither")
        if timeline is not None and not isinstance(timeline, Timeline):
            raise TypeError(f"timeline is a ddplab.Timeline (measure_timeline), not {type(timeline).__name__}")
        self.timeline, self.predicted, state = timeline, None, {}
        if profile is not None:
            if compression not in FACTORS:
                raise ValueError(f"compression is {', '.join(FACTORS)}, not {compression!r}")
            if not (isinstance(encode_ns, (int, float)) and 0 <= encode_ns <= 2):
                raise ValueError(f"encode_ns is 0 to 2 ns a byte, not {encode_ns!r}")
            link = Link.parse(link)
            factor = FACTORS[compression]
            how = Compression(compression, factor, encode_ns * 1e-9 if factor < 1 else 0.0)
            options = {"bucket_cap_mb": bucket_cap_mb, "slowdown": slowdown, "lanes": lanes}
            self.predicted = predict_step(profile, ranks, link, compression=how, **options)
            rates = sorted({*(g * 1e9 / 8 for g in GBITS), link.rate_Bps})
            caps = sorted({*CAPS_MB, bucket_cap_mb, None}, key=lambda cap: 24.9 if cap is None else cap)
            state = {
                "ranks": (all_ranks := sorted({*RANKS, ranks})),
                "rank_at": all_ranks.index(ranks),
                "links": [_facts(rate, link) for rate in rates],
                "link_at": rates.index(link.rate_Bps),
                "caps": caps,
                "cap_at": caps.index(bucket_cap_mb),
                "compressions": list(FACTORS.items()),
                "compression": compression,
                "encode_ns": encode_ns,
                "slowdown": slowdown,
                "lanes": lanes,
                "profile": {
                    "forward": profile.forward_s,
                    "backward": profile.backward_s,
                    "optimizer": profile.optimizer_s,
                    "gradients": listed(profile),
                },
            }
        super().__init__(caption, measured=timeline and drawn(timeline), **{"profile": None, **state})

    @property
    def _shown(self) -> list[Timeline]:
        return [t for t in (self.predicted, self.timeline) if t is not None]

    def text(self) -> str:
        """The opening state in words."""
        return "One step of DDP. " + " ".join(f"{str(t)[0].upper()}{str(t)[1:]}." for t in self._shown)

    def svg(self) -> str:
        """The opening state: one pair of lanes for each timeline, on one axis."""
        total = max(t.step_s for t in self._shown) or 1.0
        body, y = "", 10.0
        for t in self._shown:
            part, y = _lanes(t, 700 / total, y)
            body += part
        return still_svg(720, y, body)


def listed(profile: Profile) -> list[list[Any]]:
    """The gradients as the JavaScript wants them: elements, bytes of one, seconds, dtype; in the order of readiness."""
    return [[g.elements, g.element_size(), g.ready_s, g.dtype] for g in profile.gradients]


def drawn(t: Timeline) -> dict[str, Any]:
    """A timeline as the JavaScript draws it; buckets are [bytes, ready, start, end, gradients]."""
    return {
        "label": {"paced": "Measured, paced compute"}.get(t.basis, t.basis.capitalize()),
        "forward": t.forward_s,
        "compute_end": t.compute_end_s,
        "done": t.done_s,
        "optimizer": t.optimizer_s,
        "buckets": [[b.nbytes, b.ready_s, b.start_s, b.end_s, len(b.names)] for b in t.buckets],
    }


def _facts(rate_Bps: float, like: Link) -> dict[str, Any]:
    name = f"{rate_Bps * 8 / 1e9:g} Gbit/s" if rate_Bps < 1e11 else f"{rate_Bps / 1e9:g} GB/s"
    return {"name": name, "payload_Bps": rate_Bps * like.wire_efficiency, "latency_s": like.latency_s}


def _lanes(t: Timeline, scale: float, y: float) -> tuple[str, float]:
    """The two lanes of one timeline as SVG, from `y` downwards; and where they end."""

    def box(start: float, end: float, top: float, fill: str, label: str, hatched: bool = False) -> str:
        x, wide = 10 + (t.forward_s + start) * scale, max(0.8, (end - start) * scale)
        out = f'<rect x="{x:.1f}" y="{top:g}" width="{wide:.1f}" height="26" rx="2" fill="{fill}" stroke="#555"/>'
        if hatched:
            lines = "".join(f"M{x + k:.1f} {top + 26:g}l{min(26, wide - k):.1f}-{min(26, wide - k):.1f}"
                            for k in range(0, int(wide), 7))  # fmt: skip
            return out + f'<path d="{lines}" stroke="#b3261e" fill="none"/>'
        fits = len(label) * 7 < wide
        return out + (f'<text x="{x + wide / 2:.1f}" y="{top + 18:g}" text-anchor="middle">{label}</text>' * fits)

    done, end = t.done_s, t.compute_end_s
    parts = [f'<text x="10" y="{y + 12:g}">{html.escape(t.basis)}: step {t.step_s * 1e3:.4g} ms</text>']
    top = y + 20
    if t.forward_s:
        parts.append(box(-t.forward_s, 0, top, "#dde6f2", "forward"))
    parts.append(box(0, end, top, "#b9cfee", "backward"))
    if done > end:
        parts.append(box(end, done, top, "#fff", "", hatched=True))
    if t.optimizer_s:
        parts.append(box(done, done + t.optimizer_s, top, "#dde6f2", "optimizer"))
    free: list[float] = []
    for b in t.buckets:
        row = next((i for i, until in enumerate(free) if until <= b.start_s + 1e-9), len(free))
        free[row : row + 1] = [b.end_s]
        top = y + 58 + 30 * row
        colour = COLOURS[b.index % 8] + "66"
        parts.append(box(b.start_s, b.end_s, top, colour, str(b.index)))
        if b.end_s > (late := max(b.start_s, end)):
            parts.append(box(late, b.end_s, top, "none", "", hatched=True))
    return "".join(parts), y + 70 + 30 * max(1, len(free))

"""The link-health figure: one step as its link sees it, and what four rules make of it."""

from __future__ import annotations

import html

from ddplab.dcgm.verdict import SAYS, LinkVerdict, link_verdict
from ddplab.figures.base import Figure, still_svg
from ddplab.figures.stepper import COLOURS
from ddplab.link import FIELD_LINKS
from ddplab.steptimes import BucketTimes, Timeline

RANKS, MOST_BUCKETS, FORWARD = 8, 16, 1 / 3
COMPUTE_MS = (10, 20, 50, 100, 200, 500, 1000, 2000)
GRADIENT_MB = (10, 25, 50, 100, 200, 500, 1000, 4000)
# name -> GB/s of one direction: the peak, and what carries payload when the link is well
LINKS = {"1 Gbit/s": (0.125, 0.1196), "10 Gbit/s": (1.25, 1.196), "100 Gbit/s": (12.5, 11.96)} | {
    name: (FIELD_LINKS[link].rate_Bps / 1e9, FIELD_LINKS[link].payload_Bps / 1e9)
    for name, link in (("NVLink 3 (A100)", "nvlink-a100"), ("NVLink 4 (H100)", "nvlink-h100"))
}


def step_on(compute_ms: float, gradient_MB: float, buckets: int, usable_GBps: float, health_pct: float) -> Timeline:
    """A step of `RANKS` ranks: a third of the computing is forward, `buckets` equal buckets become ready evenly.

    usable_GBps: what the link carries when it is well; health_pct: the part of it that is left. No latency.
    """
    backward_s = compute_ms / 1e3 * (1 - FORWARD)
    nbytes = gradient_MB * 1e6 / buckets
    transfer_s = nbytes * 2 * (RANKS - 1) / RANKS / (usable_GBps * 1e9 * health_pct / 100)
    end, found = 0.0, []
    for k in range(buckets):
        ready = backward_s * (k + 1) / buckets
        start = max(end, ready)
        end = start + transfer_s
        found.append(BucketTimes(k, nbytes, ready, start, end))
    forward_s, done_s = compute_ms / 1e3 * FORWARD, max(backward_s, end)
    return Timeline(tuple(found), forward_s, backward_s, done_s, 0.0, "predicted", about={"ranks": RANKS})


class LinkFigure(Figure):
    """A step on a link, with its bursts, its mean against the article's 85%, and four rules.

    compute_ms, gradient_MB, buckets (1 to 16), link (one of `LINKS`), health_pct (10 to 100): where it opens; all move.
    caption: shown below the figure.  ValueError for other settings.
    """

    module = "linkhealth.js"

    def __init__(
        self,
        compute_ms: int = 100,
        gradient_MB: int = 100,
        buckets: int = 5,
        link: str = "NVLink 3 (A100)",
        health_pct: int = 100,
        *,
        caption: str = "",
    ) -> None:
        for name, value, known in (
            ("compute_ms", compute_ms, COMPUTE_MS),
            ("gradient_MB", gradient_MB, GRADIENT_MB),
            ("buckets", buckets, range(1, MOST_BUCKETS + 1)),
            ("link", link, tuple(LINKS)),
            ("health_pct", health_pct, range(10, 101, 5)),
        ):
            if isinstance(value, bool) or value not in known:
                raise ValueError(f"{name} is one of {', '.join(map(str, known))}, not {value!r}")
        super().__init__(
            caption,
            compute=COMPUTE_MS.index(compute_ms),
            computes=COMPUTE_MS,
            gradient=GRADIENT_MB.index(gradient_MB),
            gradients=GRADIENT_MB,
            buckets=buckets,
            link=list(LINKS).index(link),
            links=[[name, *rates] for name, rates in LINKS.items()],
            health=health_pct,
            says=[[SAYS[a, b] for b in (False, True)] for a in (False, True)],
        )

    @property
    def _shown(self) -> tuple[Timeline, LinkVerdict]:
        s = self.state
        _, peak, usable = s["links"][s["link"]]
        step = step_on(s["computes"][s["compute"]], s["gradients"][s["gradient"]], s["buckets"], usable, s["health"])
        return step, judged(step, peak, usable)

    def text(self) -> str:
        """The opening state in words."""
        step, verdict = self._shown
        use = verdict.rules[0][2]
        return f"{step}. Mean utilisation of the link {use:.1%}; {verdict}."

    def svg(self) -> str:
        """The computing above, the link's buckets below, and the four rules."""
        step, verdict = self._shown
        scale, parts = 640 / step.step_s, []

        def box(start: float, end: float, y: int, colour: str, label: str) -> None:
            x, wide = 70 + (step.forward_s + start) * scale, max(1.0, (end - start) * scale)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="24" fill="{colour}" stroke="#555"/>'
                + (f'<text x="{x + 4:.1f}" y="{y + 16}">{label}</text>' if len(label) * 8 < wide else "")
            )

        parts.append('<text x="8" y="26">compute</text><text x="8" y="60">link</text>')
        box(-step.forward_s, 0, 10, "#dde6f2", "forward")
        box(0, step.compute_end_s, 10, "#b9cfee", "backward")
        for b in step.buckets:
            box(b.start_s, b.end_s, 44, COLOURS[b.index % 8] + "66", str(b.index))
        for i, (whose, rule, value, limit, holds) in enumerate(verdict.rules):
            words = f"{whose}: {rule} {limit:.0%}: {value:.1%}, {'holds' if holds else 'fails'}"
            parts.append(f'<text x="70" y="{96 + 20 * i}">{html.escape(words)}</text>')
        return still_svg(720, 170, "".join(parts))


def judged(step: Timeline, peak_GBps: float, usable_GBps: float) -> LinkVerdict:
    """The verdict on a step of `step_on`, against the link's peak and what it carries when it is well."""
    sent = sum(b.nbytes for b in step.buckets) * 2 * (RANKS - 1) / RANKS
    return link_verdict(step, reference_GBps=usable_GBps, utilisation=sent / step.step_s / 1e9 / peak_GBps)

"""Three measured steps, and what they say: computing, what is exposed, the link behind it, and what is left to gain."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from ddplab.figures.base import Figure, still_svg
from ddplab.headline import RESNET50_PARAMETERS, ThreeRuns, headline, three_runs
from ddplab.transfers import count, number

MOST_MS, MOST_RANKS = 1e6, 100_000
METHODS = (("fp32", 32), ("fp16", 16), ("int8", 8), ("1 bit", 1), ("nothing sent", 0))
_ARTICLE = headline()
# the article's 120 and 45 ms as what a step waits for, beside the computing that they imply
ARTICLE = {
    "noop_ms": round(1e3 * _ARTICLE.compute_s, 1),
    "fp32_ms": round(1e3 * _ARTICLE.step_s[0], 1),
    "fp16_ms": round(1e3 * _ARTICLE.step_s[1], 1),
    "megabytes": round(RESNET50_PARAMETERS * 4 / 1e6, 3),
    "ranks": _ARTICLE.ranks,
}


class HeadlineFigure(Figure):
    """The reader's own three steps (a hook that sends nothing, fp32, fp16) and what they imply.

    noop_ms, fp32_ms, fp16_ms: steps in ms, above 0 and up to a million.  megabytes: fp32 gradients of a step, in 10^6
    bytes.  ranks: 2 or more.  presets: by name, mappings with these five; a button each. The article's numbers come
    first and are where the figure opens. All five can be typed over. ValueError for other numbers.
    """

    module = "headline.js"

    def __init__(self, presets: Mapping[str, Mapping[str, float]] | None = None, *, caption: str = "", **given: float):
        every = {"the article": ARTICLE, **(presets or {})}
        for name, preset in every.items():
            if set(preset) != set(ARTICLE):
                raise ValueError(f"preset {name!r} has {', '.join(ARTICLE)}, not {', '.join(preset)}")
        if unknown := given.keys() - ARTICLE.keys():
            raise ValueError(f"HeadlineFigure knows {', '.join(ARTICLE)}, not {', '.join(sorted(unknown))}")
        start = {**ARTICLE, **given}
        for preset in (*every.values(), start):
            for key in ("noop_ms", "fp32_ms", "fp16_ms", "megabytes"):
                number(preset[key], key, 0, MOST_MS, above=True)
            if count(preset["ranks"], "ranks", least=2, error=ValueError) > MOST_RANKS:
                raise ValueError(f"ranks is 2 to {MOST_RANKS}, not {preset['ranks']}")
        super().__init__(
            caption,
            **start,
            presets=[[name, dict(preset)] for name, preset in every.items()],
            preset="" if given else "the article",
            methods=[list(pair) for pair in METHODS],
        )

    @property
    def runs(self) -> ThreeRuns:
        """What the opening state says. ValueError where the three contradict each other."""
        s = self.state
        times = [s[key] / 1e3 for key in ("noop_ms", "fp32_ms", "fp16_ms")]
        return three_runs(*times, max(1, round(s["megabytes"] * 1e6 / 4)), s["ranks"])

    def text(self) -> str:
        """The opening state in words."""
        try:
            runs = self.runs
        except ValueError as problem:
            return f"These three steps contradict each other: {problem}."
        return sentence(runs)

    def svg(self) -> str:
        """The opening state: a bar for each method."""
        parts = [f'<text x="10" y="20">{html.escape(line)}</text>' for line in [self.text()[:96]]]
        try:
            parts += _bars(self.runs, self.state["methods"])
        except ValueError:
            pass
        return still_svg(700, 60 + 28 * len(METHODS), "".join(parts))


def sentence(runs: ThreeRuns) -> str:
    """What three runs say, as the figure says it."""
    return (
        f"Computing takes {runs.noop_s * 1e3:.4g} ms, and an fp32 step waits {runs.exposed_s * 1e3:.4g} ms for "
        f"communication. That takes {runs.communication_s * 1e3:.4g} ms in all, {runs.hidden_s * 1e3:.4g} of them "
        f"hidden: a bus bandwidth of {runs.busbw_Bps * 8 / 1e9:.4g} Gbit/s. Scaling efficiency {runs.efficiency:.1%}; "
        f"communication for nothing would be {runs.ceiling:.3g} times faster."
    )


def _bars(runs: ThreeRuns, methods: Sequence[Sequence[Any]]) -> list[str]:
    scale, parts = 420 / runs.fp32_s, []
    for i, (name, bits) in enumerate(methods):
        y, step = 34 + 28 * i, runs.step_s(bits)
        wide, waits = runs.noop_s * scale, (step - runs.noop_s) * scale
        parts.append(f'<text x="10" y="{y + 15}">{name}</text>')
        parts.append(f'<rect x="110" y="{y}" width="{wide:.1f}" height="20" fill="#b9cfee" stroke="#555"/>')
        if waits > 0:
            parts.append(
                f'<rect x="{110 + wide:.1f}" y="{y}" width="{waits:.1f}" height="20" fill="#f2c4c0" stroke="#b3261e"/>'
            )
        parts.append(
            f'<text x="{118 + wide + waits:.1f}" y="{y + 15}">{step * 1e3:.4g} ms, {runs.fp32_s / step:.3g} x</text>'
        )
    return parts

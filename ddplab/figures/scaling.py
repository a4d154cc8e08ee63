"""A page of its own about how a step scales: a chart, the table behind it, the timeline with its sliders."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddplab.figures.overlap import OverlapFigure
from ddplab.link import Link
from ddplab.profile import Profile

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
svg.chart { width: 100%; max-width: 46rem; height: auto; } svg.chart text { fill: currentColor; font-size: 13px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid #8886; white-space: nowrap; }
tr.chosen { font-weight: 700; }
"""
_HEAD = {
    "ranks": "ranks",
    "step_ms": "step, ms",
    "low_ms": "from",
    "high_ms": "to",
    "communication_ms": "communication, ms",
    "exposed_ms": "exposed, ms",
    "efficiency_pct": "efficiency, %",
}


def page(
    name: str,
    profile: Profile,
    rows: Sequence[Mapping[str, Any]],
    assumptions: Sequence[str],
    ranks: int,
    link: Link,
    options: Mapping[str, Any],
) -> str:
    """One self-contained HTML document: no outside reference, no server."""
    band = "Nothing here was measured. The band is jitter: 5th to 95th percentile."
    title = html.escape(f"{name} under DDP: 1 to {rows[-1]['ranks']} ranks, predicted")
    figure = OverlapFigure(
        profile,
        ranks=ranks,
        link=link,
        bucket_cap_mb=options["bucket_cap_mb"],
        compression=options["compression"],
        slowdown=options["slowdown"],
        caption="Hatched: the step waits. Without jitter, one rank a host; move the sliders.",
    )
    head = "".join(f'<th scope="col">{text}</th>' for text in _HEAD.values())
    body = "".join(
        f"<tr{' class=chosen' * (row['ranks'] == ranks)}>"
        + "".join(f"<td>{row[key]:.4g}</td>" if key != "ranks" else f"<td>{row[key]}</td>" for key in _HEAD)
        + "</tr>"
        for row in rows
    )
    notes = "".join(f"<li>{html.escape(line)}</li>" for line in assumptions)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style></head><body>\n<h1>{title}</h1>\n<p>{band}</p>\n{chart(rows, ranks)}\n"
        '<div class="wide" tabindex="0" role="region" aria-label="Table"><table><thead>'
        f"<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n"
        f"<h2>One step on {ranks} ranks</h2>\n{figure.html()}\n<h2>Assumed</h2>\n<ul>{notes}</ul>\n</body></html>\n"
    )


def chart(rows: Sequence[Mapping[str, Any]], chosen: int) -> str:
    """Step time over ranks (logarithmic) as an SVG: band of jitter, line, compute alone dashed."""
    wide, high, left, bottom = 560.0, 300.0, 52.0, 56.0
    top = max(row["high_ms"] for row in rows) * 1.08
    most = max(math.log2(rows[-1]["ranks"]), 1.0)

    def x(row: Mapping[str, Any]) -> float:
        return left + math.log2(row["ranks"]) / most * (wide - left - 20)

    def y(value: float) -> float:
        return (high - bottom) * (1 - value / top) + 6

    def path(key: str, order: int = 1) -> str:
        return " ".join(f"{x(row):.1f},{y(row[key]):.1f}" for row in rows[::order])

    magnitude = 10 ** math.floor(math.log10(top / 4))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= top / 5)
    marks = [k * step for k in range(int(top / step) + 1)]
    grid = "".join(
        f'<path d="M{left} {y(m):.1f}H{wide - 20}" stroke="currentColor" stroke-opacity=".18"/>'
        f'<text x="{left - 8}" y="{y(m) + 4:.1f}" text-anchor="end">{m:g}</text>'
        for m in marks
    )
    labels = "".join(
        f'<text x="{x(row):.1f}" y="{high - bottom + 24:.0f}" text-anchor="middle">{row["ranks"]}</text>'
        for row in rows
        if row["ranks"] & (row["ranks"] - 1) == 0 or row["ranks"] == chosen
    )
    dots = "".join(
        f'<circle cx="{x(row):.1f}" cy="{y(row["step_ms"]):.1f}" fill="#2076d6"'
        f' r="{6 if row["ranks"] == chosen else 3.5}">'
        f"<title>{row['ranks']} ranks: {row['step_ms']:.4g} ms, {row['exposed_ms']:.4g} ms exposed</title></circle>"
        for row in rows
    )
    alone = (
        f'<path d="M{left} {y(rows[0]["compute_ms"]):.1f}H{wide - 20}" stroke="currentColor" stroke-dasharray="5 4"/>'
    )
    first, last = (f"{row['step_ms']:.4g} ms on {row['ranks']}" for row in (rows[0], rows[-1]))
    words = f"Step time over ranks: {first}, {last}"
    return (
        f'<svg class="chart" viewBox="0 0 {wide:g} {high:g}" role="img" aria-label="{words}">{grid}{labels}'
        f'<polygon points="{path("high_ms")} {path("low_ms", -1)}" fill="#2076d6" fill-opacity=".25"/>'
        f'{alone}<polyline points="{path("step_ms")}" fill="none" stroke="#2076d6" stroke-width="2.5"/>{dots}'
        f'<text x="{left}" y="{high - 4:g}">ranks (log scale); step in ms; dashed: compute alone</text></svg>'
    )

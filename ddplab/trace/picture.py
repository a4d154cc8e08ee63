"""The lanes of a trace as one inline SVG: for each rank when it computed, communicated and fetched input."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import numpy as np

from ddplab.trace.intervals import Intervals, intersect, subtract

if TYPE_CHECKING:
    from ddplab.trace.report import TraceReport

LANES = (("compute", "compute"), ("hidden", "communication, hidden"), ("exposed", "communication, exposed"),
         ("memory", "memory"), ("input", "input"))  # fmt: skip
MOST_RANKS = 16
_WIDE, _LEFT, _ROW, _GAP, _TOP = 1000.0, 78.0, 13, 10, 26


def lanes(report: TraceReport, step: int | None = None, ranks: int = MOST_RANKS) -> str:
    """One `<svg>` of a step of all ranks, `ranks` of them at most; without step the whole trace.

    Colours are CSS classes (lane-compute, lane-hidden, lane-exposed, lane-memory, lane-input): the page decides. Times
    are the ranks' own clocks. ValueError where there is nothing in the window, or no such step.
    """
    shown = list(zip(report.traces, report.busy, strict=True))[:ranks]
    low, high = _window(report, step)
    scale = (_WIDE - _LEFT - 8) / (high - low)
    body, y = [], _TOP
    for trace, busy in shown:
        sets = {
            "compute": busy.compute,
            "hidden": busy.hidden,
            "exposed": subtract(busy.comm, busy.compute),
            "memory": busy.memory,
            "input": busy.input,
        }
        rows = (("compute",), ("hidden", "exposed"), ("memory", "input"))
        rows = [names for names in rows if any(len(_cut(sets[n], low, high)[0]) for n in names)] or [("compute",)]
        label = html.escape(f"rank {trace.rank}" if trace.rank is not None else "trace")
        middle = y + len(rows) * _ROW / 2 + 4
        body.append(f'<text x="{_LEFT - 8:g}" y="{middle:g}" text-anchor="end">{label}</text>')
        for names in rows:
            body.append(
                f'<rect class="lane-ground" x="{_LEFT:g}" y="{y:g}" width="{_WIDE - _LEFT - 8:g}" height="11"/>'
            )
            for name in names:
                path = _path(_cut(sets[name], low, high), low, scale, y)
                if path:
                    body.append(f'<path class="lane-{name}" d="{path}"/>')
            y += _ROW
        y += _GAP
    what = f"step {step}" if step is not None else "the whole trace"
    words = html.escape(f"Lanes of {len(shown)} ranks over {what}, {(high - low) / 1e6:.3f} ms.")
    return (
        f'<svg class="lanes" role="img" aria-label="{words}" viewBox="0 0 {_WIDE:g} {y:g}" '
        f'xmlns="http://www.w3.org/2000/svg">{_axis(high - low, y - _GAP)}{"".join(body)}</svg>'
    )


def _window(report: TraceReport, step: int | None) -> tuple[int, int]:
    if step is None:
        windows = [(busy.begin, busy.end) for busy in report.busy if busy.end > busy.begin]
    else:
        mine = report.steps[report.steps["step"] == step]
        windows = [(int(r["start_ns"]), int(r["start_ns"]) + int(r["span_ns"])) for r in mine.to_dict("records")]
    if not windows or max(high for _, high in windows) <= min(low for low, _ in windows):
        raise ValueError("the trace is empty" if step is None else f"the trace has no step {step}")
    return min(low for low, _ in windows), max(high for _, high in windows)


def _cut(intervals: Intervals, low: int, high: int) -> Intervals:
    return intersect(intervals, (np.array([low]), np.array([high])))


def _path(intervals: Intervals, low: int, scale: float, y: float) -> str:
    """Boxes 11 units high. What is closer than a third of a unit becomes one: a million kernels stay a picture."""
    starts, ends = ((side - low) * scale + _LEFT for side in intervals)
    if not len(starts):
        return ""
    first = np.flatnonzero(np.r_[True, starts[1:] - ends[:-1] > 0.3])
    last = np.r_[first[1:] - 1, len(ends) - 1]
    boxes = zip(starts[first].tolist(), ends[last].tolist(), strict=True)
    return "".join(f"M{a:.1f} {y:g}h{max(b - a, 0.4):.1f}v11h-{max(b - a, 0.4):.1f}z" for a, b in boxes)


def _axis(span: int, bottom: float) -> str:
    """Vertical lines at round times, with their milliseconds."""
    unit = 10.0 ** np.floor(np.log10(span))
    unit = next(u for u in (unit / 5, unit / 2, unit, unit * 2) if span / u <= 8)
    parts = []
    for i in range(int(span / unit) + 1):
        x = _LEFT + i * unit * (_WIDE - _LEFT - 8) / span
        parts.append(f'<path class="lane-tick" d="M{x:.1f} {_TOP - 6}V{bottom:g}"/>')
        ms = f"{i * unit / 1e6:.6g}" + (" ms" if i == 0 else "")
        parts.append(f'<text x="{x:.1f}" y="{_TOP - 10}" text-anchor="middle">{ms}</text>')
    return "".join(parts)

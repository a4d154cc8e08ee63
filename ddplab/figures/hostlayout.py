"""Hosts as boxes: the still picture of a schedule on hosts, and the names of its phases."""

from __future__ import annotations

import math

from ddplab.schedule import Schedule

MAX_HOSTS = 4
_BOX, _GAP, _PITCH, _HEAD = 96, 74, 46, 30  # hostpicture.js draws the live picture on a grid of its own
COLOURS = ("#3b7ddd", "#d9730d", "#2e9e5b", "#9a60d0", "#d94a55", "#1796a8", "#d2559f", "#8f8a12")


def phases(schedule: Schedule, ranks_per_host: int) -> list[tuple[str, int]] | None:
    """(name, steps) of the phases, where every step stays inside the hosts or only crosses; None where some do both."""
    found: list[tuple[str, int]] = []
    for step in range(schedule.steps):
        rows = schedule.step == step
        crosses = schedule.src[rows] // ranks_per_host != schedule.dst[rows] // ranks_per_host
        if not rows.any() or crosses.any() != crosses.all():
            return None
        inside = "reduce-scatter inside" if schedule.reduce[rows].all() else "all-gather inside"
        name = "all-reduce across" if crosses.all() else inside
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + 1)
        else:
            found.append((name, 1))
    return found or None


def host_picture(schedule: Schedule, step: int, ranks_per_host: int) -> tuple[str, float, float]:
    """(SVG, width, height): an arrow for each pair that sends in this step, or at the start that ever does."""
    g, k = ranks_per_host, schedule.ranks // ranks_per_host
    width, height = k * _BOX + (k - 1) * _GAP + 4, max(g * _PITCH + _HEAD + 8, 40 + 30 * schedule.ranks)
    spots = [
        (2 + (r // g) * (_BOX + _GAP) + _BOX / 2, _HEAD + 24 + (r % g) * (height - _HEAD - 8) / g)
        for r in range(schedule.ranks)
    ]
    parts = []
    for host in range(k):
        x = 2 + host * (_BOX + _GAP)
        parts.append(
            f'<rect x="{x}" y="2" width="{_BOX}" height="{height - 4:g}" rx="10" fill="#f3f4f6" stroke="#aaa"/>'
            f'<text x="{x + _BOX / 2}" y="20" text-anchor="middle" font-weight="600">host {host}</text>'
        )
    for src, dst in sorted({(t.src, t.dst) for t in schedule.transfers if step in (0, t.step + 1)}):
        (x0, y0), (x1, y1) = spots[src], spots[dst]
        across = src // g != dst // g
        far = abs(dst // g - src // g) > 1 if across else abs(dst - src) > 1
        side = -34 if far else 0  # round the ranks between
        long, turn = math.hypot(x1 - x0, y1 - y0), math.degrees(math.atan2(y1 - y0, x1 - x0))
        bow = side if y1 > y0 else -side
        line = f"M18 {-bow / 3:.1f}Q{long / 2:.1f} {-bow * 1.6:.1f} {long - 24:.1f} {-bow / 3:.1f}" if far else ""
        line = line or f"M20-5H{long - 26:.1f}"
        tip = f"M{long - 18:.1f} {-bow / 3 if far else -5:.1f}l-9-4v8z"
        parts.append(
            f'<g transform="translate({x0:.1f} {y0:.1f}) rotate({turn:.1f})" stroke="#666" fill="none">'
            f'<path d="{line}" stroke-width="{4 if across else 1.5}"/>'
            f'<path d="{tip}" stroke="none" fill="#666"/></g>'
        )
    for r, (x, y) in enumerate(spots):
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="18" fill="#fff" stroke="{COLOURS[r % 8]}" stroke-width="2.5"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" font-size="10">GPU{r}</text>'
        )
    return "".join(parts), width, height

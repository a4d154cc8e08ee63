"""The stepper: a collective that the reader drives step by step, a ring of 2 to 8 ranks or any small schedule."""

from __future__ import annotations

import html
import math
from typing import Any

from ddplab.figures.base import Figure, still_svg
from ddplab.figures.hostlayout import COLOURS, MAX_HOSTS, host_picture, phases
from ddplab.schedule import Schedule, hierarchical, ring
from ddplab.symbolic import label

# variant -> (first_chunk, direction) of ddplab.ring; figures/collective.js holds the same table
VARIANTS = {"article": (+1, +1), "textbook": (0, +1), "nccl": (-1, +1), "gloo": (+1, -1)}
MAX_RANKS, MAX_CHUNKS, MAX_TRANSFERS = 16, 16, 2000


class Stepper(Figure):
    """Steps through any schedule of up to 16 ranks and 16 chunks.

    schedule: a `ddplab.Schedule`.  step: the step it opens at, 0 (nothing sent) to `schedule.steps`.
    nbytes: the payload S in bytes that the byte counts are for.  caption: shown below the figure.
    ranks_per_host: draw hosts as boxes, with rank r on host r // ranks_per_host, up to 4 of them; None draws a circle.
    Raises ValueError for a schedule too large to read as a picture, a step outside it, a payload below 1 byte, or hosts
    that do not hold all ranks.
    """

    module = "stepper.js"

    def __init__(
        self,
        schedule: Schedule,
        *,
        step: int = 0,
        nbytes: float = 102.4e6,
        caption: str = "",
        ranks_per_host: int | None = None,
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise ValueError(f"Stepper draws a ddplab.Schedule, not {type(schedule).__name__}.")
        n, chunks = schedule.ranks, schedule.chunks
        if n > MAX_RANKS or chunks > MAX_CHUNKS or len(schedule.step) > MAX_TRANSFERS:
            raise ValueError(
                f"{schedule.name} has {n} ranks, {chunks} chunks and {len(schedule.step)} transfers; the stepper stays "
                f"readable up to {MAX_RANKS} ranks, {MAX_CHUNKS} chunks and {MAX_TRANSFERS} transfers. Draw a smaller "
                "one of the same kind, for example chain(4, chunks=4)."
            )
        state = {
            "name": f"{schedule.name.replace('_', ' ')}, {n} rank{'s' * (n != 1)}",
            "ranks": n,
            "chunks": chunks,
            "steps": schedule.steps,
            "reduce_steps": schedule.reduce_steps,
            "direction": _direction(schedule),
            "scatters": chunks > 1 and None not in _owned(schedule),
            "transfers": [[*row[:4], bool(row.reduce)] for row in schedule.transfers],
        }
        if ranks_per_host is not None:
            hosts = _hosts(schedule, ranks_per_host)
            state |= {
                "name": f"{state['name']} on {hosts} host{'s' * (hosts != 1)}",
                "ranks_per_host": ranks_per_host,
                "phases": phases(schedule, ranks_per_host),
            }
        self._open(schedule, step, nbytes)
        self.ranks_per_host = ranks_per_host
        super().__init__(caption, schedule=state, step=self.step, nbytes=nbytes)

    ranks_per_host: int | None = None

    def _open(self, schedule: Schedule, step: int, nbytes: float) -> None:
        if not (isinstance(nbytes, (int, float)) and math.isfinite(nbytes) and nbytes >= 1):
            raise ValueError(f"nbytes is the payload in bytes, at least 1; not {nbytes!r}.")
        if isinstance(step, bool) or not isinstance(step, int):
            raise ValueError(f"step must be a whole number, not {step!r}.")
        if not 0 <= step <= schedule.steps:
            raise ValueError(
                f"{schedule.name} has steps 0 (the start) to {schedule.steps}; step {step} is not one of them."
            )
        self.schedule, self.step = schedule, step

    def text(self) -> str:
        """The ranks, the steps and what each rank holds at the opening step."""
        s = self.schedule
        where = f" on hosts of {self.ranks_per_host}" if self.ranks_per_host else ""
        rows = "; ".join(f"GPU{r}: {', '.join(_labels(s, row))}" for r, row in enumerate(s.states()[self.step]))
        return f"{s.name}: {s.ranks} ranks{where}, {s.chunks} chunks, {s.steps} steps. After step {self.step}: {rows}."

    def svg(self) -> str:
        """The opening frame: the ranks on a circle with the arrows, and the table of chunks beside it."""
        s = self.schedule
        held = [_labels(s, row, limit=3) for row in s.states()[self.step]]
        wide = max(46, 10 + 8 * max(len(cell) for row in held for cell in row))
        size: float = max(230, 40 + 30 * s.ranks)
        if self.ranks_per_host:
            picture, wide_picture, size = host_picture(s, self.step, self.ranks_per_host)
        else:
            picture, wide_picture = _circle(s, self.step, size), size
        parts = [picture]
        for r, row in enumerate(held):
            y = (size - 30 * s.ranks) / 2 + 30 * r
            parts.append(f'<text x="{wide_picture + 10:g}" y="{y + 19:g}">GPU{r}</text>')
            for c, words in enumerate(row):
                x, full = wide_picture + 60 + c * (wide + 4), words.startswith("SUM")
                look = 'stroke="#2e9e5b" fill="#dff2e6"' if full else 'stroke="#999" fill="none"'
                parts.append(
                    f'<rect x="{x}" y="{y:g}" width="{wide}" height="26" rx="4" {look}/>'
                    f'<text x="{x + wide / 2:g}" y="{y + 18:g}" text-anchor="middle">{html.escape(words)}</text>'
                )
        return still_svg(wide_picture + 70 + s.chunks * (wide + 4), size, "".join(parts))


class RingStepper(Stepper):
    """The ring all-reduce: the reader changes ranks (2 to 8), variant, payload and step in the figure itself.

    variant: "article", "textbook", "nccl" or "gloo" (claim C21); which chunk a rank sends first, and which way round.
    step, nbytes, caption: as in `Stepper`. Raises ValueError for other ranks, variants, steps or payloads.
    """

    def __init__(
        self, ranks: int = 4, variant: str = "article", *, step: int = 0, nbytes: float = 102.4e6, caption: str = ""
    ) -> None:
        if variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}; not {variant!r}.")
        if isinstance(ranks, bool) or not isinstance(ranks, int) or not 2 <= ranks <= 8:
            raise ValueError(
                f"RingStepper draws 2 to 8 ranks, not {ranks!r}. Stepper(ring(n)) draws up to {MAX_RANKS}."
            )
        first, direction = VARIANTS[variant]
        self._open(ring(ranks, first_chunk=first, direction=direction), step, nbytes)
        Figure.__init__(self, caption, ranks=ranks, variant=variant, step=self.step, nbytes=nbytes)

    def text(self) -> str:
        return f"Ring all-reduce, the {self.state['variant']}'s variant. {super().text()}"


def figure_of(schedule: Schedule, **options: Any) -> Stepper:
    """The figure of a schedule: `RingStepper` where it is one of the four known rings, else `Stepper`, with hosts as
    boxes where it is hierarchical."""
    if 2 <= schedule.ranks <= 8:
        for variant, (first, direction) in VARIANTS.items():
            if schedule == ring(schedule.ranks, first_chunk=first, direction=direction):
                return RingStepper(schedule.ranks, variant, **options)
    for k in range(2, MAX_HOSTS + 1) if schedule.name == "hierarchical" and schedule.ranks <= MAX_RANKS else ():
        g, rest = divmod(schedule.ranks, k)
        if not rest and g > 1 and schedule == hierarchical(k, g):
            options.setdefault("ranks_per_host", g)
    return Stepper(schedule, **options)


def _hosts(schedule: Schedule, ranks_per_host: Any) -> int:
    """How many hosts of that many ranks there are."""
    if isinstance(ranks_per_host, bool) or not isinstance(ranks_per_host, int) or ranks_per_host < 1:
        raise ValueError(f"ranks_per_host must be a whole number of at least 1, not {ranks_per_host!r}.")
    hosts, rest = divmod(schedule.ranks, ranks_per_host)
    if rest or not 1 <= hosts <= MAX_HOSTS:
        raise ValueError(
            f"{schedule.name} has {schedule.ranks} ranks: {ranks_per_host} on each host must divide them, into at most "
            f"{MAX_HOSTS} hosts."
        )
    return hosts


def _direction(schedule: Schedule) -> int:
    """+1 or -1 where every transfer goes to the next or to the previous rank, else 0."""
    hops = set(((schedule.dst - schedule.src) % schedule.ranks).tolist())
    return 1 if hops == {1} else -1 if hops == {schedule.ranks - 1} else 0


def _owned(schedule: Schedule) -> list[tuple[int, ...] | None]:
    """What each rank holds fully reduced after the reduce phase, None where nothing."""
    everyone = tuple(range(schedule.ranks))
    rows = schedule.states()[schedule.reduce_steps]
    return [tuple(c for c, held in enumerate(row) if held == everyone) or None for row in rows]


def _labels(schedule: Schedule, row: list[tuple[int, ...]], limit: int = MAX_RANKS) -> list[str]:
    """A rank's chunks as the figure shows them: "A1+D1", or "SUM1" when every rank's contribution is in.

    A sum of more than `limit` terms is cut to its ends, "A1+...+E1".
    """
    everyone, cells = tuple(range(schedule.ranks)), []
    for c, held in enumerate(row):
        terms = [f"SUM{c + 1}"] if held == everyone else [label(r, c) for r in held]
        cells.append("+".join(terms if len(terms) <= limit else [terms[0], "…", terms[-1]]))
    return cells


def _circle(schedule: Schedule, step: int, size: float) -> str:
    """The ranks on a circle; an arrow for each pair that sends in this step, or at the start that ever does."""
    n, radius, parts = schedule.ranks, size / 2 - 26, []
    spots = [
        (size / 2 + radius * math.sin(2 * math.pi * r / n), size / 2 - radius * math.cos(2 * math.pi * r / n))
        for r in range(n)
    ]
    pairs = {(t.src, t.dst) for t in schedule.transfers if step in (0, t.step + 1)}
    for src, dst in sorted(pairs):
        (x0, y0), (x1, y1) = spots[src], spots[dst]
        long, turn = math.hypot(x1 - x0, y1 - y0), math.degrees(math.atan2(y1 - y0, x1 - x0))
        # drawn along its own x axis and beside the straight line, so that two opposite arrows do not cover each other
        parts.append(
            f'<g transform="translate({x0:.1f} {y0:.1f}) rotate({turn:.1f})" stroke="#777" fill="#777">'
            f'<path d="M24-5H{long - 30:.1f}" stroke-width="1.5"/>'
            f'<path d="M{long - 23:.1f}-5l-9-4v8z" stroke="none"/></g>'
        )
    for r, (x, y) in enumerate(spots):
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="21" fill="#fff" stroke="{COLOURS[r % 8]}" stroke-width="2.5"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" font-size="11">GPU{r}</text>'
        )
    return "".join(parts)

"""Accumulation windows: which micro-batches one optimizer step adds up, in the right loop and in the article's."""

from __future__ import annotations

from dataclasses import dataclass

from ddplab.figures.base import Figure, still_svg
from ddplab.figures.stepper import COLOURS

MOST_BATCHES, MOST_EVERY, EPOCHS = 16, 8, 2
SEVEN = COLOURS[:4] + COLOURS[5:]  # the red one means lost
LOOPS = {"right": "Right windows", "article": "The article's loop"}


@dataclass(frozen=True)
class Window:
    """Micro-batches that are added up for one optimizer step.

    members: (epoch, i) of each, in order; the last one synchronises if `applied`.  applied: the optimizer stepped on
    them; False for what is left when training ends.  factor: the gradient over the mean of the members' gradients.
    """

    members: tuple[tuple[int, int], ...]
    applied: bool
    factor: int


def windows(batches: int, every: int, loop: str = "right", epochs: int = EPOCHS) -> list[Window]:
    """The windows of `epochs` passes over `batches` micro-batches of equal size, `every` to a window.

    loop: "right": micro-batch i ends a window if (i + 1) % every == 0 or it is the last of its epoch; losses are
    averaged. "article": it does if i % every == 0; losses are added, and what an epoch leaves goes on. Claims C41, C43
    and C44.
    """
    found, open_ = [], []
    for epoch in range(epochs):
        for i in range(batches):
            open_.append((epoch, i))
            ends = i % every == 0 if loop == "article" else (i + 1) % every == 0 or i == batches - 1
            if ends:
                found.append(Window(tuple(open_), True, len(open_) if loop == "article" else 1))
                open_ = []
    return found + [Window(tuple(open_), False, len(open_))] if open_ else found


class WindowFigure(Figure):
    """Both loops side by side over two epochs; the reader chooses the number of micro-batches and `every`.

    batches: micro-batches in an epoch, 1 to 16.  every: micro-batches in a window, 1 to 8.  caption: shown below the
    figure. ValueError for other numbers.
    """

    module = "windows.js"

    def __init__(self, batches: int = 11, every: int = 4, *, caption: str = "") -> None:
        for name, value, most in (("batches", batches, MOST_BATCHES), ("every", every, MOST_EVERY)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} must be a whole number from 1 to {most}, not {value!r}")
        super().__init__(caption, batches=batches, every=every)

    def text(self) -> str:
        """Sizes, factors and leftovers of both loops."""
        n, every = self.state["batches"], self.state["every"]
        return f"{n} micro-batches, every={every}, {EPOCHS} epochs. " + " ".join(
            f"{title}: {_said(windows(n, every, loop))}" for loop, title in LOOPS.items()
        )

    def svg(self) -> str:
        """The opening frame: a row of boxes for each loop and epoch, filled where the micro-batch synchronises."""
        n, parts = self.state["batches"], []
        for half, (loop, title) in enumerate(LOOPS.items()):
            top = 8 + 128 * half
            parts.append(f'<text x="10" y="{top + 14}" font-weight="600">{title}</text>')
            for w, window in enumerate(windows(n, self.state["every"], loop)):
                colour = SEVEN[w % 7] if window.applied else COLOURS[4]
                for epoch, i in window.members:
                    x, y, last = 78 + 36 * i, top + 22 + 50 * epoch, (epoch, i) == window.members[-1]
                    label = f"x{window.factor}" if last and window.applied else "" if window.applied else "lost"
                    parts.append(
                        f'<rect x="{x}" y="{y}" width="30" height="24" rx="3" stroke="{colour}" fill="{colour}"'
                        f' fill-opacity="{0.55 if last and window.applied else 0.12}"/>'
                        f'<text x="{x + 15}" y="{y + 16}" text-anchor="middle">{i}</text>'
                        f'<text x="{x + 15}" y="{y + 38}" text-anchor="middle">{label}</text>'
                    )
            for epoch in range(EPOCHS):
                parts.append(f'<text x="10" y="{top + 38 + 50 * epoch}">epoch {epoch + 1}</text>')
        return still_svg(90 + 36 * max(n, 8), 264, "".join(parts))


def _said(found: list[Window]) -> str:
    """Sizes, factors, windows that cross an epoch's end, and what is lost, in words."""
    sizes, factors = (
        ", ".join(str(v) for v in values)
        for values in ([len(w.members) for w in found if w.applied], [w.factor for w in found if w.applied])
    )
    left = sum(len(w.members) for w in found if not w.applied)
    carried = sum(len({epoch for epoch, _ in w.members}) > 1 for w in found if w.applied)
    across = f" {carried} window{'s' * (carried > 1)} across an epoch's end;" if carried else ""
    lost = f"{left} micro-batch{'es' * (left != 1)} lost" if left else "nothing lost"
    return f"windows of {sizes}; mean gradient times {factors};{across} {lost}."

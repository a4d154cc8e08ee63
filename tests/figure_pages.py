"""What the tests of the figures share: the schedules that are drawn, and how a stepper on a page is read and driven."""

from __future__ import annotations

from typing import Any

import ddplab as dl
from ddplab.figures import VARIANTS

OTHERS = [
    dl.star(4),
    dl.star(8),
    dl.chain(4, chunks=4),
    dl.direct(4),
    dl.tree(8),
    dl.halving_doubling(8),
    dl.hierarchical(2, 4),
    dl.ring(1),
    dl.ring(9, first_chunk=3),
]
RINGS = [(variant, ranks) for variant in VARIANTS for ranks in range(2, 9)]
# a page that follows the reader's choice of dark or light, as the book's pages do
SCHEME = "<style>:root { color-scheme: light dark }</style>"
# makes a module of a figure's `source` inside the page
IMPORT = "import(URL.createObjectURL(new Blob([source], {type: 'text/javascript'})))"


def known_ring(variant: str, ranks: int) -> dl.Schedule:
    first, direction = VARIANTS[variant]
    return dl.ring(ranks, first_chunk=first, direction=direction)


def listed(states: Any) -> list:
    return [[[list(held) for held in row] for row in state] for state in states]


def step_of(page: Any, figure: int = 0) -> str:
    return page.locator(".ddp-slider").nth(figure).get_attribute("aria-valuetext")


def go(page: Any, step: int) -> None:
    page.locator(".ddp-slider").fill(str(step))


# What the table shows: for each rank and chunk the whole sum, the sign of the step's event and the status sign.
CELLS = """() => [...document.querySelectorAll('.ddp-table [role=row]')].slice(1).map(row =>
  [...row.querySelectorAll('.ddp-cell')].map(cell =>
    [cell.title, cell.querySelector('.ddp-event').textContent, cell.querySelector('.ddp-status').textContent]))"""
# The figure at every step of one ring, through its own slider.
FRAMES = """look => { const slider = document.querySelector('.ddp-slider'), frames = [];
  for (let step = 0; step <= +slider.max; step++) {
    slider.value = step; slider.dispatchEvent(new Event('input')); frames.push(look(step)); }
  return frames; }"""


def cells(page: Any) -> list[list[list[str]]]:
    return page.evaluate(CELLS)


def frames(page: Any, variant: str, ranks: int, look: str) -> list:
    """look() at every step of this ring."""
    page.get_by_role("button", name=variant).click()
    page.get_by_label("Ranks", exact=True).select_option(str(ranks))
    return page.evaluate(f"() => ({FRAMES})({look})")

"""Accumulation windows: the rule against `accumulate` and a closed form, the JavaScript against the rule, the page."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest
import torch
from conftest import Watch

import ddplab as dl
from ddplab.figures.windows import EPOCHS, MOST_BATCHES, MOST_EVERY, windows

IMPORT = "import(URL.createObjectURL(new Blob([source], {type: 'text/javascript'})))"
GRID = list(itertools.product(range(1, MOST_BATCHES + 1), range(1, MOST_EVERY + 1)))


def test_right_windows_are_those_of_accumulate():
    model = torch.nn.Linear(1, 1)
    for batches, every in ((11, 4), (8, 4), (1, 1), (1, 8), (16, 5), (5, 1)):
        expected = []
        for epoch in range(EPOCHS):
            for step in dl.accumulate(model, [torch.ones(1, 1)] * batches, every):
                with step:
                    step.backward(model(step.batch).sum())
                if step.syncs:
                    expected.append((epoch, step.index))
        found = windows(batches, every)
        assert [w.members[-1] for w in found] == expected
        assert all(w.applied and w.factor == 1 for w in found)


@pytest.mark.parametrize("loop", ["right", "article"])
def test_every_micro_batch_is_in_one_window_in_order(loop):
    for batches, every in GRID:
        found = windows(batches, every, loop)
        members = [m for w in found for m in w.members]
        assert members == list(itertools.product(range(EPOCHS), range(batches)))
        assert all(w.applied for w in found[:-1])


def test_the_articles_windows():
    found = windows(11, 4, "article")
    assert [len(w.members) for w in found] == [1, 4, 4, 3, 4, 4, 2]
    assert [w.factor for w in found if w.applied] == [1, 4, 4, 3, 4, 4]
    assert [w.applied for w in found] == [True] * 6 + [False]
    for batches, every in GRID:
        found = windows(batches, every, "article")
        steps = [w.members[-1] for w in found if w.applied]
        assert steps == [(e, i) for e in range(EPOCHS) for i in range(0, batches, every)]
        left = sum(len(w.members) for w in found if not w.applied)
        assert left == (batches - 1) % every
        assert all(w.factor == len(w.members) for w in found)


@pytest.mark.parametrize("bad", [{"batches": 0}, {"batches": 17}, {"every": 9}, {"every": True}, {"batches": 2.0}])
def test_bad_input_is_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be a whole number from 1 to"):
        dl.WindowFigure(**bad)


def test_the_still_says_the_same():
    figure = dl.WindowFigure(11, 4)
    ET.fromstring(figure.svg())
    article = figure.text().split("The article's loop")[1]
    assert (
        "windows of 1, 4, 4, 3, 4, 4;" in article and "1 window across" in article and "2 micro-batches lost" in article
    )
    assert "windows of 4, 4, 3, 4, 4, 3; mean gradient times 1, 1, 1, 1, 1, 1; nothing lost" in figure.text()


def test_javascript_has_the_same_rule_and_the_reader_drives_it(browser, tmp_path):
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    html = dl.WindowFigure(11, 4, caption="What to see.").html()
    (tmp_path / "figure.html").write_text(f'{head}<link rel="icon" href="data:,"><body>{html}', "utf-8")
    context = browser.new_context(viewport={"width": 390, "height": 844})
    watched = Watch(context, tmp_path.as_uri())
    page = watched.open("figure.html")
    for loop in ("right", "article"):
        drawn = page.evaluate(
            f"async ([source, grid, loop]) => {{ const m = await {IMPORT};"
            " return grid.map(([n, every]) => m.default.windowsOf(n, every, loop)) }",
            [dl.WindowFigure.esm(), GRID, loop],
        )
        for (batches, every), found in zip(GRID, drawn, strict=True):
            expected = [
                {"members": [list(m) for m in w.members], "applied": w.applied, "factor": w.factor}
                for w in windows(batches, every, loop)
            ]
            assert found == expected, (batches, every, loop)

    def shown(which: int) -> list[str]:
        return page.locator(".ddp-loop").nth(which).locator(".ddp-span").all_text_contents()

    assert shown(0) == ["×1"] * 6
    assert shown(1) == ["×1", "×4", "×4", "→", "×3", "×4", "×4", "lost"]
    assert page.locator(".ddp-loop").nth(1).locator(".ddp-sync").count() == 6
    assert page.locator(".ddp-lost").count() == 2
    page.get_by_label("Batches", exact=True).fill("9")
    assert shown(1) == ["×1", "×4", "×4"] * 2 and "Nothing lost" in page.locator(".ddp-facts").nth(1).text_content()
    page.get_by_label("every", exact=True).fill("8")
    assert "9 micro-batches, every 8." in page.locator("[aria-live=polite]").text_content()
    page.get_by_label("Batches", exact=True).fill("16")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for control in page.locator("input").all():
        assert control.get_attribute("data-lm-suppress-shortcuts") == "true"
    assert watched.problems == [] and watched.outside == []
    context.close()

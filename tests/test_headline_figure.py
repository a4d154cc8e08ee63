"""The headline figure in a browser: the JavaScript says what Python says, the reader's own numbers are taken."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from figure_pages import IMPORT, SCHEME

import ddplab as dl
from ddplab.headline import three_runs


def test_javascript_says_what_python_says(browser: Any) -> None:
    draw, cases, said = random.Random(5), [], []
    while len(cases) < 300:
        times, ranks, parameters = (
            sorted(draw.uniform(0.01, 2) for _ in range(3)),
            draw.randint(2, 64),
            draw.randint(1, 10**9),
        )
        noop, fp16, fp32 = times if draw.random() < 0.8 else (times[1], times[0], times[2])
        runs = three_runs(noop, fp32, fp16, parameters, ranks)
        target = draw.uniform(1, 3)
        said.append([runs.exposed_s, runs.communication_s, runs.hidden_s, runs.busbw_Bps, runs.ceiling, runs.efficiency]
                    + [runs.step_s(bits) for bits in (32, 16, 8, 1, 0)] + [runs.bits_for(target)])  # fmt: skip
        cases.append([[noop, fp32, fp16, 4 * parameters, ranks], target])
    page = browser.new_page()
    got = page.evaluate(
        f"async ([source, cases]) => {{ const m = await {IMPORT}; return cases.map(([given, target]) => {{"
        " const r = m.default.threeRuns(...given);"
        " return [r.exposed, r.communication, r.hidden, r.busbw, r.ceiling, r.efficiency,"
        " ...[32, 16, 8, 1, 0].map(r.step), r.bitsFor(target)]; }) }",
        [dl.HeadlineFigure.esm(), cases],
    )
    page.close()
    for expected, drawn in zip(said, got, strict=True):
        assert (drawn[-1] is None) == (expected[-1] is None)
        assert drawn[:-1] == pytest.approx(expected[:-1], rel=1e-9, abs=1e-12)
        assert expected[-1] is None or drawn[-1] == pytest.approx(expected[-1], rel=1e-9, abs=1e-9)


def test_the_readers_numbers(show: Any) -> None:
    mine = {"noop_ms": 700, "fp32_ms": 1500, "fp16_ms": 1000, "megabytes": 100, "ranks": 4}
    watched = show(dl.HeadlineFigure({"mine": mine}, caption="What three steps say."), head=SCHEME)
    page, spoken = watched.page, watched.page.locator("[aria-live]")
    assert "Computing takes 62.1 ms" in spoken.text_content()
    assert "needs 16 bits" in spoken.text_content()
    page.get_by_role("button", name="mine").click()
    assert "Computing takes 700 ms, and an fp32 step waits 800 ms" in spoken.text_content()
    assert "takes 1000 ms in all, 200 ms of them hidden" in spoken.text_content()
    assert page.locator(".ddp-bar").nth(4).text_content().startswith("700 ms, 2.14")
    field = page.get_by_label("fp16, ms")
    field.fill("1200")
    assert "takes 600 ms in all, 0 ms of them hidden" in spoken.text_content()
    field.fill("1600")
    assert "fp16 is no faster than fp32" in spoken.text_content()
    assert page.locator(".ddp-bar").count() == 0
    field.fill("-1")
    assert field.get_attribute("aria-invalid") == "true"
    assert "contradict" in spoken.text_content()  # the last number that could be one
    field.fill("1000")
    assert field.get_attribute("aria-invalid") == "false" and page.locator(".ddp-bar").count() == 5
    assert watched.problems == [] and watched.outside == []


def test_a_phone_shows_all_of_it(show: Any) -> None:
    for scheme in ("light", "dark"):
        watched = show(dl.HeadlineFigure(), head=SCHEME, viewport={"width": 390, "height": 844}, color_scheme=scheme)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert watched.problems == []


def test_still_and_sentence_hold_the_numbers() -> None:
    figure = dl.HeadlineFigure()
    assert "waits 120 ms" in figure.text() and "150 ms in all, 30 of them hidden" in figure.text()
    root = ET.fromstring(figure.svg())
    words = " ".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "1 bit" in words and "62.1 ms, 2.93 x" in words
    crossed = dl.HeadlineFigure(noop_ms=200)
    assert "contradict each other" in crossed.text() and ET.fromstring(crossed.svg()) is not None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"noop_ms": 0}, "noop_ms is a number, above 0"),
        ({"ranks": 1}, "ranks must be a whole number of at least 2"),
        ({"ranks": 10**6}, "ranks is 2 to 100000"),
        ({"hosts": 3}, "knows noop_ms, .* not hosts"),
        ({"presets": {"mine": {"noop_ms": 1}}}, "preset 'mine' has noop_ms"),
    ],
)
def test_other_numbers_are_refused(given: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dl.HeadlineFigure(**given)

"""The compression explorer: Python's codecs by hand, the JavaScript against Python, the page driven."""

from __future__ import annotations

import json
import math
import random
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from figure_pages import IMPORT, SCHEME

from ddplab.figures.compression import METHODS, CompressionFigure, encode, example_gradients, walk


def test_codecs_by_hand() -> None:
    g = [0.0, -0.0, 1.0, -3.0]
    bits = encode(g, "1-bit")  # zero counts as plus, or it could never recover
    assert bits.codes.tolist() == [1, 1, 1, 0] and bits.scale == 1.0
    assert bits.decoded.tolist() == [1, 1, 1, -1] and (np.array(g) - bits.decoded).tolist() == [-1, -1, 0, -2]
    assert bits.nbytes == 1 + 4 and encode([1.0] * 9, "1-bit").nbytes == 2 + 4
    whole = encode([1.27, -0.64, 0.005, 0.0], "int8")
    assert whole.codes.tolist() == [127, -64, 0, 0] and whole.scale == pytest.approx(0.01) and whole.nbytes == 8
    half = encode([1.0, -2.0, 65504.0, 1e5, 2e-8, 6e-8], "fp16")
    assert half.codes.tolist() == [0x3C00, 0xC000, 0x7BFF, 0x7C00, 0, 1] and half.nbytes == 12
    assert half.decoded[3] == math.inf and half.decoded[4] == 0.0 and half.decoded[5] == 2.0**-24
    top = encode([0.1, -3.0, 0.2, 3.0], "top-k", k=2)
    assert top.codes.tolist() == [0, 1, 0, 1] and top.decoded.tolist() == [0, -3, 0, 3] and top.nbytes == 16
    assert encode([2.0, 2.0, 2.0], "top-k", k=1).codes.tolist() == [1, 0, 0]
    assert encode([0.0, 0.0], "int8").decoded.tolist() == encode([0.0, 0.0], "1-bit").decoded.tolist() == [0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_what_was_sent_and_what_is_left_make_up_the_gradients(method: str) -> None:
    g = example_gradients(steps=200, seed=3)
    w = walk(g, method, feedback=True)
    left = w.residual.mean(axis=1)
    assert w.sent.cumsum(axis=0) + left == pytest.approx(g.mean(axis=1).cumsum(axis=0), abs=1e-10)
    norms = np.linalg.norm(w.residual, axis=(1, 2))
    assert norms[100:].max() < 1.2 * norms[50:100].max()  # it stops growing
    assert w.error[-1] < w.error[20] / 2 or w.error[-1] < 1e-5
    alone = walk(g, method, feedback=False)
    assert alone.residual[0] == pytest.approx(w.residual[0])
    assert alone.corrected.tolist() == g.tolist()
    if method in ("1-bit", "top-k"):
        assert alone.error[-1] > 0.8 * alone.error[20] > 10 * w.error[-1]


def test_constant_gradients_come_through() -> None:
    g = np.broadcast_to([0.1, -0.2, 0.3, 5.0], (200, 2, 4))
    assert np.abs(walk(g, "1-bit").sent.mean(axis=0) - g[0, 0]).max() < 0.04
    assert np.abs(walk(g, "1-bit", feedback=False).sent.mean(axis=0) - g[0, 0]).max() > 1


def test_javascript_encodes_as_python_does(browser: Any) -> None:
    draw = random.Random(11)
    edge = [0.0, -0.0, 65503.9, 65519.9, 65520.0, -65520.0, 1e30, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 6.1e-5, 2.0**-14]
    edge += [1 + 2.0**-11, 1 + 3 * 2.0**-11, 2047.5, 2048.5, 4095.0, 1023.75 * 2.0**-24, 1 - 2.0**-12]
    edge += [draw.choice([-1, 1]) * 2 ** draw.uniform(-27, 17) for _ in range(4000)]
    edge += [draw.randint(-(2**13), 2**13) * 2.0 ** draw.randint(-30, 6) for _ in range(2000)]  # many halves
    halves = encode(edge, "fp16")
    cases = []
    for _ in range(150):
        n = draw.randint(1, 16)
        values = draw.choice([[draw.gauss(0, 1) for _ in range(n)], [draw.randint(-3, 3) / 2 for _ in range(n)]])
        cases.append([values, draw.choice(METHODS), draw.randint(1, n)])
    walks = [(example_gradients(3, 5, 40, seed=s), m, f, 2) for s, m in enumerate(METHODS) for f in (True, False)]
    page = browser.new_page()
    got = page.evaluate(
        f"""async ([source, edge, cases, walks]) => {{ const {{ encodeValues, walkSteps }} = (await {IMPORT}).default;
        const finite = v => (Math.abs(v) === Infinity ? String(v).slice(0, -5) : v);
        const half = encodeValues(edge, "fp16", 1);
        return {{ codes: half.codes, decoded: half.decoded.map(finite), cases: cases.map(c => encodeValues(...c)),
          walks: walks.map(w => walkSteps(...w).map(s => [s.corrected, s.residual, s.sent, s.error])) }} }}""",
        [CompressionFigure.esm(), edge, cases, [[g.tolist(), *how] for g, *how in walks]],
    )
    page.close()
    assert got["codes"] == halves.codes.tolist()
    assert [float(v) for v in got["decoded"]] == halves.decoded.tolist()
    for case, ours in zip(cases, got["cases"], strict=True):
        theirs = encode(*case)
        assert ours["codes"] == theirs.codes.tolist() and ours["nbytes"] == theirs.nbytes, case
        assert ours["decoded"] == pytest.approx(theirs.decoded.tolist(), rel=1e-12)
        assert ours["scale"] == pytest.approx(theirs.scale, rel=1e-12)
    for (g, *how), steps in zip(walks, got["walks"], strict=True):
        w = walk(g, *how)
        for kind, expected in enumerate((w.corrected, w.residual, w.sent, w.error)):
            assert np.array([step[kind] for step in steps]) == pytest.approx(expected, abs=1e-12)


def said(page: Any) -> str:
    return page.locator("[aria-live]").text_content()


def test_the_reader_steps_and_changes_the_method(show: Any) -> None:
    figure = CompressionFigure(step=2)
    watched = show(figure, head=SCHEME, scheme="file")
    page, g = watched.page, figure.gradients
    assert "Worker 1, step 3 of 60: 1-bit sends 5 bytes instead of 32." in said(page)
    page.get_by_label("One step forward").press("Enter")
    assert "step 4 of 60" in said(page)
    page.get_by_label("Step", exact=True).press("End")
    for feedback, name in ((True, "on"), (False, "off")):
        page.get_by_role("group", name="Error feedback").get_by_role("button", name=name).click()
        for method, sent in (("fp16", 16), ("int8", 12), ("1-bit", 5), ("top-k", 16)):
            page.get_by_role("button", name=method).press("Enter")
            error = walk(g, method, feedback).error[-1]
            assert f"{method} sends {sent} bytes" in said(page)
            told = said(page).split("what was sent is ")[1].split("%")[0]
            assert float(told) / 100 == pytest.approx(error, rel=0.06)
    page.get_by_label("k", exact=True).press("Home")
    assert "top-k sends 8 bytes" in said(page)
    page.get_by_role("group", name="Worker").get_by_role("button", name="3").click()
    page.get_by_text("The values in numbers").click()
    rows = page.locator(".ddp-data tbody tr")
    assert rows.filter(has_text="on the wire").locator("td").all_text_contents().count("sent") == 1
    shown = [float(text) for text in rows.filter(has_text="gradient").locator("td").all_text_contents()]
    assert shown == pytest.approx(g[-1, 2], rel=1e-4)
    page.get_by_role("button", name="int8").click()
    assert not page.get_by_label("k", exact=True).is_visible()
    assert watched.problems == [] and watched.outside == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(show: Any, scheme: str) -> None:
    figures = [CompressionFigure(method=method, step=5) for method in METHODS]
    figures += [CompressionFigure(np.zeros((1, 1, 1))), CompressionFigure(example_gradients(4, 16, 3), method="fp16")]
    watched = show(*figures, viewport={"width": 390, "height": 844}, color_scheme=scheme, head=SCHEME)
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.problems == []


def test_the_still_and_the_words_say_the_same() -> None:
    for figure in (CompressionFigure(), CompressionFigure(method="top-k", feedback=False, k=8, step=59)):
        ET.fromstring(figure.svg())
        json.dumps(figure.state)
    assert "worker 1 sends 5 bytes instead of 32" in CompressionFigure().text()
    assert "0.0% off" in CompressionFigure(method="top-k", k=8).text()


def test_bad_figures_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(steps, workers, values\)"):
        CompressionFigure(np.zeros(8))
    with pytest.raises(ValueError, match="at most 200, 4 and 16"):
        CompressionFigure(np.zeros((2, 5, 8)))
    with pytest.raises(ValueError, match="finite and below 32752"):
        CompressionFigure(np.full((2, 2, 2), np.nan))
    with pytest.raises(ValueError, match="method is fp16"):
        CompressionFigure(method="zip")
    with pytest.raises(ValueError, match="k must be a whole number from 1 to 8"):
        CompressionFigure(k=9)
    with pytest.raises(ValueError, match="step must be a whole number from 0 to 59"):
        CompressionFigure(step=60)
    with pytest.raises(ValueError, match="feedback is True or False"):
        CompressionFigure(feedback=1)
    with pytest.raises(ValueError, match="only finite values"):
        encode([math.nan], "1-bit")
    with pytest.raises(ValueError, match="at least one number"):
        encode([], "1-bit")

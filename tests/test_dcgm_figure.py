"""The link-health figure: Python and JavaScript judge alike, the reader drives it, the chapter's examples are in it."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET

import pytest
from conftest import Watch

import ddplab as dl
from ddplab.figures.linkhealth import COMPUTE_MS, GRADIENT_MB, LINKS, RANKS, judged, step_on

IMPORT = "import(URL.createObjectURL(new Blob([source], {type: 'text/javascript'})))"


def test_a_step_is_the_timeline_of_its_buckets():
    step = step_on(300, 120, 4, 0.1196, 50)
    sent = 120e6 * 2 * (RANKS - 1) / RANKS
    assert step.forward_s == pytest.approx(0.1) and step.compute_s == pytest.approx(0.3)
    assert step.communication_s == pytest.approx(sent / (0.1196e9 / 2))  # one after another, at half the rate
    assert step.buckets[0].start_s == pytest.approx(0.05) and step.done_s == step.buckets[-1].end_s
    hidden = step_on(300, 120, 4, 240, 100)
    assert hidden.exposed_s == pytest.approx(sent / 4 / 240e9)  # the last bucket, whole


def test_the_opening_state_is_the_chapters_healthy_job():
    figure = dl.LinkFigure()
    assert "Mean utilisation of the link 0.6%; healthy" in figure.text()
    ET.fromstring(figure.svg())
    assert "article: mean utilisation of the link at least 85%: 0.6%, fails" in figure.svg()
    slow = dl.LinkFigure(compute_ms=200, gradient_MB=100, link="1 Gbit/s", health_pct=50)
    assert "repair the link first" in slow.text()


@pytest.mark.parametrize(
    "wrong",
    [{"compute_ms": 7}, {"gradient_MB": 0}, {"buckets": 17}, {"buckets": True}, {"link": "rope"}, {"health_pct": 3}],
)
def test_other_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is one of"):
        dl.LinkFigure(**wrong)


def test_javascript_judges_as_python_does_and_the_reader_drives_it(browser, tmp_path):
    draw = random.Random(5)
    cases = [
        (draw.choice(COMPUTE_MS), draw.choice(GRADIENT_MB), draw.randint(1, 16), *draw.choice(list(LINKS.values())),
         draw.randrange(10, 101, 5))
        for _ in range(200)
    ] + [(100, 100, 5, 12.5, 11.96, 80)]  # fmt: skip
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    html = dl.LinkFigure(caption="What to see.").html()
    (tmp_path / "figure.html").write_text(f'{head}<link rel="icon" href="data:,"><body>{html}', "utf-8")
    context = browser.new_context(viewport={"width": 390, "height": 844})
    watched = Watch(context, tmp_path.as_uri())
    page = watched.open("figure.html")
    drawn = page.evaluate(
        f"async ([source, cases]) => {{ const m = await {IMPORT}; return cases.map(c => m.default.judge(...c)) }}",
        [dl.LinkFigure.esm(), cases],
    )
    seen = set()
    for (compute, gradient, buckets, peak, usable, health), found in zip(cases, drawn, strict=True):
        step = step_on(compute, gradient, buckets, usable, health)
        verdict = judged(step, peak, usable)
        assert found["step"] == pytest.approx(step.step_s)
        assert sum(found["spans"], []) == pytest.approx([t for b in step.buckets for t in (b.start_s, b.end_s)])
        assert found["values"] == pytest.approx([value for _, _, value, _, _ in verdict.rules])
        assert found["holds"] == [holds for *_, holds in verdict.rules]
        seen.add(tuple(found["holds"][2:]))
    assert len(seen) == 4  # every answer of the two questions was among them

    says = page.locator(".ddp-says")
    assert says.text_content().startswith("Healthy: the link does what it can")
    page.get_by_label("Link runs at", exact=True).fill("50")
    assert "below its reference, but the computing hides it" in says.text_content()
    page.get_by_label("Link", exact=True).fill("0")  # 1 Gbit/s
    assert "repair the link first" in says.text_content()
    assert "1 Gbit/s. article: link busy, on average" in page.locator("[aria-live=polite]").text_content()
    page.get_by_label("Link runs at", exact=True).fill("100")
    rules = page.locator(".ddp-rule b").all_text_contents()
    assert rules[0].endswith("✓") and rules[2].endswith("✓") and rules[3].endswith("✗")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for control in page.locator("input").all():
        assert control.get_attribute("data-lm-suppress-shortcuts") == "true"
    assert watched.problems == [] and watched.outside == []
    context.close()

"""The overlap figure and the bucket figure in a browser: the JavaScript computes what Python computes."""

from __future__ import annotations

import functools
import random
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from figure_pages import IMPORT, SCHEME

import ddplab as dl
from ddplab.figures.overlap import listed
from ddplab.profile import Gradient, Profile
from ddplab.timeline import Compression, assign, predict_step

PROFILE = Profile.of([(400_000 * (1 + i % 4), 0.004) for i in range(24)], forward_s=0.05, optimizer_s=0.01)


def random_profile(draw: random.Random) -> Profile:
    """Up to 40 gradients of two dtypes, some ready at the same moment."""
    times = sorted(round(draw.random(), 2) for _ in range(draw.randint(1, 40)))
    gradients = [
        Gradient(
            f"p{i}", draw.randint(1, 2_000_000), t, len(times) - 1 - i, draw.choice(["float32", "float16", "bfloat16"])
        )
        for i, t in enumerate(times)
    ]
    return Profile(gradients, draw.random(), 1.0, draw.random())


@pytest.fixture
def show(show: Any) -> Any:
    """conftest's `show`, dark where the reader wants it dark."""
    return functools.partial(show, head=SCHEME)


def test_javascript_predicts_what_python_predicts(browser: Any) -> None:
    draw, cases, expected = random.Random(3), [], []
    for _ in range(40):
        profile, cap = random_profile(draw), draw.choice([None, 0.5, 1, 5, 25, 100])
        ranks, factor = draw.choice([1, 2, 4, 1024]), draw.choice([1.0, 0.5, 1 / 32])
        link = dl.Link(10 ** draw.uniform(6, 9), latency_s=draw.uniform(0, 1e-3))
        slowdown, lanes, encode = draw.choice([1.0, 1.25]), draw.choice([1, 2]), draw.choice([0.0, 1e-9])
        how = Compression("c", factor, encode, encode)
        t = predict_step(profile, ranks, link, cap, how, slowdown=slowdown, lanes=lanes)
        expected.append(t)
        cases.append(
            [
                {
                    "forward": profile.forward_s,
                    "backward": profile.backward_s,
                    "optimizer": profile.optimizer_s,
                    "gradients": listed(profile),
                },
                {
                    "ranks": ranks,
                    "link": {"latency_s": link.latency_s, "payload_Bps": link.payload_Bps},
                    "cap": cap,
                    "factor": factor,
                    "encode": encode,
                    "decode": encode,
                    "slowdown": slowdown,
                    "lanes": lanes,
                },
            ]
        )
    page = browser.new_page()
    got = page.evaluate(
        f"async ([source, cases]) => {{ const m = await {IMPORT};"
        " return cases.map(([profile, how]) => m.default.predictStep(profile, how)) }",
        [dl.OverlapFigure.esm(), cases],
    )
    page.close()
    for said, drawn in zip(expected, got, strict=True):
        assert [b[0] for b in drawn["buckets"]] == [b.nbytes for b in said.buckets]
        for i, name in enumerate(("ready_s", "start_s", "end_s"), start=1):
            assert [b[i] for b in drawn["buckets"]] == pytest.approx([getattr(b, name) for b in said.buckets], rel=1e-9)
        assert [drawn["compute_end"], drawn["done"]] == pytest.approx([said.compute_end_s, said.done_s], rel=1e-9)
        assert drawn["forward"] + drawn["done"] + drawn["optimizer"] == pytest.approx(said.step_s, rel=1e-9)


def spoken_ms(page: Any, word: str) -> float:
    number, unit = re.search(rf"{word} ([\d.]+) (ms|s)\b", page.locator("[aria-live]").text_content()).groups()
    return float(number) * (1 if unit == "ms" else 1e3)


def test_sliders_move_the_prediction(show: Any) -> None:
    watched = show(dl.OverlapFigure(PROFILE, ranks=4, link="1gbit", bucket_cap_mb=25))
    page = watched.page
    assert spoken_ms(page, "step") == pytest.approx(predict_step(PROFILE, 4, "1gbit", 25).step_s * 1e3, rel=5e-3)

    ranks = page.get_by_label("Ranks", exact=True)
    assert ranks.get_attribute("aria-valuetext") == "4"
    ranks.focus()
    page.keyboard.press("ArrowRight")
    assert ranks.get_attribute("aria-valuetext") == "8"
    assert spoken_ms(page, "step") == pytest.approx(predict_step(PROFILE, 8, "1gbit", 25).step_s * 1e3, rel=5e-3)
    page.get_by_label("Bucket cap").press("Home")
    page.get_by_role("button", name="fp16").click()
    said = predict_step(PROFILE, 8, "1gbit", 0.5, "fp16")
    assert spoken_ms(page, "step") == pytest.approx(said.step_s * 1e3, rel=5e-3)
    assert page.locator(".ddp-bucket").count() == len(said.buckets)
    page.get_by_label("Link").press("End")
    assert "exposed" in page.locator("[aria-live]").text_content()

    page.get_by_text("The buckets as a table").click()
    assert page.locator(".ddp-data tbody tr").count() == len(said.buckets)
    assert watched.problems == [] and watched.outside == []


def test_prediction_and_measurement_stand_on_one_axis(show: Any) -> None:
    slow = predict_step(PROFILE, 4, "0.5gbit", 5)
    watched = show(dl.OverlapFigure(PROFILE, ranks=4, link="1gbit", bucket_cap_mb=5, timeline=slow), slow.figure())
    page = watched.page
    assert page.locator(".ddp-timeline").count() == 3
    tick = "svg => [...svg.querySelectorAll('.ddp-tick')].map(t => t.textContent)"
    first, second = (page.locator(".ddp-timeline").nth(i).evaluate(tick) for i in (0, 1))
    assert first == second
    assert page.locator(".ddplab-figure").nth(1).locator("input").count() == 0
    assert watched.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(show: Any, scheme: str) -> None:
    watched = show(
        dl.OverlapFigure(PROFILE, link="1gbit"),
        dl.BucketFigure(PROFILE),
        viewport={"width": 390, "height": 844},
        color_scheme=scheme,
    )
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.problems == []


def test_the_still_says_the_same() -> None:
    figure = dl.OverlapFigure(PROFILE, ranks=8, link="10gbit", timeline=predict_step(PROFILE, 8, "10gbit"))
    ET.fromstring(figure.svg())
    ET.fromstring(dl.BucketFigure(PROFILE).svg())
    assert f"{predict_step(PROFILE, 8, '10gbit', 25).step_s * 1e3:.4g} ms" in figure.text()
    assert f"{len(assign(PROFILE))} buckets" in dl.BucketFigure(PROFILE).text()


def test_bad_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="a profile, a timeline or both"):
        dl.OverlapFigure()
    with pytest.raises(ValueError, match="compression is none, fp16"):
        dl.OverlapFigure(PROFILE, compression="zip")
    with pytest.raises(ValueError, match="encode_ns"):
        dl.OverlapFigure(PROFILE, encode_ns=-1)

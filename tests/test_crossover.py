"""From which link speed down compression pays: the closed form against schedules, the timeline and a search."""

from __future__ import annotations

import importlib.util
import math
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figure_pages import IMPORT, SCHEME

import ddplab as dl
from ddplab.crossover import FP32, FREE, ROUTINGS
from ddplab.figures.crossover import CrossoverFigure, facts, pays
from ddplab.profile import Gradient, Profile

MB = 1_000_000
ROOMY = {"latency_s": 0.0, "wire_efficiency": 1.0}


def drawn(draw: random.Random) -> dl.Compressor:
    costs = [draw.choice([0.0, 10 ** draw.uniform(-12, -8)]) for _ in range(2)]
    return dl.Compressor("m", draw.choice([1.0, 0.5, 0.25, 1 / 32, 0.02, 1.5]), draw.choice(list(ROUTINGS)), *costs)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_and_seconds_are_those_of_the_schedules(ranks: int) -> None:
    nbytes = 24 * MB * ranks // ranks
    link = dl.Link.parse("1gbit", latency_s=1e-4)
    topology = dl.Topology(ranks, link=link)
    for builder, one in ((dl.ring, FP32), (dl.direct, dl.Compressor("two", 1.0, "two-phase"))):
        schedule = builder(ranks)
        assert one.bytes_sent(ranks, nbytes) == pytest.approx(dl.predict(schedule, nbytes, topology).bytes_sent.max())
        still = replace(link, latency_s=0.0)
        assert one.seconds(ranks, nbytes, still) == pytest.approx(
            dl.predict(schedule, nbytes, dl.Topology(ranks, link=still)).seconds, rel=1e-9
        )
    assert FP32.seconds(ranks, nbytes, link) == pytest.approx(dl.ring_seconds(ranks, nbytes, link), rel=1e-12)
    # one all-gather is the second half of a ring whose buffer is all ranks' payloads
    gather = dl.Compressor("gather", 1.0, "all-gather")
    assert gather.seconds(ranks, nbytes, link) == pytest.approx(dl.ring_seconds(ranks, nbytes * ranks, link) / 2)


def test_a_routing_says_how_often_a_codec_runs() -> None:
    e, d, nbytes, n = 3e-9, 2e-9, 8 * MB, 4
    expected = {"ring": d, "two-phase": 2 * d + e / n, "all-gather": n * d}
    for routing, beside in expected.items():
        one = dl.Compressor("m", 0.1, routing, e, d)
        assert one.encoding_s(nbytes) == pytest.approx(e * nbytes)
        assert one.beside_s(n, nbytes) == pytest.approx(beside * nbytes)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_gradient_takes_what_the_timeline_says(overlap: bool) -> None:
    """With overlap the bound of many buckets: the timeline comes close from above as buckets become small."""
    pieces, nbytes, backward = (400, 40 * MB, 0.2) if overlap else (1, 40 * MB, 0.2)
    grads = [Gradient(f"p{i}", nbytes // 4 // pieces, backward * (i + 1) / pieces, i) for i in range(pieces)]
    profile = Profile(grads, backward / 2, backward)
    link, encode, decode = dl.Link.parse("1gbit", **ROOMY), 0.3e-9, 0.2e-9
    how = dl.Compression("fp16", 0.5, encode, decode)
    step = dl.predict_step(profile, 4, link, 0.001 if overlap else 25, how).step_s
    ours = dl.Compressor("fp16", 0.5, "ring", encode, decode).seconds(4, nbytes, link, compute_s=0.3, overlap=overlap)
    assert ours <= step * (1 + 1e-9)
    assert step == pytest.approx(ours, rel=0.01 if overlap else 1e-9)


@pytest.mark.parametrize("overlap", [False, True])
def test_below_the_crossover_it_pays_and_just_above_it_does_not(overlap: bool) -> None:
    draw, kinds = random.Random(3), {"finite": 0, "never": 0, "always": 0}
    for _ in range(1000):
        baseline = replace(FP32, encode_s_per_byte=draw.choice([0.0, 10 ** draw.uniform(-12, -8)]))
        link = dl.Link(1e9, latency_s=draw.choice([0.0, 1e-4]), wire_efficiency=draw.uniform(0.5, 1))
        x = dl.crossover(
            [one := drawn(draw)], draw.choice([2, 3, 4, 8, 64]), 10 ** draw.uniform(3, 9), link,
            compute_s=draw.choice([0.0, 10 ** draw.uniform(-3, 0)]), overlap=overlap, baseline=baseline,
        )  # fmt: skip
        rate = x.rate_Bps(one)
        tried = [10 ** draw.uniform(2, 14) for _ in range(20)]
        if rate == 0:
            kinds["never"] += 1
            assert x.speedup(one, 1.0) < 1 + 1e-9  # on the slowest link it does not pay
        elif rate == math.inf:
            kinds["always"] += 1
            assert all(x.speedup(one, r) > 1 - 1e-9 for r in tried)
        else:
            kinds["finite"] += 1
            assert all(x.speedup(one, r) > 1 - 1e-9 for r in tried if r < rate)
            assert x.speedup(one, rate * 0.999) > 1 and x.speedup(one, rate * 1.001) < 1 + 1e-9
    assert all(number > 30 for number in kinds.values()), kinds


def test_known_crossovers() -> None:
    """fp16 that costs c a byte saves half of 2(N-1)/N bytes: they cross at B = (N-1)/N / c."""
    link = dl.Link(1e9, **ROOMY)
    half = dl.Compressor("fp16", 0.5, "ring", 0.4e-9, 0.1e-9)
    assert dl.crossover([half], 4, MB, link).rate_Bps(half) == pytest.approx(0.75 / 0.5e-9)
    # hidden: fp32 must first stick out of what backward takes with the encoding
    assert dl.crossover([half], 4, MB, link, compute_s=0.3, overlap=True).rate_Bps(half) == pytest.approx(
        1.5 * MB / (0.2 + 0.4e-9 * MB)
    )
    # the naive all-gather of bits sends (N-1)/32, the ring 2(N-1)/N: they are equal at 64 ranks
    bits = dl.Compressor("1-bit", 1 / 32, "all-gather")
    x = {n: dl.crossover([bits], n, MB, link).frame().of_baseline[0] for n in (8, 64, 128)}
    assert x == pytest.approx({8: 0.125, 64: 1.0, 128: 2.0})
    assert dl.crossover([bits], 128, MB, link).rate_Bps(bits) == 0
    assert dl.crossover(ranks=1).frame().crossover_Gbps.tolist() == [0.0] * 5


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="""routing is "ring", "two-phase" or "all-gather", not 'star'"""):
        dl.Compressor("m", 1.0, "star")
    with pytest.raises(ValueError, match="factor is a number, 0 or more"):
        dl.Compressor("m", -1)
    with pytest.raises(TypeError, match="ddplab.Compressor objects"):
        dl.crossover(["fp16"])
    with pytest.raises(ValueError, match="at least one"):
        dl.crossover([])
    for bad in ({"ranks": 0}, {"nbytes": 0}, {"nbytes": math.nan}, {"compute_s": -1}, {"link": "fast"}):
        with pytest.raises(ValueError):
            dl.crossover(**bad)
    with pytest.raises(TypeError, match="True or False"):
        dl.crossover(overlap=1)


def test_torch_stays_out() -> None:
    code = "import sys, ddplab as dl; dl.crossover().frame(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the figure


def test_javascript_computes_what_python_computes(browser: Any) -> None:
    draw, cases, expected = random.Random(5), [], []
    speeds = [0.01, 0.3, 1.0, 25.0, 9000.0]
    for _ in range(150):
        one, baseline = drawn(draw), replace(FP32, encode_s_per_byte=draw.choice([0.0, 3e-10]))
        link = dl.Link(1e9 / 8, latency_s=draw.choice([0.0, 5e-5]), wire_efficiency=draw.uniform(0.5, 1))
        how = {"compute_s": draw.choice([0.0, 0.05]), "overlap": draw.random() < 0.5, "baseline": baseline}
        x = dl.crossover([one], draw.choice([1, 2, 4, 96]), 10 ** draw.uniform(3, 10), link, **how)
        cases.append({
            "ranks": x.ranks, "nbytes": x.nbytes, "compute": x.compute_s, "faster": 1, "latency": link.latency_s,
            "efficiency": link.wire_efficiency, "backward": 2 / 3, "overlap": x.overlap, "baseline": facts(baseline),
            "one": facts(one),
        })  # fmt: skip
        rate = x.rate_Bps(one) * 8 / 1e9
        expected.append(["never" if rate == 0 else "always" if rate == math.inf else rate]
                        + [x.seconds(one, gbps * 1e9 / 8) for gbps in speeds])  # fmt: skip
    page = browser.new_page()
    got = page.evaluate(
        f"""async ([source, cases, speeds]) => {{ const m = await {IMPORT};
        return cases.map(s => {{ const c = m.default.crossing(s), rate = c.rate(s.one);
          const told = rate === 0 ? "never" : rate === Infinity ? "always" : rate;
          return [told, ...speeds.map(g => c.seconds(s.one, g))]; }}) }}""",
        [CrossoverFigure.esm(), cases, speeds],
    )
    page.close()
    for ours, theirs in zip(got, expected, strict=True):
        assert [type(v) is str for v in ours] == [type(v) is str for v in theirs]
        assert [v for v in ours if type(v) is not str] == pytest.approx(
            [v for v in theirs if type(v) is not str], rel=1e-9
        )


def example(**how: Any) -> tuple[dl.Crossover, list[dict[str, Any]]]:
    costs = {"fp16": (4e-10, 2e-10), "int8": (9e-10, 2e-10), "1-bit": (7e-10, 3e-10), "top-k 1%": (4e-9, 1e-11)}
    some = [replace(one, encode_s_per_byte=e, decode_s_per_byte=d) for one in FREE[1:] for e, d in [costs[one.name]]]
    points = [{"compressor": one.name, "rate_Gbps": rate, "speedup": 1.5} for one in some for rate in (0.1, 1)]
    return dl.crossover([FP32, *some], 4, 25.6e6, "1gbit", compute_s=0.1, **how), points


def said(page: Any) -> str:
    return page.locator("[aria-live]").text_content()


def test_the_reader_moves_link_ranks_and_codecs(show: Any) -> None:
    x, points = example()
    watched = show(x.figure(points), head=SCHEME, scheme="file")
    page = watched.page
    for one in x.compressors[1:]:
        assert f"{one.name} {pays(x.rate_Bps(one))}" in said(page)
    best = min(x.compressors, key=x.seconds)
    assert f"with {best.name}, {x.speedup(best):.3g} times as fast" in said(page)
    assert page.locator(".ddp-point").count() == len(points) and page.locator(".ddp-cross").count() == 4

    page.get_by_label("Ranks", exact=True).press("ArrowRight")
    assert page.get_by_label("Ranks", exact=True).get_attribute("aria-valuetext") == "8"
    assert page.locator(".ddp-point").count() == 0 and "other settings" in said(page)
    eight = replace(x, ranks=8)
    assert f"1-bit {pays(eight.rate_Bps(x.compressors[3]))}" in said(page)
    page.get_by_label("Ranks", exact=True).press("ArrowLeft")
    assert page.locator(".ddp-point").count() == len(points)

    page.get_by_role("button", name="beside backward").click()
    assert f"fp16 {pays(replace(x, overlap=True).rate_Bps(x.compressors[1]))}" in said(page)
    page.get_by_role("button", name="time", exact=True).click()
    assert page.locator(".ddp-line").count() == 5
    page.get_by_label("Read off at").press("End")
    assert "At 10 Tbit/s a step takes 100 ms with fp32; nothing is faster." in said(page)
    page.get_by_label("Codecs").press("End")
    assert page.get_by_label("Codecs").get_attribute("aria-valuetext") == "1000 times as fast"
    page.get_by_text("The compressors in numbers").click()
    assert page.locator(".ddp-data tbody tr").count() == 5
    assert watched.problems == [] and watched.outside == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(show: Any, scheme: str) -> None:
    x, points = example(overlap=True)
    figures = (x.figure(points), x.figure(show="time"), dl.crossover(ranks=1).figure())
    watched = show(*figures, viewport={"width": 390, "height": 844}, color_scheme=scheme, head=SCHEME)
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.problems == []


def test_the_still_and_the_words_say_the_same() -> None:
    x, points = example()
    for figure in (x.figure(points), x.figure(show="time"), dl.crossover(ranks=1).figure()):
        ET.fromstring(figure.svg())
        assert figure.text().startswith(f"{figure.prediction.ranks} ranks")
    assert "8 measured points" in x.figure(points).text() and "pays on any link" in dl.crossover().figure().text()
    assert pays(1e9 / 8) == "pays below 1 Gbit/s" and pays(9.99e7 / 8) == "pays below 99.9 Mbit/s"
    assert pays(2.5e12 / 8) == "pays below 2.5 Tbit/s" and pays(0) == "never pays"


def test_bad_figures_are_refused() -> None:
    x, points = example()
    with pytest.raises(TypeError, match="what ddplab.crossover returns"):
        CrossoverFigure(x.frame())
    with pytest.raises(ValueError, match="at most 8 compressors"):
        dl.crossover([dl.Compressor(f"m{i}", 0.5) for i in range(9)]).figure()
    with pytest.raises(ValueError, match='"speedup" or "time"'):
        x.figure(show="money")
    for bad, match in (
        ({"compressor": "zip", "rate_Gbps": 1, "speedup": 1}, "point 0: no compressor .* 'zip'"),
        ({"compressor": "fp16", "rate_Gbps": 1}, "point 0 needs compressor, rate_Gbps and speedup"),
        ({"compressor": "fp16", "rate_Gbps": 0, "speedup": 1}, "positive numbers"),
        ({"compressor": "fp16", "rate_Gbps": 1, "speedup": math.nan}, "positive numbers"),
    ):
        with pytest.raises(ValueError, match=match):
            x.figure([bad])


def test_the_recording_counts_no_waiting_twice() -> None:
    """Two ranks: one encodes for 1 s and waits 2 s for the other, which encodes for 3 s; then both need 1 s. 4 s."""
    path = Path(__file__).parents[1] / "benchmarks/crossover.py"
    spec = importlib.util.spec_from_file_location("record_crossover", path)
    record = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record)
    ranks = [{"int8": np.array([[1.0, 3.0]] * 3)}, {"int8": np.array([[3.0, 1.0]] * 3)}]
    assert record.middle(ranks)["int8"].tolist() == [3.0, 1.0]
    ranks[1]["int8"][0] = 50, 50  # one noisy pass
    assert record.middle(ranks)["int8"].tolist() == [3.0, 1.0]

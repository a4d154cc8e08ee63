"""The figure of NCCL's cost model in a browser: the JavaScript computes what Python computes."""

from __future__ import annotations

import functools
import random
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from figure_pages import IMPORT, SCHEME

from ddplab.figures.tuning import TuningFigure, described, facts
from ddplab.nccl import NODES, Machine, tuning_model
from ddplab.nccl.model import PROTOCOLS


@pytest.fixture
def show(show: Any) -> Any:
    """conftest's `show`, dark where the reader wants it dark."""
    return functools.partial(show, head=SCHEME)


def test_javascript_computes_what_python_computes(browser: Any) -> None:
    draw, machines = random.Random(7), [machine for graphs in NODES.values() for machine in graphs.values()]
    for _ in range(40):
        tree = draw.choice([None, draw.uniform(1, 90)]), draw.choice([False, True])
        nvls = draw.choice([(0, 0.0), (8, 40.0), (4, draw.uniform(5, 90), draw.uniform(5, 90))])
        capability, channels = draw.choice([70, 80, 86, 90, 100, 120]), draw.randint(1, 32)
        machines.append(Machine("m", draw.randint(2, 72), capability, channels, draw.uniform(1, 90), *tree, *nvls))
    sizes = [0, 1, 63, 64, 127, 128, 4095, 4096, 2**19 - 1, 2**19, 25 * 2**20, 2**29 - 1, 2**29, 2**40]
    sizes += [int(2 ** draw.uniform(3, 36)) for _ in range(20)]
    page = browser.new_page()
    got = page.evaluate(
        f"""async ([source, facts, machines, sizes]) => {{ const m = await {IMPORT};
        return machines.map(one => {{ const t = m.default.tuning(facts, one); return {{
          pairs: t.pairs, latency: t.pairs.map(pair => t.latency(...pair)),
          busbw: t.pairs.map(pair => t.busbw(...pair)),
          seconds: sizes.map(size => t.pairs.map(pair => t.seconds(size, ...pair))),
          chosen: sizes.map(size => t.choose(size)),
          forced: sizes.map(size => t.choose(size, ["Tree"], ["LL", "Simple"])),
          nothing: t.choose(1, ["PAT"]) }} }}) }}""",
        [TuningFigure.esm(), facts(), [described(one) for one in machines], sizes],
    )
    page.close()
    for machine, drawn in zip(machines, got, strict=True):
        model = tuning_model(machine)
        assert [tuple(pair) for pair in drawn["pairs"]] == model.pairs
        assert drawn["latency"] == pytest.approx([model.latency_us(*pair) for pair in model.pairs], rel=1e-12)
        assert drawn["busbw"] == pytest.approx([model.busbw_GBps(*pair) for pair in model.pairs], rel=1e-12)
        for size, seconds, chosen, forced in zip(
            sizes, drawn["seconds"], drawn["chosen"], drawn["forced"], strict=True
        ):
            assert seconds == pytest.approx([model.seconds(size, *pair) for pair in model.pairs], rel=1e-12)
            assert tuple(chosen) == model.choose(size)
            assert tuple(forced) == model.choose(size, ["Tree"], ["LL", "Simple"])
        assert drawn["nothing"] is None


def said(page: Any) -> str:
    return page.locator("[aria-live]").text_content()


def test_the_reader_changes_node_message_and_knobs(show: Any) -> None:
    watched = show(TuningFigure("8xA100", nbytes=2**25))
    page, model = watched.page, tuning_model("8xA100")
    free, forced = model.choose(2**25), model.choose(2**25, protocols=["LL"])
    assert f"32 MiB: NCCL would choose {'/'.join(free)}" in said(page)
    page.get_by_role("group", name="NCCL_PROTO").get_by_role("button", name="LL", exact=True).click()
    times = model.seconds(2**25, *forced) / model.seconds(2**25, *free)
    assert "NCCL_PROTO=LL: Ring/LL" in said(page) and f"{times:.2f} times as long" in said(page)

    message = page.get_by_label("Message")
    message.focus()
    page.keyboard.press("Home")
    assert message.get_attribute("aria-valuetext") == "1 KiB" and "1.00 times as long" in said(page)
    page.get_by_role("button", name="8xH100").click()
    page.get_by_label("Message").press("End")
    assert "NCCL would choose NVLS/Simple" in said(page)
    assert page.locator(".ddp-line").count() == 7
    page.get_by_label("GPUs", exact=True).press("Home")
    assert page.get_by_label("GPUs", exact=True).get_attribute("aria-valuetext") == "2"
    page.get_by_role("button", name="bus bandwidth").click()
    page.get_by_text("The model in numbers").click()
    cells = (
        page.locator(".ddp-data tbody tr").filter(has_text=re.compile("^Ring/LL128")).locator("td").all_text_contents()
    )
    two = tuning_model("8xH100", ranks=2)
    assert cells[:2] == [f"{two.latency_us('Ring', 'LL128'):.1f} µs", f"{two.busbw_GBps('Ring', 'LL128'):.1f} GB/s"]
    assert watched.problems == [] and watched.outside == []


def test_the_legend_names_what_is_drawn(show: Any) -> None:
    """NVLS only on nodes that have it, also after the reader has moved to another one and back."""
    watched = show(TuningFigure("8xA100"))
    page = watched.page

    def drawn_and_named() -> tuple[set[str], set[str]]:
        lines = page.locator(".ddp-line title").all_text_contents()
        drawn = {part for line in lines for part in line.split("/")}
        named = {text.partition(":")[0] for text in page.locator(".ddp-legend span").all_text_contents()}
        colours = page.evaluate("document.querySelectorAll('.ddp-legend i').length")
        assert colours == len(set(page.locator(".ddp-line").evaluate_all("lines => lines.map(l => l.style.stroke)")))
        return drawn, named

    seen = []
    for node in ("8xH100", "8xA100"):
        seen.append(drawn_and_named())
        page.get_by_role("button", name=node).click()
    for drawn, named in (*seen, drawn_and_named()):
        assert drawn == named
    assert "NVLS" in seen[1][1] and "NVLS" not in seen[0][1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(show: Any, scheme: str) -> None:
    figures = (TuningFigure("8xA100"), TuningFigure("8xH100", show="bandwidth"))
    watched = show(*figures, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.problems == []


def test_the_still_and_the_words_say_the_same() -> None:
    for figure in (TuningFigure(), TuningFigure("8xH100", show="bandwidth"), tuning_model("8xV100").figure()):
        ET.fromstring(figure.svg())
    model = tuning_model("8xA100")
    assert "25 MiB it would choose Ring/Simple" in TuningFigure(model, nbytes=25 * 2**20).text()
    assert len(PROTOCOLS) == 3


def test_bad_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="between 1 KiB and 4 GiB"):
        TuningFigure(nbytes=1)
    with pytest.raises(ValueError, match='"time" or "bandwidth"'):
        TuningFigure(show="speed")
    with pytest.raises(ValueError, match="no machine is called"):
        TuningFigure("9xA100")

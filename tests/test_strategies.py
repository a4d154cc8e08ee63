"""Memory and traffic of DDP, ZeRO, FSDP2, HSDP and local SGD: closed forms against torch's own objects."""

from __future__ import annotations

import math
import random
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from figure_pages import IMPORT, SCHEME

import ddplab as dl
from ddplab.figures.strategies import KINDS
from ddplab.strategies import strategies
from ddplab.strategyruns import BUILT


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    return {row.strategy: row for row in dl.measure_strategies(ranks=4, ranks_per_host=2).itertuples()}


@pytest.mark.parametrize("name", BUILT)
def test_torch_keeps_and_sends_what_the_form_says(counted, name):
    row = counted[name]
    assert row.kept_B == row.predicted_kept_B > 0
    assert row.sent_B == row.predicted_sent_B > 0


def by_name(*args: Any, **how: Any) -> dict[str, Any]:
    return {one.name: one for one in strategies(*args, **how)}


def test_zero_papers_numbers():
    """Rajbhandari 2020, figure 1: 7.5 billion parameters of 16 bytes, 64 GPUs: 120, 31.4, 1.88 GB."""
    many = by_name(7.5e9, ranks_per_host=64, param_bytes=2, grad_bytes=2, state_bytes=12, blocks=10**6)
    assert math.isclose((many["DDP"].held - many["DDP"].extra) / 1e9, 120)
    assert round((many["ZeRO-1"].held - many["ZeRO-1"].extra) / 1e9, 1) == 31.4
    assert round(many["FSDP2"].held / 1e9, 2) in (1.87, 1.88)
    assert many["ZeRO-1"].sent == many["DDP"].sent, "stage 1 sends what data parallelism sends"
    assert math.isclose(many["FSDP2"].sent, 1.5 * many["DDP"].sent), "stage 3 sends half as much again"


def test_hosts():
    one, two = by_name(1e9, hosts=1), by_name(1e9, hosts=2, ranks_per_host=4)
    assert all(row.leaving == 0 for row in one.values())
    assert two["HSDP"].leaving == 4e9 and two["DDP"].leaving == 7e9  # 1.0 S and 1.75 S, as in the chapter on levels
    assert one["HSDP"].sent == one["FSDP2"].sent and one["HSDP"].held == one["FSDP2"].held
    lonely = by_name(1e9, hosts=4, ranks_per_host=1)  # nothing to shard inside a host
    assert lonely["HSDP"].sent == lonely["DDP"].sent and lonely["HSDP"].leaving == lonely["DDP"].leaving
    assert two["DiLoCo"].sent == two["local SGD"].sent == two["DDP"].sent / 100


def test_one_rank_sends_nothing():
    assert all(row.sent == row.leaving == 0 for row in strategies(1e6, ranks_per_host=1))


def test_table_is_in_gigabytes():
    table = dl.strategy_table(7e9, hosts=4)
    assert table.loc["DDP", "held_GB"] == 140 and table.index.name == "strategy"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"parameters": 0}, "parameters is a number, above 0"),
        ({"parameters": True}, "parameters is"),
        ({"hosts": 0}, "hosts must be a whole number of at least 1"),
        ({"every": 1.5}, "every must be a whole number"),
        ({"blocks": "x"}, "blocks must be a whole number"),
        ({"param_bytes": -1}, "param_bytes is a number, above 0"),
    ],
)
def test_other_numbers_are_refused(how, says):
    with pytest.raises(ValueError, match=says):
        strategies(**{"parameters": 1e9, **how})


@pytest.mark.parametrize("how", [{"ranks": 1}, {"ranks": 4, "ranks_per_host": 3}, {"ranks": 4, "width": 3}])
def test_runs_that_cannot_be_laid_out_are_refused(how):
    with pytest.raises(ValueError, match="ranks"):
        dl.measure_strategies(**how)


def test_javascript_computes_as_python(browser: Any) -> None:
    draw, cases, said = random.Random(3), [], []
    for _ in range(200):
        p, g, s = draw.choice(list(KINDS.values()))
        size, hosts, per_host = draw.uniform(1e6, 1e12), draw.randint(1, 64), draw.randint(1, 16)
        blocks, every = draw.randint(1, 100), draw.randint(1, 1000)
        rows = strategies(size, hosts=hosts, ranks_per_host=per_host, param_bytes=p, grad_bytes=g, state_bytes=s,
                          blocks=blocks, every=every)  # fmt: skip
        said.append([[one.name, one.held, one.sent, one.leaving] for one in rows])
        cases.append({"parameters": size, "hosts": hosts, "perHost": per_host, "p": p, "g": g, "s": s,
                      "blocks": blocks, "every": every})  # fmt: skip
    page = browser.new_page()
    got = page.evaluate(
        f"async ([source, cases]) => {{ const m = await {IMPORT}; return cases.map(given => "
        "m.default.strategyRows(given).map(r => [r.name, r.held, r.sent, r.leaving])) }",
        [dl.StrategyFigure.esm(), cases],
    )
    page.close()
    for expected, drawn in zip(said, got, strict=True):
        for mine, theirs in zip(expected, drawn, strict=True):
            assert mine[0] == theirs[0] and theirs[1:] == pytest.approx(mine[1:], rel=1e-12)


def test_the_readers_numbers(show: Any) -> None:
    watched = show(dl.StrategyFigure(caption="What fits."), head=SCHEME)
    page, spoken = watched.page, watched.page.locator("[aria-live]")
    # 7e9 parameters x 16 bytes and the buckets' copy do not fit into 80 GB; sharded state does
    assert spoken.text_content().startswith("The simplest that fits is ZeRO-1")
    assert "too much" in page.locator("tbody tr").nth(0).text_content()
    page.get_by_label("parameters, billions").fill("1")
    assert spoken.text_content().startswith("The simplest that fits is DDP")
    page.get_by_label("parameters, billions").fill("40")
    assert spoken.text_content().startswith("The simplest that fits is FSDP2")
    page.get_by_label("hosts", exact=True).fill("1")
    assert spoken.text_content().startswith("Nothing fits into 80 GB")
    assert page.locator("tbody tr").nth(0).locator("td").nth(3).text_content() == "–"
    field = page.get_by_label("GPUs a host")
    field.fill("0")
    assert field.get_attribute("aria-invalid") == "true"
    page.get_by_role("button", name="fp32, Adam").click()
    assert page.get_by_role("button", name="fp32, Adam").get_attribute("aria-pressed") == "true"
    assert watched.problems == [] and watched.outside == []


def test_a_phone_shows_all_of_it(show: Any) -> None:
    for scheme in ("light", "dark"):
        watched = show(dl.StrategyFigure(), head=SCHEME, viewport={"width": 390, "height": 844}, color_scheme=scheme)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert watched.problems == []


def test_still_and_sentence() -> None:
    figure = dl.StrategyFigure()
    assert "DDP: holds 126" in figure.text() and "2 x 8 GPUs of 80 GB" in figure.text()
    assert ET.fromstring(figure.svg()) is not None


@pytest.mark.parametrize(
    ("given", "says"),
    [({"billions": 0}, "billions is a number"), ({"hosts": 10**6}, "hosts is at most"), ({"kind": "fp8"}, "kind is")],
)
def test_figures_of_other_numbers_are_refused(given: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dl.StrategyFigure(**given)

"""Link loads: the closed forms of star, chain and ring, and the figure in a real browser."""

from __future__ import annotations

import pytest
from conftest import Watch

import ddplab as dl
from ddplab.figures.linkloads import RANKS, SHAPES, link_loads


@pytest.mark.parametrize("n", RANKS)
def test_loads_are_the_closed_forms(n):
    star, chain, ring = (link_loads(build(n)) for build in SHAPES.values())
    assert star["sent"] == [[0, n - 1], *[[1, 0]] * (n - 1)]
    assert star["received"] == [[n - 1, 0], *[[0, 1]] * (n - 1)]
    assert chain["sent"] == [[0, 1], *[[1, 1]] * (n - 2), [1, 0]]
    each = pytest.approx([(n - 1) / n] * 2)
    assert ring["sent"] == ring["received"] == [each] * n
    assert star["busiest_over_mean"] == pytest.approx(n / 2)
    assert chain["busiest_over_mean"] == pytest.approx(n / (n - 1) if n > 2 else 1)
    assert ring["busiest_over_mean"] == pytest.approx(1)
    assert star["time"] / ring["time"] == pytest.approx(n)
    filling = 13 / 12 if n > 2 else 1  # of the default chain's pipe
    assert chain["time"] / ring["time"] == pytest.approx(n / (n - 1) * filling)
    assert star["busy"] == pytest.approx(1 / n) and ring["busy"] == pytest.approx(1)


@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_loads_agree_with_the_cost_model(shape, n):
    size = 840_000 * 1024  # whole bytes in every chunk
    model = dl.predict(SHAPES[shape](n), size, dl.Topology(n, link=dl.Link(1e9, 0.0, 1.0)))
    loads = link_loads(SHAPES[shape](n))
    for way, key in (("up", "sent"), ("down", "received")):
        assert [model.bytes_per_link["host", r, way] for r in range(n)] == pytest.approx(
            [sum(load) * size for load in loads[key]], rel=1e-6
        )
    assert model.seconds == pytest.approx(loads["time"] * size / 1e9, rel=1e-6)
    assert sum(p[2] for p in loads["pairs"]) * size == pytest.approx(model.bytes_sent.sum(), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "word"),
    [({"shape": "tree"}, "shape"), ({"ranks": 9}, "2 to 8"), ({"ranks": True}, "2 to 8"), ({"nbytes": 0}, "payload")],
)
def test_bad_input_is_refused(options, word):
    with pytest.raises(ValueError, match=word):
        dl.LinkLoads(**options)


def test_the_reader_drives_it(browser, tmp_path):
    figure = dl.LinkLoads("star", 4, nbytes=25.6e6, caption="What to see.")
    page = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    (tmp_path / "figure.html").write_text(f'{page}<link rel="icon" href="data:,"><body>{figure.html()}', "utf-8")
    context = browser.new_context(viewport={"width": 390, "height": 844})
    watched = Watch(context, tmp_path.as_uri())
    page = watched.open("figure.html")

    def bars():
        return [cell.text_content() for cell in page.locator(".ddp-load").all()]

    def facts():
        return page.locator(".ddp-note").text_content()

    assert bars() == ["76.8 MB", "76.8 MB", *["25.6 MB"] * 6]
    assert "Busiest / mean: 2.00" in facts() and "6.00 S/B, 4.00 times the ring's" in facts() and "25% of it" in facts()
    page.get_by_role("button", name="ring").click()
    assert bars() == ["38.4 MB"] * 8 and "Busiest / mean: 1.00" in facts()
    page.get_by_label("GPUs", exact=True).select_option("8")
    assert bars() == ["44.8 MB"] * 16
    page.get_by_role("button", name="chain").click()
    page.get_by_label("Gradient S").select_option("1000000000")
    assert bars() == ["1 GB", "1 GB", *["2 GB"] * 12, "1 GB", "1 GB"]
    assert "chain, 8 GPUs. Busiest direction of a link: 2 GB." in page.locator("[aria-live=polite]").text_content()
    assert page.locator(".ddp-top").count() == 12  # not by colour alone: bold, and the words
    for n in (2, 8):
        page.get_by_label("GPUs", exact=True).select_option(str(n))
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    for control in page.locator("button, select").all():
        assert control.get_attribute("data-lm-suppress-shortcuts") == "true"
    assert watched.problems == [] and watched.outside == []
    context.close()

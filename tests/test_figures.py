"""What every figure is made of: its HTML, its still, its words, and the recipe for a new one."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from figure_pages import OTHERS, RINGS, known_ring, step_of

import ddplab as dl
from ddplab.figures import Figure, RingStepper, Stepper, base, figure_of


def test_the_watch_sees_what_a_page_asks_of_others_and_it_gets_nothing(show):
    """What every test of a page asserts with `outside == []` would otherwise hold for any page."""
    watched = show(
        RingStepper(4),
        head='<link rel="stylesheet" href="http://192.0.2.1/a.css"><script src="//no.invalid/b.js"></script>',
    )
    assert watched.outside == ["http://192.0.2.1/a.css", "http://no.invalid/b.js"]
    assert len(watched.problems) == 2 and all("ERR_NAME_NOT_RESOLVED" in problem for problem in watched.problems)


def test_figures_on_one_page_are_independent(show: Any) -> None:
    watched = show(RingStepper(4), RingStepper(4), RingStepper(4, "gloo"))
    page = watched.page
    page.get_by_role("button", name="One step forward").nth(1).click()
    assert [step_of(page, i)[:6] for i in range(3)] == ["step 0", "step 1", "step 0"]
    page.get_by_role("button", name="NCCL").nth(0).click()
    pressed = [button.text_content() for button in page.locator("button[aria-pressed=true]").all()]
    assert pressed == ["NCCL", "article", "gloo"]
    assert watched.problems == []


def test_an_output_shown_again_comes_alive_again(show: Any) -> None:
    """What notebooks do: the same HTML inserted into a living page, its script re-created."""
    watched = show(RingStepper(4))
    watched.page.evaluate(
        """html => { const box = document.createElement('div'); box.innerHTML = html; document.body.append(box);
             const old = box.querySelector('script[type=module]'), script = document.createElement('script');
             script.type = 'module'; script.textContent = old.textContent; old.replaceWith(script); }""",
        RingStepper(4).html(),
    )
    watched.page.wait_for_function("document.querySelectorAll('.ddp-slider').length === 2")
    watched.page.get_by_role("button", name="One step forward").nth(1).click()
    assert [step_of(watched.page, i)[:6] for i in range(2)] == ["step 0", "step 1"]
    assert watched.problems == []


def test_html_is_the_same_each_time_and_asks_nobody() -> None:
    figure = RingStepper(4, caption="<b> & co")
    html = figure.html()
    assert html == RingStepper(4, caption="<b> & co").html()
    assert html != RingStepper(4).html()
    assert "<figcaption>&lt;b&gt; &amp; co</figcaption>" in html
    assert set(re.findall(r"https?://[^\s\"'`]+", html)) == {"http://www.w3.org/2000/svg"}
    assert str(base.HERE) not in html and "\n\n" not in html
    bundle = figure._repr_mimebundle_()
    assert list(bundle) == ["text/html", "image/svg+xml", "text/plain"]
    assert "import " not in figure.esm().split("const", 1)[0]


def test_state_cannot_break_out_of_its_script() -> None:
    rows = [(0, 0, 1, 0, 1), (1, 1, 0, 0, 0)]
    html = Stepper(dl.Schedule.from_rows("</script><img src=x>", 2, 1, rows)).html()
    assert html.count("</script>") == 2 and "<img src=x>" not in html


@pytest.mark.parametrize("figure", [RingStepper(8, "gloo", step=7), *map(Stepper, OTHERS)], ids=lambda f: f.text()[:20])
def test_still_is_a_picture_of_its_own(figure: Stepper) -> None:
    svg = figure.svg()
    root = ET.fromstring(svg)
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {f"GPU{rank}" for rank in range(figure.schedule.ranks)} <= set(words)
    assert "href" not in svg and "currentColor" not in svg
    assert float(root.get("width")) < 1100


def test_the_known_rings_get_the_ring_stepper() -> None:
    for variant, ranks in RINGS:
        figure = known_ring(variant, ranks).figure()
        assert isinstance(figure, RingStepper)
        assert known_ring(figure.state["variant"], ranks) == known_ring(variant, ranks)
    assert type(figure_of(dl.ring(4, first_chunk=2))) is Stepper
    assert type(dl.tree(4).figure()) is Stepper


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RingStepper(1), "2 to 8 ranks, not 1"),
        (lambda: RingStepper(9), "2 to 8 ranks, not 9"),
        (lambda: RingStepper(True), "2 to 8 ranks, not True"),
        (lambda: RingStepper(4.0), "2 to 8 ranks, not 4.0"),
        (lambda: RingStepper(4, "mpi"), "article, textbook, nccl, gloo; not 'mpi'"),
        (lambda: RingStepper(4, step=7), "steps 0 (the start) to 6; step 7"),
        (lambda: RingStepper(4, step=1.5), "step must be a whole number, not 1.5"),
        (lambda: RingStepper(4, nbytes=0), "at least 1; not 0"),
        (lambda: RingStepper(4, nbytes=float("nan")), "at least 1; not nan"),
        (lambda: RingStepper(4, nbytes="1 GB"), "at least 1; not '1 GB'"),
        (lambda: Stepper(dl.ring(32)), "32 ranks, 32 chunks and 1984 transfers"),
        (lambda: dl.chain(4).figure(), "chain(4, chunks=4)"),
        (lambda: Stepper(4), "a ddplab.Schedule, not int"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


def test_the_recipe_for_a_new_figure_works(show: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two listings in base.py's docstring, as they stand there."""
    blocks = re.findall(r"(?:^    .*\n|^\n)+", inspect.getdoc(base) + "\n", re.MULTILINE)
    python, script = (textwrap.dedent(block).strip() + "\n" for block in blocks if block.strip())
    folder = tmp_path / "figures"
    folder.mkdir()
    for name in ("kit.js", "figure.css"):
        shutil.copy(base.HERE / name, folder)
    (folder / "links.js").write_text(script, "utf-8")
    monkeypatch.setattr(base, "HERE", folder)
    names: dict[str, Any] = {"Figure": Figure, "still_svg": base.still_svg}
    exec(compile(python, "links.py", "exec"), names)
    watched = show(names["LinkLoads"]({"GPU0": 3_000_000, "GPU1": 1000}))
    page = watched.page
    assert page.locator("p[aria-live]").text_content() == "3 MB"
    page.get_by_label("Scale").fill("500000000")
    assert page.locator("p[aria-live]").text_content() == "500 MB"
    assert watched.problems == []

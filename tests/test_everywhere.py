"""Every page as a reader without a network has it: unpacked from a zip, by keyboard, on a screen and a phone, light
and dark. axe-core, the engine of many accessibility checkers, looks at a page of each kind in two views, and with
`make test ARGS=--every-view` at each page in all four.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
import yaml
from conftest import ROOT, Watch

TOC = yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))
PAGES = [TOC["root"], *(chapter["file"] for part in TOC["parts"] for chapter in part["chapters"])]
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text("utf8")
SCREEN, PHONE = {"width": 1200, "height": 900}, {"width": 390, "height": 844}
# A page of each kind: axe takes seconds a page, so it looks at these by default, and at all with --every-view.
KINDS = {"book/intro", "book/capstone", "book/claims", "book/cheatsheet", "book/choose", "book/bibliography"}
KINDS |= {"labs/02_ring"}
COLOURS = ["color-contrast", "link-in-text-block"]
LAYOUT = ["scrollable-region-focusable", "target-size"]  # the rules whose answer depends on the width
SERIOUS = """([include, rules]) => axe.run(include === "looks" ? { include: looks } : document, {
  preload: false, resultTypes: ["violations"], ...rules,
}).then(r => r.violations.filter(v => ["serious", "critical"].includes(v.impact)).map(v => [
  v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 160) + " " + n.failureSummary),
]))"""
# Colours take long, and a page has thousands of words in few looks: `looks` is one element of each look.
LOOKS = """() => {
  const found = new Map(), words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const element = words.currentNode.parentElement;
    if (!words.currentNode.data.trim() || !element.checkVisibility({ visibilityProperty: true })) continue;
    const { color, fontSize, fontWeight, opacity } = getComputedStyle(element);
    const look = [color, fontSize, fontWeight, opacity];
    for (let e = element; e; e = e.parentElement) look.push(getComputedStyle(e).backgroundColor);
    const key = look.filter(v => v !== "rgba(0, 0, 0, 0)").join();
    if (!found.has(key)) found.set(key, element);
  }
  window.looks = [...found.values()];
  return looks.length;
}"""
TOO_WIDE = """() => document.documentElement.scrollWidth <= innerWidth ? [] :
  [...document.querySelectorAll("article *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1)
    .slice(0, 5).map(e => e.outerHTML.slice(0, 80))"""
# The theme finds the boxes that scroll, and makes Tab stop there, a moment after the page changed.
TAB_STOPS = """() => [...document.querySelectorAll("article [tabindex='-1']")]
  .every(e => !e.checkVisibility() || e.scrollWidth <= e.clientWidth)"""
KEYS = {"button": "Enter", "checkbox": "Space", "radio": "Space", "number": "ArrowUp", "select-one": "ArrowDown"}


@pytest.fixture(scope="module")
def unpacked(html: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages from a zip, in a folder whose name has a space and an umlaut."""
    room = tmp_path_factory.mktemp("zip")
    with zipfile.ZipFile(room / "html.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for file in sorted(f for f in html.rglob("*") if f.is_file()):
            packed.write(file, file.relative_to(html))
    with zipfile.ZipFile(room / "html.zip") as packed:
        packed.extractall(room / "für alle")
    return room / "für alle"


@pytest.fixture(scope="module")
def seen(browser: Any, unpacked: Path) -> Iterator[Watch]:
    """One tab for all pages, which can reach nothing but the folder."""
    context = browser.new_context(viewport=SCREEN, color_scheme="light", reduced_motion="reduce")
    yield Watch(context, unpacked.as_uri())
    context.close()


def press_everything(page: Any) -> None:
    """By keyboard alone: each figure that has controls looks different after one of them was pressed."""
    for figure in page.locator("article .ddplab-figure").all():
        name, before = figure.get_attribute("data-figure"), figure.inner_html()
        assert figure.locator("img.ddp-still").count() == 0, f"{name} is not alive"
        controls = figure.locator("input:enabled, select:enabled, button:enabled")
        kinds = controls.evaluate_all("all => all.map(c => [c.type, c.tabIndex])")
        assert all(place >= 0 for _, place in kinds), f"{name}: Tab skips a control"
        for at, (kind, _) in enumerate(kinds):
            controls.nth(at).press(KEYS.get(kind, "ArrowRight"))
            if figure.inner_html() != before:
                break
        else:
            assert not kinds, f"{name}: no key changes it"


def serious(page: Any, **rules: Any) -> list[Any]:
    """What axe calls serious: by these rules on the whole page, by those of colours among its looks."""
    assert page.evaluate(LOOKS) > 5
    colours = {"runOnly": {"type": "rule", "values": COLOURS}}
    return page.evaluate(SERIOUS, ["all", rules]) + page.evaluate(SERIOUS, ["looks", colours])


@pytest.mark.parametrize("path", PAGES)
def test_a_page_works_from_a_zip_for_everyone(seen: Watch, path: str, request: pytest.FixtureRequest) -> None:
    """Silent, alive by keyboard, no wider than a phone; and axe, on some pages in two of four views: --every-view."""
    page, every = seen.page, request.config.getoption("every_view")
    page.set_viewport_size(SCREEN)
    page.emulate_media(color_scheme="light")
    seen.open(f"{path}.html")
    assert page.evaluate("document.querySelectorAll('article h1').length") == 1
    assert page.locator("meta[name=viewport][content*='width=device-width']").count(), "a phone would shrink the page"
    press_everything(page)
    if axe := every or path in KINDS:
        page.evaluate(AXE)
        assert serious(page, rules={rule: {"enabled": False} for rule in [*COLOURS, *LAYOUT]}) == []
    views = [("dark", PHONE), ("dark", SCREEN), ("light", PHONE)]
    for scheme, size in views if every else views[:1]:
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)
        assert page.evaluate(TOO_WIDE) == []
        page.wait_for_function(TAB_STOPS)
        if axe:
            assert serious(page, runOnly={"type": "rule", "values": LAYOUT}) == [], (scheme, size)
    assert (seen.problems, seen.outside) == ([], [])


def test_what_unfolds_is_there_for_the_keyboard(seen: Watch) -> None:
    """A folded box scrolls once it is open, and Tab stops at it."""
    page = seen.page
    page.set_viewport_size(PHONE)
    seen.open("book/ring.html")
    boxes = "article details pre"
    page.wait_for_function("s => [...document.querySelectorAll(s)].every(e => e.hasAttribute('tabindex'))", arg=boxes)
    page.evaluate("s => document.querySelectorAll(s).forEach(e => e.closest('details').open = true)", boxes)
    wide = "s => [...document.querySelectorAll(s)].filter(e => e.scrollWidth > e.clientWidth).length"
    assert page.evaluate(wide, boxes) > 0
    page.wait_for_function(TAB_STOPS)


def test_search_in_the_zip_finds_a_term_of_the_field(seen: Watch) -> None:
    page = seen.open("search.html?q=busbw")
    page.wait_for_selector("#search-results ul.search > li", timeout=20_000)
    page.wait_for_function("!document.querySelector('#search-results p.search-summary')?.textContent.includes('...')")
    found = page.locator("#search-results li > a")
    assert found.count() >= 3, found.all_text_contents()
    found.first.click()
    page.wait_for_function("document.querySelector('article')?.textContent.includes('busbw')")
    assert (seen.problems, seen.outside) == ([], [])

"""The pages in a real browser, over http and from a folder on disk, with nothing outside reachable."""

from __future__ import annotations

import gzip
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from conftest import ROOT

from ddplab.pages import pages


def chapter_pages(html: Path) -> list[str]:
    """Every page of the book, as a path below the folder of the pages."""
    found = sorted(f.relative_to(html).as_posix() for room in ("book", "labs") for f in (html / room).glob("*.html"))
    assert "book/intro.html" in found and "book/ring.html" in found
    return found


def test_pages_are_silent_over_http_too_and_ask_for_nothing_outside(watch, html):
    """From disk, every page is: see test_everywhere. Here one of each kind."""
    seen = watch("http")
    assert len(chapter_pages(html)) > 30
    for path in ("book/intro.html", "book/ring.html", "labs/02_ring.html", "book/claims.html", "book/api.html"):
        page = seen.open(path)
        assert page.evaluate("document.querySelectorAll('article h1').length") == 1, path
        assert (seen.problems, seen.outside) == ([], []), path


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_search_works_without_a_network(watch, scheme):
    seen = watch(scheme)
    page = seen.open("search.html?q=ring")
    page.wait_for_selector("#search-results ul.search > li", timeout=20_000)
    page.wait_for_function("!document.querySelector('#search-results p.search-summary')?.textContent.includes('...')")
    titles = page.evaluate("[...document.querySelectorAll('#search-results li > a')].map(a => a.textContent)")
    assert any("ring" in title.lower() for title in titles)
    assert (seen.problems, seen.outside) == ([], [])


CONTRAST = """() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const paint = colours => {
    for (const c of colours) { canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); }
    const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  };
  const behind = e => e ? [...behind(e.parentElement), getComputedStyle(e).backgroundColor] : [];
  const words = ".claim .admonition-title strong, .claim-ledger .verdict, math, figcaption";
  return [...document.querySelectorAll(words)].map(e => {
    const below = ["white", ...behind(e)], a = paint([...below, getComputedStyle(e).color]), b = paint(below);
    return [e.textContent.slice(0, 20), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_and_light_are_legible(watch, scheme):
    """The page follows the reader's system, and coloured words reach the contrast 4.5 that WCAG AA asks of text."""
    seen = watch(color_scheme=scheme)
    brightness = []
    for path in ("book/claims.html", "book/ring.html"):
        page = seen.open(path)
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        measured = page.evaluate(CONTRAST)
        assert measured and [m for m in measured if m[1] < 4.5] == []
        rgb = re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))
        brightness.append(sum(map(int, rgb[:3])))
    assert all(b > 700 if scheme == "light" else b < 200 for b in brightness)


def test_print_is_light_and_unfolded_and_the_screen_comes_back(watch):
    seen = watch(color_scheme="dark")
    page = seen.open("book/ring.html")
    folded = "document.querySelectorAll('article details:not([open])').length"
    before = page.evaluate(folded)
    assert before > 0
    page.evaluate(
        f"addEventListener('beforeprint', () => window.onPaper = [document.documentElement.dataset.theme, {folded}])"
    )
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert page.evaluate("window.onPaper") == ["light", 0]
    assert page.evaluate("document.documentElement.dataset.theme") == "dark" and page.evaluate(folded) == before


def test_formulas_are_drawn_by_the_browser(watch):
    page = watch("file").open("book/ring.html")
    sizes = page.evaluate("[...document.querySelectorAll('math')].map(m => m.getBoundingClientRect().height)")
    assert len(sizes) > 3 and min(sizes) > 5
    fraction = page.evaluate(
        "(() => { const f = document.querySelector('div.math mfrac'); const [a, b] = f.children;"
        " return b.getBoundingClientRect().top - a.getBoundingClientRect().top; })()"
    )
    assert fraction > 8, "the denominator stands below the numerator"


def gzipped(name: str, body: bytes) -> int:
    return len(body) if name.endswith(("png", "woff2")) else len(gzip.compress(body))


def test_pages_are_light(watch, html):
    """At most 1.2 MB gzipped, everything that a first visit loads. What all pages share is weighed on two of them."""
    responses: dict[str, list] = {}
    for path in ("book/ring.html", "book/intro.html"):
        seen, loaded = watch(), []  # with an empty cache
        seen.page.on("response", lambda response, loaded=loaded: loaded.append(response))
        seen.open(path)
        responses[path] = loaded
    shared = max(
        sum(gzipped(r.url.split("?")[0], r.body()) for r in loaded if "/_images/" not in r.url and path not in r.url)
        for path, loaded in responses.items()
    )
    assert shared > 100_000 and min(map(len, responses.values())) > 5
    for path in chapter_pages(html):
        page = (html / path).read_text("utf8")
        own = {html / "_images" / name for name in re.findall(r'src="[^"]*/_images/([^"]+)"', page)}
        weight = shared + gzipped(path, page.encode()) + sum(gzipped(file.name, file.read_bytes()) for file in own)
        assert weight < 1_200_000, f"{path}: {weight} bytes"


def test_a_claim_box_leads_to_the_cell_that_asserts_it(watch):
    page = watch("file").open("book/ring.html")
    page.click("#box-c21 .claim-evidence a")
    page.wait_for_function("location.hash === '#claim-c21'")
    assert "dl.claim(" in page.evaluate("document.querySelector('#claim-c21').textContent")


def test_exercises_are_offered_without_their_answers(html):
    """Both ways: the link below the title, and the theme's own download button."""
    with_exercises = {
        path.relative_to(ROOT).with_suffix("") for path in pages(ROOT) if "solution" in path.read_text("utf8")
    }
    assert {Path("book/ring"), Path("labs/02_ring")} <= with_exercises
    for source in with_exercises:
        page = (html / f"{source}.html").read_text("utf8")
        link = re.search(rf'href="(\.\./_downloads/[^"]*{source.name}\.ipynb)"', page)
        assert link, f"{source} has no link to its exercise notebook"
        assert "&lt;" not in re.search(r'<p class="exercise-download">.*?</p>', page, re.S)[0]
        assert f"_sources/{source}.ipynb" in page
        for file in ((html / source.parent / link[1]).resolve(), html / f"_sources/{source}.ipynb"):
            nb = nbformat.read(file, 4)
            assert not any("solution" in c.metadata.get("tags", []) or c.get("outputs") for c in nb.cells)
            assert any("exercise" in c.metadata.get("tags", []) for c in nb.cells)


class Links(HTMLParser):
    """The ids, links and pictures of one page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.pictures: list[dict] = []
        self.feed(file.read_text("utf8"))

    def handle_starttag(self, tag: str, attrs: list) -> None:
        found = dict(attrs)
        self.ids |= {found[k] for k in ("id", "name") if found.get(k)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "img":
            self.pictures.append(found)


def test_every_internal_link_and_anchor_exists(html):
    parsed = {f: Links(f) for f in html.rglob("*.html")}
    broken = []
    for file, page in parsed.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            anchor = unquote(url.fragment)
            if not target.exists() or (anchor and target in parsed and anchor not in parsed[target].ids):
                broken.append(f"{file.relative_to(html)} -> {link}")
    assert broken == []


def test_every_picture_says_what_it_shows(html):
    for path in chapter_pages(html):
        for picture in Links(html / path).pictures:
            alt = picture.get("alt", "")
            assert alt and not alt.startswith(("../", "_images")), (
                f"{path}: {picture.get('src', '')[:60]} has no alt text"
            )


def test_pages_tell_nothing_of_this_machine(html):
    for file in html.rglob("*"):
        if file.suffix in (".html", ".ipynb", ".md", ".js") and file.is_file():
            text = file.read_text("utf8")
            assert str(ROOT) not in text and "/tmp/" not in text and "ipykernel_" not in text, file


def test_the_api_page_has_every_public_name(html):
    import ddplab

    ids = Links(html / "book/api.html").ids
    assert {f"ddplab-{name}" for name in ddplab.__all__} <= ids

"""Lean pages that work from a folder on disk, and the reader's version of each lab on its page.

- The theme's script version of Font Awesome (1.5 MB) goes: its web font, shipped too, draws the same icons.
- A page with exercises offers them as a notebook without the answers; the theme's download button serves the same.
- Two labels that hide a button's own text from screen readers go, and a role that no list may hold.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

_EDITS = [
    (re.compile(r"\s*<script[^>]*fontawesome\.js[^>]*></script>"), ""),
    (re.compile(r'<summary aria-label="Toggle hidden content">'), "<summary>"),
    (re.compile(r'(<div class="citation"[^>]*) role="doc-biblioentry"'), r'\1 role="listitem"'),
    (re.compile(r'(<button class="btn search-button-field[^>]*?) aria-label="Search"'), r"\1"),
]


def offer_exercise(app: Any, doctree: nodes.document) -> None:
    """Below the title of a page with a derived exercise version, a link that downloads it."""
    room, _, name = app.env.docname.rpartition("/")
    file = f"exercises/{name}.ipynb"
    title = next(doctree.findall(nodes.title), None)
    if title is None or not (Path(app.srcdir) / room / file).exists():
        return
    link = addnodes.download_reference(
        "", "", nodes.literal("", f"{name}.ipynb", classes=["download"]), reftarget=file, refdoc=app.env.docname
    )
    before, after = nodes.Text("To work on it yourself, download "), nodes.Text(", this notebook without the answers.")
    offer = nodes.paragraph("", "", before, link, after, classes=["exercise-download"])
    title.parent.insert(title.parent.index(title) + 1, offer)


def finish(app: Any, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    out = Path(app.outdir)
    for page in out.rglob("*.html"):
        old = new = page.read_text("utf8")
        for pattern, by in _EDITS:
            new = pattern.sub(by, new)
        if new != old:
            page.write_text(new, "utf8")
    heavy = ("**/*.map", "_static/scripts/fontawesome*", "_static/*webpack-macros.html")
    for file in (f for pattern in heavy for f in out.glob(pattern)):
        file.unlink(missing_ok=True)
    for exercise in Path(app.srcdir).glob("*/exercises/*.ipynb"):
        source = out / "_sources" / exercise.parents[1].name / exercise.name
        if source.exists():
            source.write_bytes(exercise.read_bytes())


def setup(app: Any) -> dict[str, Any]:
    # Before Sphinx collects the files to download, which it does at the default priority.
    app.connect("doctree-read", offer_exercise, priority=100)
    app.connect("build-finished", finish)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

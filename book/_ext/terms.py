"""Links from the first use of a term on a page to its line in the glossary.

The glossary is a table: English, 中文, meaning. "algorithm bandwidth (algbw)" has two forms, "overflow, underflow" too.
A word that means other things elsewhere says of what it is, "kernel (of a GPU)", and is not linked by itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes

GLOSSARY = "book/glossary"
_ASIDE = r"(of|in|on|for) "
_SKIP = (nodes.title, nodes.reference, nodes.literal, nodes.literal_block, nodes.math, nodes.math_block, nodes.table,
         nodes.raw, nodes.rubric, nodes.caption)  # fmt: skip


def forms(entry: str) -> list[str]:
    """What a reader may meet of a glossary entry: "bus bandwidth (busbw)" -> ["bus bandwidth", "busbw"]."""
    found, parts = [], re.sub(r"\(\$[^$]*\$\)|\$[^$]*\$|\*|`", "", entry).split(",")
    for outer, _, inner in (part.partition("(") for part in parts):
        if not re.match(_ASIDE, inner):
            found += [outer.strip(), inner.strip(" )")]
        elif inner == parts[-1].partition("(")[2]:  # "worker, server (of an exchange)" says it of both
            return []
    return [text for text in found if len(text) > 1]


def anchor(entry: str) -> str:
    """The place of an entry on the glossary page."""
    return "term-" + re.sub(r"[^a-z0-9]+", "-", re.split(r"[(,]", entry)[0].lower()).strip("-")


def entries(text: str) -> list[str]:
    """The first column of the glossary's table."""
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows[1:] if row]


def pattern(known: dict[str, str]) -> re.Pattern:
    """Any of the forms, the longest first, as whole words, with a plural, a capital first letter too."""
    words = sorted(known, key=len, reverse=True)
    either = [re.escape(w) if w[0].isupper() else f"[{w[0]}{w[0].upper()}]{re.escape(w[1:])}" for w in words]
    return re.compile(rf"(?<![\w-])({'|'.join(either)})(?:e?s)?(?![\w-])")


def mark_rows(app: Any, doctree: nodes.document) -> None:
    """Each row of the glossary gets its place."""
    if app.env.docname != GLOSSARY:
        return
    for row in doctree.findall(nodes.row):
        first = row.next_node(nodes.entry)
        if isinstance(row.parent, nodes.tbody) and first is not None:
            row["ids"].append(anchor(first.astext()))


def link_first_uses(app: Any, doctree: nodes.document, docname: str) -> None:
    """Turn the first use of each term on a page into a link."""
    if docname in (GLOSSARY, "book/claims", "book/api", "book/bibliography") or app.builder.format != "html":
        return
    left, find = dict(app.ddplab_terms), app.ddplab_pattern
    to = app.builder.get_relative_uri(docname, GLOSSARY)
    for paragraph in list(doctree.findall(nodes.paragraph)):
        if _inside(paragraph, (nodes.table, nodes.title)) or _in_output(paragraph):
            continue
        for text in list(paragraph.findall(nodes.Text)):
            if _inside(text, _SKIP):
                continue
            _link(text, left, find, to)


def _link(text: nodes.Text, left: dict[str, str], find: re.Pattern, to: str) -> None:
    """Replace `text` by pieces, of which the first uses of terms still `left` are links."""
    said, at, pieces = text.astext(), 0, []
    for match in find.finditer(said):
        form = match[1] if match[1] in left else match[1][0].lower() + match[1][1:]
        if form not in left:
            continue
        place = left[form]
        for other in [f for f, p in left.items() if p == place]:
            del left[other]
        link = nodes.reference("", match[0], internal=True, refuri=f"{to}#{place}", classes=["term"])
        pieces += [nodes.Text(said[at : match.start()]), link]
        at = match.end()
    if pieces:
        text.parent.replace(text, [*pieces, nodes.Text(said[at:])])


def _inside(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    node = node.parent
    while node is not None:
        if isinstance(node, kinds):
            return True
        node = node.parent
    return False


def _in_output(node: nodes.Node) -> bool:
    while node is not None:
        if isinstance(node, nodes.container) and node.get("nb_element", "").startswith("cell_code"):
            return True
        node = node.parent
    return False


def read_glossary(app: Any) -> None:
    file = Path(app.srcdir) / f"{GLOSSARY}.md"
    text = file.read_text("utf8") if file.exists() else ""
    app.ddplab_terms = {form: anchor(entry) for entry in entries(text) for form in forms(entry)}
    app.ddplab_pattern = pattern(app.ddplab_terms or {"no term": ""})


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", read_glossary)
    app.connect("doctree-read", mark_rows)
    app.connect("doctree-resolved", link_first_uses)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

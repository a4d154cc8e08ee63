"""Below each title: how long the page takes to read, and how long it took to run in this build.

Reading counts the prose at 140 words a minute, slow enough for the tables, code and predictions that are not counted.
Running is what the
executed copy on the stage has noted.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from docutils import nodes

WORDS_A_MINUTE = 140


def words(doctree: nodes.Node) -> int:
    """Words of prose: paragraphs outside of code cells and tables."""
    count = 0
    for paragraph in doctree.findall(nodes.paragraph):
        above, node = [], paragraph.parent
        while node is not None:
            above.append(node)
            node = node.parent
        if not any(isinstance(n, nodes.table) or n.get("nb_element", "").startswith("cell_code") for n in above):
            count += len(paragraph.astext().split())
    return count


def seconds_of(source: Path) -> float | None:
    """Seconds that the notebook took, as its executed copy says; None for a page that runs nothing."""
    if source.suffix != ".ipynb":
        return None
    return json.loads(source.read_text("utf8"))["metadata"].get("ddplab", {}).get("seconds")


def say_times(app: Any, doctree: nodes.document) -> None:
    """One line under the title of a chapter or lab."""
    title = next(doctree.findall(nodes.title), None)
    seconds = seconds_of(Path(app.env.doc2path(app.env.docname)))
    if title is None or seconds is None:
        return
    minutes = max(1, math.ceil(words(doctree) / WORDS_A_MINUTE))
    text = f"Reading: about {minutes} {'minute' if minutes == 1 else 'minutes'}. "
    text += f"Running every cell took {max(1, round(seconds))} s in this build."
    title.parent.insert(title.parent.index(title) + 1, nodes.paragraph("", text, classes=["page-times"]))


def setup(app: Any) -> dict[str, Any]:
    app.connect("doctree-read", say_times, priority=110)  # after, hence above, the offer of the exercises
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

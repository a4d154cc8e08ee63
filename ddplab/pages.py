"""The book's pages as data: which files `_toc.yml` names, the notebooks in them, and the parameters of each."""

from __future__ import annotations

import ast
import copy
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import nbformat


class PageError(ValueError):
    """A page, a notebook or a claim that cannot go into the book; the message names it and says what to change."""


def pages(root: Path) -> list[Path]:
    """The source file of every page that `_toc.yml` names, in reading order. PageError: one is missing or double."""
    found: list[Path] = []

    def walk(node: Any) -> None:
        for item in node if isinstance(node, list) else node.items() if isinstance(node, dict) else ():
            if isinstance(item, tuple) and item[0] in ("root", "file"):
                files = [p for ext in (".md", ".ipynb") if (p := root / (item[1] + ext)).exists()]
                if len(files) != 1:
                    what = "no file" if not files else "two files, .md and .ipynb: remove one"
                    raise PageError(f"_toc.yml names {item[1]}, but there is {what}")
                found.append(files[0])
            else:
                walk(item[1] if isinstance(item, tuple) else item)

    walk(yaml.safe_load((root / "_toc.yml").read_text("utf8")))
    return found


def read(path: Path) -> nbformat.NotebookNode | None:
    """The notebook in an .ipynb or a MyST Markdown file; None for a plain Markdown page.

    Every cell gets its tags list (papermill needs one), an id by position (so that equal sources give equal copies),
    and `metadata.at`: where a person finds it, "line 12" of a Markdown file or "cell 3" of an .ipynb.
    """
    return copy.deepcopy(_parsed(path, path.read_text("utf8")))


@functools.lru_cache(maxsize=128)
def _parsed(path: Path, text: str) -> nbformat.NotebookNode | None:
    """What `read` gives: a page is asked for several times in a build, and to take it apart takes long."""
    import nbformat  # both take a second or more, and `dl.claim` needs no more of this module than PageError
    from myst_nb.core.read import is_myst_markdown_notebook, read_myst_markdown_notebook

    if path.suffix == ".ipynb":
        nb, lines = nbformat.reads(text, 4), None
    else:
        if not is_myst_markdown_notebook(text):
            return None
        nb = read_myst_markdown_notebook(text, add_source_map=True, path=path)
        lines = nb.metadata.pop("source_map")
    for i, cell in enumerate(nb.cells):
        cell.metadata.setdefault("tags", [])
        cell["id"] = f"cell-{i}"
        cell.metadata["at"] = f"line {lines[i]}" if lines else f"cell {i + 1}"
    return nb


def parameters(nb: nbformat.NotebookNode, page: str) -> dict[str, Any]:
    """Name and default of each parameter: the one cell tagged `parameters` holds `NAME = literal` lines only.

    A value computed there would keep its old value when papermill injects a new one below, so it is refused.
    """
    cells = [c for c in nb.cells if c.cell_type == "code" and "parameters" in c.metadata.tags]
    if len(cells) != 1:
        raise PageError(f"{page}: {len(cells)} cells are tagged `parameters`; a notebook needs exactly one")
    at, values = cells[0].metadata.at, {}
    try:
        for line in ast.parse(cells[0].source).body:
            if not (isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name)):
                raise ValueError
            values[line.targets[0].id] = ast.literal_eval(line.value)
    except (SyntaxError, ValueError):
        raise PageError(
            f"{page}, {at}: the parameters cell may only hold lines like RANKS = 4; compute in a later cell"
        ) from None
    return values


def convert(page: str, name: str, text: str, default: Any) -> Any:
    """The value that `-p NAME TEXT` means, of the default's own type (`QUICK 0` is False, `RANKS 8` a number)."""
    if isinstance(default, str):
        return text
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(default, bool):
        value = words.get(text.lower())
    else:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = None
        if isinstance(default, float) and isinstance(value, int):
            value = float(value)
    if value is None or (default is not None and type(value) is not type(default)):
        kind = "0 or 1" if isinstance(default, bool) else f"a value like {default!r}"
        raise PageError(f"{page}: parameter {name} takes {kind}, not {text!r}")
    return value

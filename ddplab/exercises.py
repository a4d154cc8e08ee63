"""Exercises from solutions: the solution is the only source, and the version with the answers taken out is derived.

A code cell tagged `solution` becomes a stub: signature and docstring stay, the body becomes a NotImplementedError.

    python -m ddplab.exercises .       # every page with exercises, into _build/exercises; nothing is executed
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import nbformat

from ddplab.claims import load_claims
from ddplab.pages import PageError, pages, read

HINT = "write it, then run the cell below."


def stub(source: str, hint: str = HINT) -> str:
    """`source` with every function emptied down to its signature and docstring; a comment where there is no function.

    PageError where the cell is not plain Python, or a function is on one line (its answer would stay).
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise PageError(f"a solution cell must be plain Python without % and ! lines: {error}") from None
    lines, edits = source.splitlines(), []

    def empty(body: list[ast.stmt], owner: str = "") -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                empty(node.body, f"{owner}{node.name}.")
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first, documented = node.body[0], ast.get_docstring(node) is not None
            if first.lineno == node.lineno:
                raise PageError(f"solution of {node.name}: put the body on lines of its own")
            start = first.end_lineno if documented else first.lineno - 1
            # Comments before the first statement give the answer away too.
            while not documented and (not lines[start - 1].strip() or lines[start - 1].lstrip().startswith("#")):
                start -= 1
            call = f"raise NotImplementedError({f'{owner}{node.name}: {hint}'!r})"
            edits.append((start, node.end_lineno, " " * first.col_offset + call))

    empty(tree.body)
    if not edits:
        return f"# Your turn: {hint}"
    for start, end, text in sorted(edits, reverse=True):
        lines[start:end] = [text]
    return "\n".join(lines)


def plain_markdown(text: str, claims: dict[str, dict] | None = None) -> str:
    """MyST that a notebook program cannot show, in plain Markdown: claim boxes, admonitions, labels, references."""

    def claim(match: re.Match) -> str:
        entry = (claims or {}).get(match[1])
        if entry is None:
            return f"> **Claim {match[1]}**"
        said = f"> **Claim {match[1]}** ({entry['verdict']}). The article says: {entry['says']}"
        return f"{said}\n>\n> {entry['correct']}"

    text = re.sub(r"^`{3,}\{claim\}\s*(\w+)\s*\n`{3,}\s*$", claim, text, flags=re.M)
    text = re.sub(r"^\([\w-]+\)=\n", "", text, flags=re.M)
    text = re.sub(r"^:::+\s*\{\w+\}\s*(.*)$", r"**\1**", text, flags=re.M)
    text = re.sub(r"^:::+\s*$\n?|^:(class|name|open):.*\n", "", text, flags=re.M)
    text = re.sub(r"\{(?:ref|doc|numref|term|download)\}`([^`<]*?)\s*(?:<[^`]*>)?`", r"*\1*", text)
    return re.sub(r"\{cite(?::\w+)?\}`([^`]*)`", r"[\1]", text)


def exercise(nb: nbformat.NotebookNode, claims: dict[str, dict] | None = None) -> nbformat.NotebookNode:
    """The reader's version of a lab: no answers, no outputs, nothing that papermill or a widget left behind."""
    nb, cells = nbformat.from_dict(nb), []
    for cell in nb.cells:
        tags = cell.metadata.get("tags", [])
        if "injected-parameters" in tags:
            continue
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        else:
            cell.source = plain_markdown(cell.source, claims)
        if "solution" in tags:
            cell.source = stub(cell.source, cell.metadata.get("hint", HINT))
            hiding = ("solution", "hide-input", "hide-cell")
            cell.metadata["tags"] = [t for t in tags if t not in hiding] + ["exercise"]
            cell.metadata.pop("mystnb", None)
        for noise in ("execution", "papermill", "at"):
            cell.metadata.pop(noise, None)
        cells.append(cell)
    nb.cells = cells
    for noise in ("widgets", "ddplab", "papermill"):
        nb.metadata.pop(noise, None)
    nbformat.validate(nb)
    return nb


def with_exercises(root: Path) -> list[Path]:
    """The notebooks of `_toc.yml`, in its order, that have something to solve."""
    notebooks = ((path, read(path)) for path in pages(root))
    return [path for path, nb in notebooks if nb and any("solution" in c.metadata.get("tags", []) for c in nb.cells)]


def write_exercises(labs: Iterable[Path], folder: Path) -> list[Path]:
    """Write the exercise version of each notebook into `folder`; returns the files. PageError names the notebook."""
    written = []
    for lab in labs:
        ledger = lab.parents[1] / "book/claims.yml"
        try:
            nb = exercise(read(lab), load_claims(ledger) if ledger.exists() else None)
        except PageError as error:
            raise PageError(f"{lab.name}: {error}") from None
        folder.mkdir(parents=True, exist_ok=True)
        target = (folder / lab.name).with_suffix(".ipynb")
        text = nbformat.writes(nb) + "\n"
        if not target.exists() or target.read_text("utf8") != text:
            target.write_text(text, "utf8")
        written.append(target)
    return written


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ddplab.exercises", description=__doc__.split("\n")[0])
    parser.add_argument("root", type=Path, help="the folder of _toc.yml")
    root = parser.parse_args(argv).root.resolve()
    try:
        for page in with_exercises(root):
            (file,) = write_exercises([page], root / "_build/exercises" / page.parent.relative_to(root))
            print(f"  {file.relative_to(root)}")
    except PageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for beside in ("labs/data", "labs/results"):  # what notebooks read
        if (root / beside).is_dir():
            shutil.copytree(root / beside, root / "_build/exercises" / beside, dirs_exist_ok=True)
    print("Nothing was executed. The next `make exercises` writes them anew: copy _build/exercises to work in it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run the checking cell of an exercise with any answer in place of the solution, and of the page no more than it needs.

A name that a cell asks for is made by running the last cell above that binds it: see `Page.run`.
"""

from __future__ import annotations

import ast
import builtins
import functools
from pathlib import Path
from typing import Any

from conftest import ROOT

from ddplab.exercises import stub
from ddplab.pages import read


class Names(dict):
    """The names of a notebook, each bound when it is asked for."""

    def __init__(self, cells: list[str]):
        super().__init__(__name__="__main__", __builtins__=builtins)
        self.waiting = cells

    def __missing__(self, name: str) -> Any:
        for cell in reversed(self.waiting):
            if name in bound(cell):
                self.waiting.remove(cell)
                exec(compile(cell, f"<cell of {name}>", "exec"), self)
                return self[name]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:  # cloudpickle asks so for what a function needs in a rank
        if not super().__contains__(name):
            try:
                self[name]
            except KeyError:
                return False
        return True


@functools.cache
def bound(cell: str) -> frozenset[str]:
    """What a cell binds, also within loops; not within functions."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                names.add(child.name)
                continue
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                names.add(child.id)
            elif isinstance(child, ast.alias):
                names.add((child.asname or child.name).partition(".")[0])
            visit(child)

    visit(ast.parse(cell))
    return frozenset(names)


class Page:
    """The exercises of one page: `names[i]` are the functions of its i-th solution."""

    def __init__(self, path: Path):
        self.path = path
        self.cells = [c for c in read(path).cells if c.cell_type == "code"]
        self.solutions = [i for i, c in enumerate(self.cells) if "solution" in c.metadata.tags]
        self.names = [[n.name for n in ast.parse(self.cells[i].source).body] for i in self.solutions]

    def blank(self, number: int) -> str:
        return stub(self.cells[self.solutions[number]].source)

    def run(self, number: int, answer: str = "") -> None:
        """The first cell below solution `number` that uses it, with `answer` run after the solution."""
        at, mine = self.solutions[number], set(self.names[number])
        check = next(
            i
            for i in range(at + 1, len(self.cells))
            if i not in self.solutions
            and mine & {n.id for n in ast.walk(ast.parse(self.cells[i].source)) if isinstance(n, ast.Name)}
        )
        names = Names([c.source for i, c in enumerate(self.cells[:check]) if i != at])
        for source in (self.cells[at].source, answer):
            exec(compile(source, "<answer>", "exec"), names)
        exec(compile(self.cells[check].source, "<check>", "exec"), names)


@functools.cache
def page(name: str) -> Page:
    """`page("labs/02_ring")`"""
    return Page(next(p for ext in (".md", ".ipynb") if (p := ROOT / f"{name}{ext}").exists()))

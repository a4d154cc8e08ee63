"""The other side of every predicate, and what a claim's cell must look like so that it can fail."""

from __future__ import annotations

import ast
import builtins
from typing import Any


def flipped(rule: dict[str, Any]) -> dict[str, Any]:
    """A rule that nothing fits which fits `rule`: shifted beyond its tolerance, the bound turned, another word."""
    if "at_least" in rule:
        return {"at_most": rule["at_least"] - (abs(rule["at_least"]) * 1e-9 or 1e-9)}
    if "at_most" in rule:
        return {"at_least": rule["at_most"] + (abs(rule["at_most"]) * 1e-9 or 1e-9)}
    expected = rule["expected"]
    if isinstance(expected, bool):
        other: Any = not expected
    elif isinstance(expected, str):
        other = f"not {expected}"
    elif isinstance(expected, list):
        other = [*expected[:-1], f"not {expected[-1]}"]
    else:
        other = expected + 3 * rule.get("tolerance", abs(expected) * rule.get("rtol", 0)) + 1
    return {**rule, "expected": other}


def literal_names(nb: Any) -> set[str]:
    """The names of a notebook to which nothing but literals is ever assigned, the parameters among them."""
    literal, computed = set(), set()
    for cell in (c for c in nb.cells if c.cell_type == "code"):
        tree = ast.parse(cell.source)
        simple = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
                simple |= {id(target): _is_literal(node.value) for target in node.targets}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                (literal if simple.get(id(node)) else computed).add(node.id)
    return literal - computed


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def complaint(source: str, name: str, literals: set[str]) -> str | None:
    """None where a cell ends with `dl.claim(name, ...)` and each value comes from something that it computed."""
    body = ast.parse(source).body
    calls = [
        (place, node.value)
        for place, node in enumerate(body)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "dl.claim"
    ]
    if len(calls) != 1:
        return f"the cell calls dl.claim {len(calls)} times at its top level"
    place, call = calls[0]
    if place < len(body) - 2 or not all(isinstance(node, ast.Expr) for node in body[place:]):
        return "dl.claim is neither the last statement nor the last but what the cell displays"
    if [ast.unparse(arg) for arg in call.args] != [repr(name)]:
        return f"dl.claim is not called for {name}"
    if not call.keywords or any(word.arg is None for word in call.keywords):
        return "each value must be given by its name"
    for word in call.keywords:
        names = {node.id for node in ast.walk(word.value) if isinstance(node, ast.Name)}
        if not names - literals - set(dir(builtins)):
            return f"{word.arg} is a literal: the cell did not measure it"
    return None

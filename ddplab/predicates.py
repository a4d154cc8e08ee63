"""What a measured value must be for a verdict to stand: `{expected: 2}`, `{expected: 4.0, tolerance: 0.01}`,
`{at_least: 1.65, unit: s}`.

The ledger states them, a cell brings the values. Here they are checked as text, compared, and put into words.
"""

from __future__ import annotations

import math
import re
from typing import Any

MOST = 4  # values a claim: the numbers or words that decide it, not everything that its cell knows
_KEYS = ("expected", "tolerance", "rtol", "at_least", "at_most", "unit")


def check_predicate(predicate: Any) -> None:
    """ValueError, naming the value and the key, unless `predicate` maps one to four names to what they must be."""
    if not isinstance(predicate, dict) or not 0 < len(predicate) <= MOST:
        raise ValueError(f"it must map one to {MOST} measured names to what they must be")
    for name, rule in predicate.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"{name!r} is no name that a cell could give: use letters, digits and _")
        if not isinstance(rule, dict):
            raise ValueError(f"{name} must be like {{expected: 2}} or {{at_least: 1.5}}, not {rule!r}")
        if problem := _wrong_rule(rule):
            raise ValueError(f"{name}: {problem}")


def _wrong_rule(rule: dict[str, Any]) -> str | None:
    unknown = [str(key) for key in rule if key not in _KEYS]
    bounds = [key for key in ("at_least", "at_most") if key in rule]
    spreads = [key for key in ("tolerance", "rtol") if key in rule]
    if unknown:
        return f"unknown key {', '.join(unknown)}; there are {', '.join(_KEYS)}"
    if ("expected" in rule) == bool(bounds):
        return "give either expected or a bound, at_least or at_most"
    for key in bounds + spreads:
        if _kind(rule[key]) != "a number" or not math.isfinite(rule[key]):
            return f"{key} must be a number, not {rule[key]!r}{_as_text(rule[key])}"
    if any(rule[key] <= 0 for key in spreads):
        return f"{spreads[0]} must be above 0"
    if len(bounds) == 2 and rule["at_least"] > rule["at_most"]:
        return "at_least is above at_most"
    if "unit" in rule and (not isinstance(rule["unit"], str) or not rule["unit"]):
        return f"unit must be a word, not {rule['unit']!r}"
    return None if bounds else _wrong_expected(rule, spreads)


def _wrong_expected(rule: dict[str, Any], spreads: list[str]) -> str | None:
    expected, kind = rule["expected"], _kind(rule["expected"])
    if kind == "a number":
        if not math.isfinite(expected):
            return f"expected {expected} is no value that could be measured"
        if len(spreads) == 2:
            return "give tolerance or rtol, not both"
        if isinstance(expected, float) and not spreads:
            return f"expected {expected} is no whole number: say how far off it may be, with tolerance or rtol"
        return None
    if spreads or "unit" in rule:
        return f"{[*spreads, 'unit'][0]} belongs to numbers, and expected is {expected!r}{_as_text(expected)}"
    if kind == "a list":
        single = all(_kind(item) in ("a number", "a word", "a truth value") for item in expected)
        return None if single and 0 < len(expected) <= 8 else "a list has one to eight numbers, words or truth values"
    if kind == "a word":
        return f"expected is the text {expected!r}{_as_text(expected)}" if _as_text(expected) else None
    return None if kind else f"expected must be a number, a word, true or false, or a short list, not {expected!r}"


def _as_text(value: Any) -> str:
    """YAML reads 1e-3 as text: say so where a number seems to be meant."""
    number = isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d_.]*(e[-+]?\d+)?", value, re.IGNORECASE)
    return ", which is text in YAML: write it like 0.001 or 1.0e-3, without quotes" if number else ""


def _kind(value: Any) -> str:
    names = {bool: "a truth value", int: "a number", float: "a number", str: "a word", list: "a list"}
    return names.get(type(value), "")


def plain(value: Any) -> Any:
    """`value` as JSON has it: numpy's and torch's scalars become Python's, tuples and arrays lists. TypeError."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"is a {type(value).__name__}: only a number, a word, true or false, or a list of them is compared")


def compare(rule: dict[str, Any], value: Any) -> str | None:
    """None where the plain `value` is what `rule` wants, otherwise the rest of a sentence: "is 1, and ... 2"."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, float) and not math.isfinite(item) for item in items):
        return f"is {value}: no number was measured"
    if "expected" not in rule:
        low, high = rule.get("at_least", -math.inf), rule.get("at_most", math.inf)
        fits = _kind(value) == "a number" and low <= value <= high
    elif _kind(rule["expected"]) == "a number" == _kind(value):
        spread = rule.get("tolerance", abs(rule["expected"]) * rule.get("rtol", 0))
        fits = abs(value - rule["expected"]) <= spread
    else:
        fits = _same(value, rule["expected"])
    return None if fits else f"is {in_words(value, exact=True)}, and the ledger expects {wanted(rule)}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return _kind(a) == _kind(b) and a == b


def wanted(rule: dict[str, Any]) -> str:
    """A rule in words: "4.0 ± 0.01 s", "2 ± 5%", "at least 1.65"."""
    if "expected" in rule:
        text = in_words(rule["expected"])
        if "tolerance" in rule:
            text += f" ± {in_words(rule['tolerance'])}"
        elif "rtol" in rule:
            text += f" ± {100 * rule['rtol']:.4g}%"
    else:
        words = {"at_least": "at least", "at_most": "at most"}
        text = " and ".join(f"{words[key]} {in_words(rule[key])}" for key in words if key in rule)
    return text + _unit(rule)


def outcome(name: str, rule: dict[str, Any], value: Any) -> tuple[str, str, str]:
    """What was measured, the value, and what else would have done: ("ring takes", "649.7 µs", " (650 ± 0.5 µs)")."""
    exact = "expected" in rule and not {"tolerance", "rtol"} & rule.keys()
    name = name.replace("_", " ").replace("GBps", "GB/s")
    return name, in_words(value) + _unit(rule), "" if exact else f" ({wanted(rule)})"


def _unit(rule: dict[str, Any]) -> str:
    unit = rule.get("unit", "")
    return unit if unit in ("", "%") else f" {unit}"


def in_words(value: Any, exact: bool = False) -> str:
    """A plain value as a reader sees it; floats with four significant digits unless `exact`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(in_words(item, exact) for item in value) or "an empty list"
    if isinstance(value, float) and not exact:
        return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"
    return str(value)

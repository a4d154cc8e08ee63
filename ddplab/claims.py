"""The claims ledger `book/claims.yml`: what the article says, the verdict, the correct statement, the evidence.

A claim's `predicate` says what a cell must measure for the verdict to stand; `claim`, in that cell, compares.
"""

from __future__ import annotations

import copy
import functools
from html import escape
from pathlib import Path
from typing import Any

import yaml

from ddplab.pages import PageError
from ddplab.predicates import check_predicate, compare, outcome, plain

# verdict in the file -> what the reader sees
VERDICTS = {
    "true": "true",
    "true-with-conditions": "true, with conditions",
    "misleading": "misleading",
    "false": "false",
    "not-runnable": "does not run",
    "unverifiable-number": "a number nobody can check",
}
LEDGER = Path("book/claims.yml")
_KEYS = {"id", "says", "verdict", "correct", "evidence"}
_MORE = {"title", "predicate", "not_measured"}


class ClaimError(AssertionError):
    """A cell measured something else than the ledger says, or not all of it. Notebooks show the sentence alone."""

    def _render_traceback_(self) -> list[str]:  # IPython's hook
        return [f"The verdict does not stand. {self}"]


def load_claims(path: Path) -> dict[str, dict[str, Any]]:
    """Every claim by id, checked. PageError names the file, the claim and what is wrong with it.

    `evidence` is `{notebook: book/ring, tag: claim-C21}` (a cell that asserts the verdict, `tag` is `claim-<id>` where
    absent), `{source: "text", shown: book/ring}` for what only a source can show (and the page with its box), or
    notebook and source. `predicate` is described in `ddplab.predicates`; `not_measured` says what no cell measures
    here, and how to measure it.
    """
    try:
        text = path.read_text("utf8")
    except OSError as error:
        raise PageError(f"{path.name} cannot be read: {error}") from None
    return copy.deepcopy(_read(text, path.name))


@functools.lru_cache(maxsize=4)
def _read(text: str, file: str) -> dict[str, dict[str, Any]]:
    """The claims of a ledger. To parse it takes 25 ms, to copy them 2, and a page asks for each box."""
    try:
        entries = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise PageError(f"{file} cannot be read: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "id" in e for e in entries):
        raise PageError(f"{file} must be a list of claims, each with an id")
    claims: dict[str, dict[str, Any]] = {}
    for entry in entries:
        where = f"{file}, claim {entry['id']}"
        if isinstance(entry.get("verdict"), bool):  # YAML reads a bare true or false as a truth value
            entry["verdict"] = str(entry["verdict"]).lower()
        missing, unknown = _KEYS - entry.keys(), entry.keys() - _KEYS - _MORE
        if missing or unknown:
            wrong = [f"no {k}" for k in sorted(missing)] + [f"unknown key {k}" for k in sorted(map(str, unknown))]
            raise PageError(f"{where}: {', '.join(wrong)}")
        if entry["id"] in claims:
            raise PageError(f"{where}: this id stands there twice")
        if entry["verdict"] not in VERDICTS:
            raise PageError(f"{where}: verdict {entry['verdict']!r} is none of {', '.join(VERDICTS)}")
        _check_evidence(entry, where)
        claims[entry["id"]] = entry
    return claims


def _check_evidence(entry: dict[str, Any], where: str) -> None:
    evidence = entry["evidence"]
    named = evidence.keys() if isinstance(evidence, dict) else set()
    if not named & {"notebook", "source"} or named - {"notebook", "tag", "source", "shown"}:
        raise PageError(f"{where}: evidence must be {{notebook: book/page, tag: claim-ID}} or {{source: text}}")
    if "notebook" in evidence:
        evidence.setdefault("tag", f"claim-{entry['id']}")
    if "predicate" in entry:
        if "notebook" not in evidence:
            raise PageError(f"{where}: a predicate needs a cell that measures: evidence has no notebook")
        try:
            check_predicate(entry["predicate"])
        except ValueError as error:
            raise PageError(f"{where}: predicate: {error}") from None
    if not isinstance(entry.get("not_measured", "text"), str):
        raise PageError(f"{where}: not_measured must be text")


def claim(id: str, /, **measured: Any) -> None:
    """Compare what a cell measured with the predicate of claim `id`, and show both in one line.

    `dl.claim("C21", chunk_on_gpu0=owners[0] + 1)` finds `book/claims.yml` in this folder or one above. Values are
    numbers, words, true or false, or short lists of them (numpy's and torch's too). ClaimError: a value differs, is
    missing, is one that the predicate does not name, or is no number; also where there is no ledger.
    """
    here = Path.cwd()
    path = next((folder / LEDGER for folder in (here, *here.parents) if (folder / LEDGER).is_file()), None)
    if path is None:
        raise ClaimError(f"claim {id}: no {LEDGER} in {here} or above. Open the page inside a checkout of the book.")
    try:
        entry = load_claims(path).get(id, {})
    except PageError as error:
        raise ClaimError(f"claim {id}: {error}") from None
    rules = entry.get("predicate")
    if not rules:
        raise ClaimError(f"claim {id}: {path.name} has no {'predicate for it' if entry else 'such claim'}")
    if missing := [name for name in rules if name not in measured]:
        raise ClaimError(f"claim {id}: the ledger expects {', '.join(missing)}, which this cell does not give")
    if extra := [name for name in measured if name not in rules]:
        raise ClaimError(f"claim {id}: the ledger says nothing about {', '.join(extra)}; it has {', '.join(rules)}")
    values = {}
    for name, rule in rules.items():
        try:
            values[name] = plain(measured[name])
            problem = compare(rule, values[name])
        except TypeError as error:
            problem = str(error)
        if problem:
            raise ClaimError(f"claim {id}: {name.replace('_', ' ')} {problem}")
    _show(id, VERDICTS[entry["verdict"]], rules, values)


def _show(name: str, verdict: str, rules: dict[str, Any], values: dict[str, Any]) -> None:
    """One line below the cell. Its metadata hold the values: tests and the ledger's page read them there."""
    from IPython import get_ipython
    from IPython.display import publish_display_data

    parts = [outcome(what, rule, values[what]) for what, rule in rules.items()]
    text = "; ".join(f"{what} = {value}{rule}" for what, value, rule in parts)
    html = "; ".join(f"{escape(what)} = <b>{escape(value)}</b>{escape(rule)}" for what, value, rule in parts)
    line = f"Claim {name}, verdict: {verdict}. Found, as expected: "
    if get_ipython() is None:
        print(line + text)
        return
    publish_display_data(
        {"text/html": f'<p class="claim-check">{line}{html}</p>', "text/plain": line + text},
        {"ddplab": {"claim": name, "measured": values}},
    )

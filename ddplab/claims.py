"""The claims ledger `book/claims.yml`: what the article says, the verdict, the correct statement, the evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ddplab.pages import PageError

# verdict in the file -> what the reader sees
VERDICTS = {
    "true": "true",
    "true-with-conditions": "true, with conditions",
    "misleading": "misleading",
    "false": "false",
    "not-runnable": "does not run",
    "unverifiable-number": "a number nobody can check",
}
_KEYS = {"id", "title", "says", "verdict", "correct", "evidence"}


def load_claims(path: Path) -> dict[str, dict[str, Any]]:
    """Every claim by id, checked. PageError names the file, the claim and what is wrong with it.

    `evidence` is `{notebook: book/ring, tag: claim-C21}` (a cell that asserts the verdict, `tag` is `claim-<id>` where
    absent), `{source: "text"}` for what only a source can show, or both.
    """
    try:
        entries = yaml.safe_load(path.read_text("utf8"))
    except (OSError, yaml.YAMLError) as error:
        raise PageError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "id" in e for e in entries):
        raise PageError(f"{path.name} must be a list of claims, each with an id")
    claims: dict[str, dict[str, Any]] = {}
    for entry in entries:
        where = f"{path.name}, claim {entry['id']}"
        if isinstance(entry.get("verdict"), bool):  # YAML reads a bare true or false as a truth value
            entry["verdict"] = str(entry["verdict"]).lower()
        evidence = entry.get("evidence")
        missing = _KEYS - {"title"} - entry.keys()
        if missing or entry.keys() - _KEYS:
            wrong = [f"no {k}" for k in sorted(missing)] + [f"unknown key {k}" for k in sorted(entry.keys() - _KEYS)]
            raise PageError(f"{where}: {', '.join(wrong)}")
        if entry["id"] in claims:
            raise PageError(f"{where}: this id stands there twice")
        if entry["verdict"] not in VERDICTS:
            raise PageError(f"{where}: verdict {entry['verdict']!r} is none of {', '.join(VERDICTS)}")
        named = evidence.keys() if isinstance(evidence, dict) else set()
        if not named & {"notebook", "source"} or named - {"notebook", "tag", "source"}:
            raise PageError(f"{where}: evidence must be {{notebook: book/page, tag: claim-ID}} or {{source: text}}")
        if "notebook" in evidence:
            evidence.setdefault("tag", f"claim-{entry['id']}")
        claims[entry["id"]] = entry
    return claims

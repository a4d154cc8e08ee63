"""The other side in earnest: a chapter that runs against a ledger with flipped predicates fails in every claim cell.

One chapter of twelve claims that starts no ranks does for all: the values that each cell showed are held against
flipped rules, one by one, in `test_claims.py`.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from claim_cells import flipped
from conftest import ROOT

from ddplab import _warm
from ddplab.claims import load_claims

PAGE = "book/knobs"
CLAIMS = load_claims(ROOT / "book/claims.yml")


def run(page: str, folder: Path) -> Any:
    """The notebook of a page, executed in `folder` from the first cell to the last, whatever fails on the way."""
    from nbclient import NotebookClient

    from ddplab.notebooks import _kernel_environment
    from ddplab.pages import read

    nb = read(ROOT / f"{page}.md")
    with _kernel_environment() as config:
        client = NotebookClient(nb, timeout=300, startup_timeout=300, kernel_name="python3", config=config)
        client.allow_errors = True
        return client.execute(cwd=str(folder))


def test_every_claim_cell_of_a_chapter_fails_against_a_flipped_ledger(executed, tmp_path):
    """After `executed`, on its worker: there a kernel is the fork of a process that has everything imported."""
    (tmp_path / "book").mkdir()
    (tmp_path / "labs").symlink_to(ROOT / "labs")
    ledger = [
        {**claim, "predicate": {what: flipped(rule) for what, rule in claim["predicate"].items()}}
        for claim in CLAIMS.values()
        if claim["evidence"].get("notebook") == PAGE
    ]
    (tmp_path / "book/claims.yml").write_text(yaml.safe_dump(ledger, sort_keys=False), "utf8")
    nb = _warm.call(run, PAGE, tmp_path / "book") if sys.platform == "linux" else run(PAGE, tmp_path / "book")
    failed = {}
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                tags = [tag for tag in cell.metadata.tags if tag.startswith("claim-")]
                failed[tags[0] if tags else cell.source] = output
    assert failed.keys() == {claim["evidence"]["tag"] for claim in ledger}
    for tag, output in failed.items():
        name = tag.removeprefix("claim-")
        first = next(iter(CLAIMS[name]["predicate"])).replace("_", " ")
        assert output.ename == "ClaimError" and output.evalue.startswith(f"claim {name}: {first} is "), output.evalue
        assert output.traceback == [f"The verdict does not stand. {output.evalue}"]

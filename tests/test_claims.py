"""The ledger and its evidence: every claim in the file is asserted by a cell that ran."""

import ast
import re

import nbformat
import pytest
from conftest import ROOT

from ddplab.claims import VERDICTS, load_claims
from ddplab.pages import PageError, pages, read

LEDGER = ROOT / "book/claims.yml"
CLAIMS = load_claims(LEDGER) if LEDGER.exists() else {}
GOOD = "- {id: C1, says: a, verdict: false, correct: b, evidence: {notebook: book/ring, tag: claim-C1}}\n"


def test_the_chapters_claims_are_all_in_the_ledger():
    assert {f"C{n}" for n in range(15, 28)} <= CLAIMS.keys()


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if "notebook" in claim["evidence"]])
def test_evidence_is_an_executed_cell_that_asserts(executed, name):
    evidence = CLAIMS[name]["evidence"]
    results = {result.output.relative_to(ROOT / "_build/executed").with_suffix("").as_posix(): result
               for result in executed.values() if not result.error}  # fmt: skip
    assert evidence["notebook"] in results, f"{name}: {evidence['notebook']} is no notebook of the book, or it failed"
    nb = nbformat.read(results[evidence["notebook"]].output, 4)
    cells = [c for c in nb.cells if evidence["tag"] in c.metadata.get("tags", [])]
    assert len(cells) == 1, f"{name}: {len(cells)} cells of {evidence['notebook']} are tagged {evidence['tag']}"
    (cell,) = cells
    assert cell.cell_type == "code" and cell.execution_count is not None
    assert not any(output.output_type == "error" for output in cell.outputs)
    checks = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Assert)]
    names = [n for check in checks for n in ast.walk(check.test) if isinstance(n, ast.Name | ast.Attribute | ast.Call)]
    raises = "ScheduleError" in cell.source and "except" in cell.source
    assert names or raises, f"{name}: the cell asserts nothing that it measured"


def test_every_tagged_cell_and_every_box_belongs_to_a_claim():
    for path in pages(ROOT):
        text = path.read_text("utf8")
        shown = set(re.findall(r"\{claim\}\s*(C\d+)", text))
        assert shown <= CLAIMS.keys(), f"{path.name} shows claims that the ledger lacks"
        nb = read(path)
        tags = {t for cell in (nb.cells if nb else []) for t in cell.metadata.tags if t.startswith("claim-")}
        assert tags <= {c["evidence"].get("tag") for c in CLAIMS.values()}, f"{path.name} proves claims nobody made"


def test_every_claim_is_shown_in_a_chapter_or_lab():
    text = "".join(path.read_text("utf8") for path in pages(ROOT))
    shown = set(re.findall(r"\{claim\}\s*(C\d+)", text))
    assert CLAIMS.keys() - shown == set()


def test_a_good_entry(tmp_path):
    (tmp_path / "c.yml").write_text(GOOD)
    claim = load_claims(tmp_path / "c.yml")["C1"]
    assert claim["verdict"] == "false" and claim["evidence"]["tag"] == "claim-C1"
    (tmp_path / "c.yml").write_text(GOOD.replace(", tag: claim-C1", ""))
    assert load_claims(tmp_path / "c.yml")["C1"]["evidence"]["tag"] == "claim-C1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {id: C1, says: [", "cannot be read"),
        ("C1: x", "must be a list of claims"),
        ("- {says: a}", "must be a list of claims"),
        (GOOD + GOOD, "C1: this id stands there twice"),
        (GOOD.replace("false", "wrong"), "C1: verdict 'wrong' is none of true, true-with-conditions"),
        (GOOD.replace("correct: b, ", ""), "C1: no correct"),
        (GOOD.replace("says: a", "says: a, sayz: b"), "C1: unknown key sayz"),
        (GOOD.replace("{notebook: book/ring, tag: claim-C1}", "later"), "C1: evidence must be"),
        (GOOD.replace("notebook: book/ring", "page: book/ring"), "C1: evidence must be"),
        (GOOD.replace("notebook: book/ring, ", ""), "C1: evidence must be"),
    ],
)
def test_mistakes_in_the_ledger_are_named(tmp_path, text, message):
    (tmp_path / "c.yml").write_text(text)
    with pytest.raises(PageError) as caught:
        load_claims(tmp_path / "c.yml")
    assert message in str(caught.value) and "c.yml" in str(caught.value)


def test_the_verdict_words_are_the_projects_own():
    assert set(VERDICTS) == {
        "true", "true-with-conditions", "misleading", "false", "not-runnable", "unverifiable-number"
    }  # fmt: skip

"""The ledger and its evidence: every claim's cell ran, compares what it measured, and fails where that is different."""

import re

import nbformat
import pytest
import yaml
from claim_cells import complaint, flipped, literal_names
from conftest import ROOT

import ddplab as dl
from ddplab.claims import VERDICTS, load_claims
from ddplab.pages import PageError, pages, read

LEDGER = ROOT / "book/claims.yml"
CLAIMS = load_claims(LEDGER) if LEDGER.exists() else {}
PROVED = [name for name, claim in CLAIMS.items() if "notebook" in claim["evidence"]]
GOOD = "- {id: C1, says: a, verdict: false, correct: b, evidence: {notebook: book/ring, tag: claim-C1}}\n"


def test_the_articles_claims_are_all_in_the_ledger():
    assert list(CLAIMS) == [f"C{n:02}" for n in range(1, 69)]
    assert [name for name in CLAIMS if name not in PROVED] == ["C14"]


@pytest.fixture(scope="module")
def notebooks(executed):
    """The executed notebooks of the book, by the name that evidence has for them."""
    stage = ROOT / "_build/executed"
    good = [result.output for result in executed.values() if not result.error]
    return {path.relative_to(stage).with_suffix("").as_posix(): nbformat.read(path, 4) for path in good}


def the_cell(notebooks, name):
    evidence = CLAIMS[name]["evidence"]
    assert evidence["notebook"] in notebooks, f"{name}: {evidence['notebook']} is no notebook of the book, or it failed"
    cells = [c for c in notebooks[evidence["notebook"]].cells if evidence["tag"] in c.metadata.get("tags", [])]
    assert len(cells) == 1, f"{name}: {len(cells)} cells of {evidence['notebook']} are tagged {evidence['tag']}"
    return cells[0]


@pytest.mark.parametrize("name", PROVED)
def test_evidence_is_an_executed_cell_that_can_fail(notebooks, name):
    cell = the_cell(notebooks, name)
    assert cell.cell_type == "code" and cell.execution_count is not None
    assert not any(output.output_type == "error" for output in cell.outputs)
    assert "predicate" in CLAIMS[name], f"{name}: the ledger does not say what its cell must measure"
    literals = literal_names(notebooks[CLAIMS[name]["evidence"]["notebook"]])
    assert complaint(cell.source, name, literals) is None


@pytest.mark.parametrize("name", PROVED)
def test_a_flipped_predicate_fails_for_what_the_cell_measured(notebooks, name, tmp_path, monkeypatch):
    shown = [o.metadata["ddplab"] for o in the_cell(notebooks, name).outputs if "ddplab" in o.get("metadata", {})]
    assert [one["claim"] for one in shown] == [name]
    measured, rules = shown[0]["measured"], CLAIMS[name]["predicate"]
    assert measured.keys() == rules.keys()
    (tmp_path / "book").mkdir()
    monkeypatch.chdir(tmp_path)

    def evaluate(predicate):
        ledger = yaml.safe_dump([{**CLAIMS[name], "predicate": predicate}])
        (tmp_path / "book/claims.yml").write_text(ledger, "utf8")
        dl.claim(name, **measured)

    evaluate(rules)
    for what, rule in rules.items():
        with pytest.raises(dl.ClaimError, match=re.escape(f"claim {name}: {what.replace('_', ' ')} is ")):
            evaluate({**rules, what: flipped(rule)})


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

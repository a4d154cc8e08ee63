"""Predicates: bad ones are refused when the ledger is read, wrong values when a cell brings them."""

import subprocess
import sys

import numpy as np
import pytest
import yaml
from claim_cells import complaint, flipped

import ddplab as dl
from ddplab.claims import load_claims
from ddplab.pages import PageError
from ddplab.predicates import check_predicate, compare, outcome, plain, wanted

ENTRY = {"id": "C1", "says": "a", "verdict": "false", "correct": "b", "evidence": {"notebook": "book/ring"}}


def write(folder, **predicate):
    (folder / "book").mkdir(exist_ok=True)
    (folder / "book/claims.yml").write_text(yaml.safe_dump([{**ENTRY, "predicate": predicate}], sort_keys=False))


@pytest.mark.parametrize(
    ("predicate", "message"),
    [
        ("[]", "one to 4 measured names"),
        ("{}", "one to 4 measured names"),
        ("{a: {expected: 1}, b: {expected: 1}, c: {expected: 1}, d: {expected: 1}, e: {expected: 1}}", "one to 4"),
        ("{2: {expected: 1}}", "2 is no name"),
        ("{a b: {expected: 1}}", "'a b' is no name"),
        ("{ratio: 2}", "ratio must be like {expected: 2}"),
        ("{ratio: {}}", "ratio: give either expected or a bound"),
        ("{ratio: {expect: 2}}", "ratio: unknown key expect; there are expected,"),
        ("{ratio: {expected: 2, at_least: 1}}", "ratio: give either"),
        ("{ratio: {at_least: 2, at_most: 1}}", "ratio: at_least is above at_most"),
        ("{ratio: {at_least: many}}", "ratio: at_least must be a number, not 'many'"),
        ("{ratio: {at_least: 1e-3}}", "text in YAML: write it like 0.001 or 1.0e-3"),
        ("{ratio: {at_least: true}}", "at_least must be a number, not True"),
        ("{ratio: {at_least: .inf}}", "at_least must be a number, not inf"),
        ("{ratio: {expected: 1.5}}", "no whole number: say how far off it may be"),
        ("{ratio: {expected: .nan, tolerance: 1}}", "no value that could be measured"),
        ("{ratio: {expected: 1.5, tolerance: 0}}", "tolerance must be above 0"),
        ("{ratio: {expected: 1.5, tolerance: 0.1, rtol: 0.1}}", "tolerance or rtol, not both"),
        ("{ratio: {expected: word, tolerance: 1}}", "tolerance belongs to numbers"),
        ("{ratio: {expected: word, unit: s}}", "unit belongs to numbers"),
        ("{ratio: {expected: '2'}}", "is the text '2', which is text in YAML"),
        ("{ratio: {expected: 2, unit: 3}}", "unit must be a word"),
        ("{ratio: {expected: null}}", "expected must be a number, a word"),
        ("{ratio: {expected: []}}", "a list has one to eight"),
        ("{ratio: {expected: [[1]]}}", "a list has one to eight"),
    ],
)
def test_mistakes_in_a_predicate_name_the_file_the_claim_and_the_key(tmp_path, predicate, message):
    (tmp_path / "c.yml").write_text(yaml.safe_dump([ENTRY])[:-1] + f"\n  predicate: {predicate}\n")
    with pytest.raises(PageError) as caught:
        load_claims(tmp_path / "c.yml")
    assert message in str(caught.value) and "c.yml, claim C1: predicate: " in str(caught.value)


def test_a_predicate_needs_a_cell_and_what_is_not_measured_is_text(tmp_path):
    for change, message in (
        ({"evidence": {"source": "s"}, "predicate": {"a": {"expected": 1}}}, "a predicate needs a cell"),
        ({"not_measured": 3}, "not_measured must be text"),
    ):
        (tmp_path / "c.yml").write_text(yaml.safe_dump([{**ENTRY, **change}]))
        with pytest.raises(PageError, match=f"C1: {message}"):
            load_claims(tmp_path / "c.yml")


FITS = [
    ({"expected": 2}, 2, "2", ""),
    ({"expected": 2}, np.int64(2), "2", ""),
    ({"expected": 2}, 2.0, "2", ""),
    ({"expected": 4.0, "tolerance": 0.01, "unit": "s"}, 4.009, "4.009 s", " (4 ± 0.01 s)"),
    ({"expected": 200, "rtol": 0.05}, 209, "209", " (200 ± 5%)"),
    ({"expected": 86, "tolerance": 0.5, "unit": "%"}, 85.71, "85.71%", " (86 ± 0.5%)"),
    ({"at_least": 1.65}, np.float32(1.75), "1.75", " (at least 1.65)"),
    ({"at_least": 1, "at_most": 2, "unit": "MB"}, 2, "2 MB", " (at least 1 and at most 2 MB)"),
    ({"expected": True}, np.bool_(True), "true", ""),
    ({"expected": "Ring"}, "Ring", "Ring", ""),
    ({"expected": [3, 4, 1, 2]}, np.array([3, 4, 1, 2]), "3, 4, 1, 2", ""),
    ({"expected": ["A1", "D1"]}, ("A1", "D1"), "A1, D1", ""),
]


@pytest.mark.parametrize(("rule", "value", "shown", "said"), FITS)
def test_values_that_fit_and_the_same_values_against_the_flipped_rule(rule, value, shown, said):
    check_predicate({"name": rule})
    check_predicate({"name": flipped(rule)})
    assert compare(rule, plain(value)) is None
    assert outcome("a_name", rule, plain(value)) == ("a name", shown, said)
    assert wanted(flipped(rule)) in compare(flipped(rule), plain(value))


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ({"expected": 1}, True),  # Python holds them equal
        ({"expected": True}, 1),
        ({"expected": 2}, "2"),
        ({"expected": [1, 2]}, [True, 2]),
        ({"expected": [1, 2]}, [1, 2, 3]),
        ({"expected": [1, 2]}, 1),
        ({"expected": "Ring"}, "ring"),
        ({"at_least": 0}, True),
        ({"at_least": 0}, [1]),
        ({"expected": 4.0, "tolerance": 0.01}, 4.011),
    ],
)
def test_values_that_do_not_fit(rule, value):
    assert compare(rule, value).startswith("is ")


def test_a_cell_shows_what_it_measured(tmp_path, monkeypatch, capsys):
    write(tmp_path, owner_of_GPU0={"expected": 2}, ratio={"at_least": 1.65, "unit": "x"})
    (tmp_path / "book/deep").mkdir()
    monkeypatch.chdir(tmp_path / "book/deep")  # the ledger is found above
    assert dl.claim("C1", ratio=np.float64(1.7), owner_of_GPU0=2) is None
    said = "Claim C1, verdict: false. Found, as expected: owner of GPU0 = 2; ratio = 1.7 x (at least 1.65 x)"
    assert capsys.readouterr().out == said + "\n"


@pytest.mark.parametrize(
    ("name", "measured", "message"),
    [
        ("C1", {"owner": 1, "ratio": 2}, "claim C1: owner is 1, and the ledger expects 2"),
        ("C1", {"owner": 2, "ratio": 1.6}, "claim C1: ratio is 1.6, and the ledger expects at least 1.65"),
        ("C1", {"owner": 2}, "claim C1: the ledger expects ratio, which this cell does not give"),
        (
            "C1",
            {"owner": 2, "ratio": 2, "more": 1},
            "claim C1: the ledger says nothing about more; it has owner, ratio",
        ),
        ("C1", {"owner": 2, "ratio": float("nan")}, "claim C1: ratio is nan: no number was measured"),
        ("C1", {"owner": 2, "ratio": np.inf}, "claim C1: ratio is inf: no number was measured"),
        ("C1", {"owner": 2, "ratio": None}, "claim C1: ratio is a NoneType: only a number"),
        ("C1", {"owner": {2}, "ratio": 2}, "claim C1: owner is a set: only a number"),
        ("C2", {"owner": 2, "ratio": 2}, "claim C2: claims.yml has no such claim"),
    ],
)
def test_a_verdict_that_does_not_stand_is_one_sentence(tmp_path, monkeypatch, name, measured, message):
    write(tmp_path, owner={"expected": 2}, ratio={"at_least": 1.65})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dl.ClaimError) as caught:
        dl.claim(name, **measured)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, AssertionError)
    assert caught.value._render_traceback_() == [f"The verdict does not stand. {caught.value}"]


def test_a_ledger_that_is_missing_broken_silent_or_edited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dl.ClaimError, match="no book/claims.yml in .* or above. Open the page inside a checkout"):
        dl.claim("C1", owner=2)
    write(tmp_path, owner={"expected": 2, "expect": 2})
    with pytest.raises(dl.ClaimError, match="claims.yml, claim C1: predicate: owner: unknown key expect"):
        dl.claim("C1", owner=2)
    (tmp_path / "book/claims.yml").write_text(yaml.safe_dump([ENTRY]))
    with pytest.raises(dl.ClaimError, match="claim C1: claims.yml has no predicate for it"):
        dl.claim("C1", owner=2)
    write(tmp_path, owner={"expected": 2})  # a running notebook sees the edit
    dl.claim("C1", owner=2)


CELL = """owners = article.verify()
dl.claim("C21", chunk_on_GPU0=owners[0] + 1)
owners"""


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (CELL, None),
        (CELL.replace("\nowners", ""), None),
        (CELL.replace('dl.claim("C21", chunk_on_GPU0=owners[0] + 1)', "assert True"), "calls dl.claim 0 times"),
        (CELL.replace('dl.claim("C21", chunk_on_GPU0=owners[0] + 1)\n', ""), "calls dl.claim 0 times"),
        (CELL.replace("dl.claim", "if owners:\n    dl.claim"), "calls dl.claim 0 times"),
        (CELL.replace("dl.claim", "# dl.claim"), "calls dl.claim 0 times"),
        (CELL + "\n" + CELL, "calls dl.claim 2 times"),
        (CELL.replace("\nowners", "\nowners = 1\nowners"), "neither the last"),
        (CELL.replace("C21", "C22"), "not called for C21"),
        (CELL.replace("owners[0] + 1", "2 + 1"), "chunk_on_GPU0 is a literal"),
        (CELL.replace("owners[0] + 1", "int(3)"), "chunk_on_GPU0 is a literal"),
        (CELL.replace("owners[0] + 1", "RANKS - 1"), "chunk_on_GPU0 is a literal"),
        (CELL.replace("chunk_on_GPU0=owners[0] + 1", "**owners"), "each value must be given by its name"),
    ],
)
def test_a_cell_that_could_not_fail_is_found_out(cell, message):
    found = complaint(cell, "C21", {"RANKS"})
    assert found is None if message is None else message in found


def test_it_loads_no_torch():
    code = "import sys; from ddplab.claims import claim; sys.exit('torch' in sys.modules or 'nbformat' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

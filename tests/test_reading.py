"""What helps to read: questions, times, links to the glossary. The parts that need no browser."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
from conftest import ROOT
from docutils import nodes

from ddplab.pages import pages

sys.path.insert(0, str(ROOT / "book/_ext"))
quiz, reading, terms = (importlib.import_module(name) for name in ("quiz", "reading", "terms"))
sys.path.pop(0)

GLOSSARY = (ROOT / "book/glossary.md").read_text("utf8")
NOT_CHAPTERS = set("intro claims glossary cheatsheet reference machine api bibliography choose machines".split())
CHAPTERS = [p for p in pages(ROOT) if p.parent.name == "book" and p.stem not in NOT_CHAPTERS]
QUIZ = re.compile(r"^```\{quiz\}\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_opens_with_predictions_and_closes_with_what_to_keep_and_questions(path):
    text = path.read_text("utf8")
    first = text.index("```{quiz}")
    assert first < text.index(":tags: [parameters]"), "predictions come before the first cell"
    asked = [quiz.questions(body) for body in QUIZ.findall(text)]
    opening, closing = asked[0], asked[-1]
    assert len(asked) >= 2 and len(opening) >= 2 and all(q.options for q in opening)
    assert len(closing) >= 4
    keep = text.index("\n## What to keep\n")
    points = re.findall(r"^\d\. ", text[keep : text.index("```{quiz}", keep)], re.M)
    assert len(points) == 5
    assert keep < text.index("\n## Sources\n"), "sources come last"


def test_a_good_quiz():
    first, second = quiz.questions(
        "- {ask: how many, options: [1, two], answer: 2, why: because}\n- {ask: why, why: so}"
    )
    assert first == quiz.Question("how many", "because", ("1", "two"), 2)
    assert second == quiz.Question("why", "so")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- [", "no YAML"),
        ("", "a list of questions"),
        ("ask: a", "a list of questions"),
        ("- {ask: a}", "question 1 .* has `ask` and `why`"),
        ("- {ask: a, why: b, hint: c}", "no other key"),
        ("- {ask: a, why: b, options: [1, 2]}", "need an `answer`"),
        ("- {ask: a, why: b, options: [1], answer: 1}", "two or more"),
        ("- {ask: a, why: b, options: [1, 2], answer: 3}", "from 1 to 2, not 3"),
        ("- {ask: a, why: b, options: [1, 2], answer: yes}", "not True"),
        ("- {ask: a, why: b, options: [yes, perhaps], answer: 1}", "quotes round yes and no"),
        ("- {ask: a, why: b}\n- {ask: a, why: b, options: [1, '1'], answer: 1}", "question 2 .* the same"),
    ],
)
def test_a_quiz_that_is_wrong_says_where(text, says):
    with pytest.raises(ValueError, match=says):
        quiz.questions(text)


@pytest.mark.parametrize(
    ("entry", "forms", "anchor"),
    [
        ("bus bandwidth (busbw)", ["bus bandwidth", "busbw"], "term-bus-bandwidth"),
        ("alpha ($\\alpha$), latency", ["alpha", "latency"], "term-alpha"),
        ("world size ($N$)", ["world size"], "term-world-size"),
        ("kernel (of a GPU)", [], "term-kernel"),
        ("rate (of a counter), gauge", ["gauge"], "term-rate"),
        ("worker, server (of a two-phase exchange)", [], "term-worker"),
        ("no_sync", ["no_sync"], "term-no-sync"),
    ],
)
def test_what_a_reader_meets_of_a_glossary_entry(entry, forms, anchor):
    assert terms.forms(entry) == forms
    assert terms.anchor(entry) == anchor


def test_every_term_has_a_place_of_its_own():
    entries = terms.entries(GLOSSARY)
    assert len(entries) > 100
    assert len({terms.anchor(entry) for entry in entries}) == len(entries)
    known = [form.lower() for entry in entries for form in terms.forms(entry)]
    assert len(set(known)) == len(known), "two entries answer to the same word"


def test_whole_words_plurals_and_capitals_are_found_and_the_longest_wins():
    find = terms.pattern(dict.fromkeys(["ring", "hierarchical ring", "DDP", "all-reduce", "bus"], ""))
    said = "Hierarchical rings bring rings; DDPs all-reduce, ring-like; buses, ddp"
    assert [m[1] for m in find.finditer(said)] == ["Hierarchical ring", "ring", "DDP", "all-reduce", "bus"]


def test_only_prose_is_counted():
    cell = nodes.container("", nodes.paragraph("", "never counted"), nb_element="cell_code_output")
    table = nodes.table("", nodes.paragraph("", "nor this"))
    page = nodes.section("", nodes.paragraph("", "four words of prose"), cell, table)
    assert reading.words(page) == 4


def test_seconds_come_from_the_executed_copy(tmp_path):
    copy = tmp_path / "a.ipynb"
    copy.write_text('{"metadata": {"ddplab": {"key": "k", "seconds": 3.4}}}')
    assert reading.seconds_of(copy) == 3.4
    copy.write_text('{"metadata": {}}')
    assert reading.seconds_of(copy) is None
    assert reading.seconds_of(tmp_path / "a.md") is None

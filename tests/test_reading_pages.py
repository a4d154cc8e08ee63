"""Questions, glossary links and the cheat sheet, in a real browser."""

from __future__ import annotations

import re


def test_a_prediction_is_marked_in_words_and_the_right_one_unfolds_the_answer(watch):
    seen = watch("file")
    page = seen.open("book/ring.html")
    question = page.locator(".quiz-question").first
    options, said = question.locator("input[type=radio]"), question.locator("[role=status]")
    right = int(question.locator("[role=radiogroup]").get_attribute("data-answer"))
    unfolded = "e => e.querySelector('details').open"
    wrong = 2 if right == 1 else 1
    options.nth(wrong - 1).check()
    assert said.text_content().startswith("Not that one") and not question.evaluate(unfolded)
    options.nth(wrong - 1).press("ArrowRight" if right > wrong else "ArrowLeft")  # by keyboard to the next one
    for _ in range(abs(right - wrong) - 1):
        page.keyboard.press("ArrowRight" if right > wrong else "ArrowLeft")
    assert options.nth(right - 1).is_checked()
    assert said.text_content() == "That is it." and question.evaluate(unfolded)
    assert question.locator(".quiz-right").count() == 1 and question.locator(".quiz-wrong").count() == 0
    assert (seen.problems, seen.outside) == ([], [])


def test_the_first_use_of_a_term_leads_to_its_line_in_the_glossary(watch):
    page = watch("file").open("book/ring.html")
    links = page.locator("article a.term")
    words = [text.lower() for text in links.all_text_contents()]
    assert len(words) > 15 and len(set(words)) == len(words), "a term is linked once a page"
    links.filter(has_text=re.compile("^all-reduce$")).first.click()
    page.wait_for_function("location.hash === '#term-all-reduce'")
    assert page.locator("#term-all-reduce").text_content().strip().startswith("all-reduce")


def test_every_chapter_and_lab_says_how_long_it_takes(html):
    for file in [*(html / "labs").glob("*.html"), html / "book/ring.html", html / "book/hang.html"]:
        line = re.search(
            r'<p class="page-times">Reading: about (\d+) minutes?\. Running .* (\d+) s', file.read_text("utf8")
        )
        assert line and 1 <= int(line[1]) <= 90 and int(line[2]) >= 1, file.name


def test_the_cheat_sheet_is_two_sheets_of_paper(watch):
    page = watch("file").open("book/cheatsheet.html")
    edge = dict.fromkeys(("top", "bottom", "left", "right"), "10mm")
    pdf = page.pdf(format="A4", margin=edge)
    assert len(re.findall(rb"/Type\s*/Page[^s]", pdf)) <= 2

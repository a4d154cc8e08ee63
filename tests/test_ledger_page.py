"""The table of all claims in a browser: its filter by hand, by keyboard and in words; every row without scripts."""

from __future__ import annotations

from collections import Counter

import pytest
from conftest import ROOT

from ddplab.claims import VERDICTS, load_claims

CLAIMS = load_claims(ROOT / "book/claims.yml")
ROWS = "table.claim-ledger tbody tr"
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def shown(page) -> list[str]:
    """Ids of the claims whose rows are on the screen."""
    return page.evaluate(
        f"[...document.querySelectorAll('{ROWS}')].filter(r => r.offsetHeight).map(r => r.cells[0].innerText.trim())"
    )


def test_the_filter_answers_to_keys_and_says_how_many_rows_are_left(watch):
    seen = watch("file", color_scheme="dark")
    page = seen.open("book/claims.html")
    assert shown(page) == list(CLAIMS)
    status = page.get_by_role("status").filter(has_text="claims are shown")
    assert status.inner_text() == f"{len(CLAIMS)} of {len(CLAIMS)} claims are shown."
    counts = Counter(VERDICTS[claim["verdict"]] for claim in CLAIMS.values())
    for verdict, count in counts.items():
        box = page.get_by_role("checkbox", name=f"{verdict} ({count})", exact=True)
        if verdict != "false":
            box.focus()
            page.keyboard.press("Space")
    false = [name for name, claim in CLAIMS.items() if claim["verdict"] == "false"]
    assert shown(page) == false and status.inner_text().startswith(f"{len(false)} of ")

    page.get_by_role("combobox", name="chapter").select_option(label="Anatomy of a ring (13)")
    assert shown(page) == ["C21", "C24"] and status.inner_text().startswith("2 of ")
    page.get_by_role("button", name="Show all claims").press("Enter")
    page.wait_for_function(f"document.querySelectorAll('{ROWS}:not([hidden])').length === {len(CLAIMS)}")
    assert (seen.problems, seen.outside) == ([], [])


@pytest.mark.parametrize("options", [{"java_script_enabled": False}, PHONE])
def test_every_row_is_there_without_scripts_and_fits_a_phone(watch, options):
    page = watch("file", **options).open("book/claims.html")
    assert shown(page) == list(CLAIMS)
    assert page.locator(".ledger-filter").count() == ("java_script_enabled" not in options)
    right = f"[...document.querySelectorAll('{ROWS} td, .ledger-filter *')].map(e => e.getBoundingClientRect().right)"
    assert max(page.evaluate(right)) <= page.viewport_size["width"]


def test_a_row_leads_to_the_box_and_to_the_cell_and_shows_what_was_measured(watch):
    page = watch("file").open("book/claims.html")
    row = page.locator(ROWS).filter(has=page.locator("#row-c21"))
    assert "chunk on GPU0 = 3" in row.inner_text() and "Found in this build" in row.inner_text()
    row.get_by_role("link", name="C21").click()
    page.wait_for_url("**/ring.html#box-c21")
    page.go_back()
    page.locator(ROWS).filter(has=page.locator("#row-c21")).get_by_role("link", name="the cell").click()
    page.wait_for_url("**/ring.html#claim-c21")


def test_numbers_in_the_text_are_the_ledgers(watch):
    page = watch("file").open("book/claims.html")
    terms = page.locator("article dl dt").all_inner_texts()
    counts = Counter(VERDICTS[claim["verdict"]] for claim in CLAIMS.values())
    assert terms == [f"{verdict} ({counts[verdict]})" for verdict in VERDICTS.values()]
    rows = page.locator(ROWS)
    assert rows.filter(has_text="Not measured here").count() == sum("not_measured" in c for c in CLAIMS.values())

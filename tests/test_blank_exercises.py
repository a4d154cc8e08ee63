"""Every exercise as the reader finds it, with its checking cell run: it says what to do, and nothing else."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT
from exercise_cells import page

from ddplab.exercises import HINT, with_exercises

NAMES = [p.relative_to(ROOT).with_suffix("").as_posix() for p in with_exercises(ROOT)]
BLANKS = [(name, i) for name in NAMES for i in range(len(page(name).solutions))]


@pytest.mark.parametrize(("name", "number"), BLANKS, ids=lambda value: str(value))
def test_a_blank_exercise_gives_the_hint(name, number, monkeypatch):
    monkeypatch.chdir(page(name).path.parent)
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError)) as caught:
        page(name).run(number, page(name).blank(number))
    said = str(caught.value).partition("\n")[0]
    mine = [f"{function}: {HINT}" for function in page(name).names[number]]
    mine += [f"{owner}.{method}: {HINT}" for owner in page(name).names[number] for method in ("finish", "__init__")]
    said = re.sub(r"^rank \d+: NotImplementedError: ", "", said)  # from a bare launch, which names the rank
    assert said in mine, said

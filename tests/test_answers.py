"""What a reader's function does wrong becomes one sentence: its line, its input, what came, what was expected."""

from __future__ import annotations

import numpy as np
import pytest

import ddplab as dl
from ddplab.answers import _difference


def double(x):
    return 2 * x


def off_the_end(x):
    y = [x]
    return y[1]


def says_nothing(x):
    2 * x


def forever(x):
    while True:
        try:
            x += 1
        except Exception:
            pass


def blank(x):
    raise NotImplementedError("blank: write it, then run the cell below.")


def empties(values):
    total = sum(values)
    values.clear()
    return total


def prints(x):
    print("debugging", x)
    return 2 * x


def wrong(fn, cases, hint="", **how):
    with pytest.raises(dl.CheckError) as caught:
        dl.check_answers(fn, cases, hint, **how)
    assert "\n" not in str(caught.value) and caught.value.__cause__ is None
    return str(caught.value)


def test_right_answers_pass(capsys):
    dl.check_answers(double, [((2,), 4), ((0.1,), 0.2), (("a",), "aa"), (([1],), [1, 1]), ((np.arange(2),), [0, 2])])
    dl.check_answers(prints, [((2,), 4)])
    assert capsys.readouterr().out == "double: right in 5 cases.\ndebugging 2\nprints: right in 1 cases.\n"


@pytest.mark.parametrize(
    ("fn", "cases", "sentence"),
    [
        (double, [((2,), 4), ((3,), 5, "Twice."), ((4,), 9)], "double(3): expected 5, came 6. Twice. Think."),
        (says_nothing, [((2,), 4)], "says_nothing(2): expected 4, came None (is there a `return` on every way through"),
        (off_the_end, [((2,), 4)], "line 3 of off_the_end: IndexError: list index out of range. That was off_the_end("),
        (double, [((2,), 4), ((None,), 4)], "line 2 of double: TypeError: "),
        (blank, [((2,), 4)], "blank: write it, then run the cell below."),
        (str, [((2,), 2)], "str(2): expected 2, came '2'. Think."),
        (bool, [((2,), 1)], "bool(2): expected 1, came True. Think."),
        (int, [((2.5,), True)], "int(2.5): expected True, came 2. Think."),
        (list, [(("ab",), ["a"])], "list('ab'): expected ['a'], came ['a', 'b']. Think."),
        (list, [(("ab",), ["a", "c"])], "list('ab'): expected ['a', 'c'], came ['a', 'b']; in place 1: expected 'c',"),
        (dict, [(([("a", 1)],), {"b": 1})], "dict([('a', 1)]): expected {'b': 1}, came {'a': 1}. Think."),
    ],
)
def test_a_wrong_answer_is_told_apart(fn, cases, sentence):
    assert wrong(fn, cases, "Think.").startswith(sentence)


def test_an_endless_loop_ends_though_the_reader_catches_exceptions():
    said = wrong(forever, [((2,), 4)], limit_s=0.2)
    assert said.startswith("forever(2) did not come back within 0.2 s: an endless loop? line ")


def test_a_function_that_spoils_its_input_spoils_no_later_case():
    given = [1, 2]
    dl.check_answers(empties, [((given,), 3), ((given,), 3)])
    assert given == [1, 2]


@pytest.mark.parametrize(
    ("kind", "value", "fits"),
    [
        (float, 1, True), (float, np.float32(1), True), (float, np.int64(1), True), (float, True, False),
        (float, None, False), (float, "1", False), (int, np.int64(1), True), (int, 1.0, False), (tuple, (1,), True),
        (tuple, [1], False), ((tuple, list), [1], True), (dict, None, False),
    ],
)  # fmt: skip
def test_the_kind_of_an_answer(kind, value, fits):
    if fits:
        assert dl.ask(lambda: value, kind=kind) is value
        return
    with pytest.raises(dl.CheckError, match=r"returned .*; expected: (a number|a whole number|tuple|dict)\.$"):
        dl.ask(lambda: value, kind=kind)


def test_numbers_compare_as_numbers():
    assert _difference(0.1 + 0.2, 0.3, 1e-9) is None and _difference(0.31, 0.3, 1e-9)
    assert _difference(float("nan"), 1.0, 1e-9) and _difference(1e-15, 0, 1e-9) is None
    assert _difference(np.float64(2), 2, 1e-9) is None and _difference((1, [2, 3]), [1, (2, 3)], 1e-9) is None
    assert _difference({"a": 1.0}, {"a": 1}, 1e-9) is None and _difference(None, None, 1e-9) is None


def test_bad_arguments():
    with pytest.raises(TypeError, match="takes a function"):
        dl.check_answers(3, [])

"""Controls of a measurement, without a browser: pressed by `click`, as a click in a notebook does."""

from __future__ import annotations

import html
import re

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import pytest

import ddplab as dl

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def no_figure_of_others():
    plt.close("all")


def said(made):
    return html.unescape(re.sub(r"<[^>]+>", "", made.status.value))


def measure(ranks=4, link="1gbit", size=1.0):
    return {"ms": ranks * size}


def test_one_control_a_keyword_begins_at_the_default():
    made = dl.controls(measure, ranks=[2, 4, 8], link=["fast", "1gbit"], size=(0.5, 4.0))
    kinds = {name: type(box).__name__ for name, box in made.boxes.items()}
    assert kinds == {"ranks": "SelectionSlider", "link": "Dropdown", "size": "FloatSlider"}
    assert made.values == {"ranks": 4, "link": "1gbit", "size": 1.0}
    other = dl.controls(
        lambda a, b=9, c=None, some_flag=True: None, a=range(8, 1, -3), b=(1, 9, 2), c={"none": None}, some_flag=False
    )
    assert [type(box).__name__ for box in other.boxes.values()] == ["IntSlider", "IntSlider", "Dropdown", "Checkbox"]
    assert other.values == {"a": 8, "b": 9, "c": None, "some_flag": False}
    assert (other.boxes["a"].min, other.boxes["a"].max, other.boxes["a"].step) == (2, 8, 3)
    assert other.boxes["some_flag"].description == "some flag"  # what a screen reader says


def test_nothing_runs_before_the_press_and_the_line_says_what_will():
    calls = []
    made = dl.controls(lambda **values: calls.append(values), ranks=[2, 4], link=["1gbit"])
    assert calls == [] and said(made).endswith("(ranks=2, link='1gbit')") and said(made).startswith("will run")
    made.boxes["ranks"].value = 4
    assert calls == [] and "ranks=4" in said(made)
    made.button.click()
    assert calls == [{"ranks": 4, "link": "1gbit"}] and made.runs[0].values == calls[0]
    assert re.fullmatch(r"run 1: <lambda>\(ranks=4, link='1gbit'\) took \d+\.\d s", said(made))


def test_rows_grow_into_a_table(capsys):
    made = dl.controls(measure, ranks=[2, 4, 8], size=[1.0, 2.5])
    made.button.click()
    capsys.readouterr()
    made.boxes["ranks"].value, made.boxes["size"].value = 8, 2.5
    made.button.click()
    assert [run.row for run in made.runs] == [
        {"ranks": 4, "size": 1.0, "ms": 4.0}, {"ranks": 8, "size": 2.5, "ms": 20.0},
    ]  # fmt: skip
    table = str(pd.DataFrame({"ranks": [4, 8], "size": [1.0, 2.5], "ms": [4.0, 20.0]}))
    assert table in capsys.readouterr().out


def test_a_frame_and_what_was_printed_are_displayed(capsys):
    def prints(n):
        print("rank", n, "was here")
        return pd.DataFrame({"n": [n]})

    dl.controls(prints, n=range(3, 5)).button.click()
    out = capsys.readouterr().out
    assert str(pd.DataFrame({"n": [3]})) in out and out.endswith("rank 3 was here\n")


def test_show_draws_all_runs_and_no_figure_stays_open(capsys):
    drawn, kept = [], plt.figure()

    def show(runs):
        drawn.append([run.result for run in runs])
        fig, ax = plt.subplots()
        ax.plot(drawn[-1])
        return ("so far", ax) if len(runs) == 2 else None

    made = dl.controls(lambda n: n * n, show, n=[2, 3])
    made.button.click()
    assert capsys.readouterr().out.count("Figure(") == 1  # opened and not returned: displayed all the same
    made.boxes["n"].value = 3
    made.button.click()
    assert drawn == [[4], [4, 9]]
    out = capsys.readouterr().out
    assert "so far" in out and out.count("Figure(") == 1
    assert plt.get_fignums() == [kept.number]
    plt.close(kept)


def killed():
    raise SystemExit(3)


def unwritten():
    raise NotImplementedError("union: write it, then run the cell below.")


ERRORS = {
    "a ValueError": (lambda: dl.Link.parse("fast"), "'fast'"),
    "no hosts": (lambda: (_ for _ in ()).throw(dl.HostsError("no hosts here: be root")), "no hosts here: be root"),
    "a rank": (lambda: (_ for _ in ()).throw(dl.RankError("rank 2 failed:\n  x", 2, "Traceback")), "rank 2 failed: x"),
    "Ctrl-C": (lambda: (_ for _ in ()).throw(KeyboardInterrupt), "stopped after 0.0 s"),
    "an exercise": (unwritten, "union: write it, then run the cell below."),
    "a foreign one": (lambda: {}["<b>key"], "KeyError: '<b>key'"),
    "sys.exit": (killed, "SystemExit: 3"),
    "no words": (lambda: (_ for _ in ()).throw(OSError), "OSError, without a word"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_a_sentence_and_the_button_works_again(name, capsys):
    fails, sentence = ERRORS[name]
    made = dl.controls(lambda wrong: fails() if wrong else {"fine": 1}, wrong=True)
    made.button.click()
    assert sentence in said(made) and 'role="alert"' in made.status.value and "<b>" not in made.status.value
    assert not made.button.disabled and made.runs == [] and made.clock.value == ""
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err + made.status.value
    made.boxes["wrong"].value = False
    made.button.click()
    assert len(made.runs) == 1 and "took" in said(made)


def test_a_picture_that_fails_is_a_sentence_too_and_its_run_is_not_kept():
    def show(runs):
        plt.subplots()
        if runs[-1].result == 0:
            raise ZeroDivisionError("nothing to divide by")

    made = dl.controls(lambda n: n, show, n=[0, 1])
    made.button.click()
    assert said(made) == "ZeroDivisionError: nothing to divide by" and made.runs == [] and not plt.get_fignums()
    made.boxes["n"].value = 1
    made.button.click()
    assert [run.result for run in made.runs] == [1]


def test_the_button_rests_while_it_runs():
    states = []
    made = dl.controls(lambda n: states.append((made.button.disabled, said(made))), n=[1])
    made.button.click()
    assert states == [(True, "running <lambda>(n=1)")] and not made.button.disabled


WRONG = {
    "no function": (lambda: dl.controls(3, n=[1]), TypeError, "a function that measures, not 3"),
    "show": (lambda: dl.controls(measure, 3, ranks=[1]), TypeError, "show is a function.*not 3"),
    "no controls": (lambda: dl.controls(measure), ValueError, "something to change"),
    "unknown": (lambda: dl.controls(measure, rank=[1]), TypeError, "do not fit measure.*unexpected.*'rank'"),
    "missing": (lambda: dl.controls(lambda a, b: 0, a=[1]), TypeError, "do not fit .*missing.*'b'"),
    "empty list": (lambda: dl.controls(measure, ranks=[]), ValueError, "ranks has no value"),
    "empty range": (lambda: dl.controls(measure, ranks=range(0)), ValueError, "ranks has no value"),
    "number": (lambda: dl.controls(measure, ranks=4), TypeError, "ranks is a list.*not 4"),
    "text": (lambda: dl.controls(measure, link="1gbit"), TypeError, "link is a list.*not '1gbit'"),
    "four": (lambda: dl.controls(measure, ranks=(1, 2, 3, 4)), ValueError, r"ranks as a tuple.*\(1, 2, 3, 4\)"),
    "words": (lambda: dl.controls(measure, ranks=("a", "b")), ValueError, "ranks as a tuple"),
    "backwards": (lambda: dl.controls(measure, ranks=(8, 2)), ValueError, "ranks as a tuple"),
    "no step": (lambda: dl.controls(measure, ranks=(2, 8, 0)), ValueError, "step of ranks is above 0, not 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_sentences(name):
    call, kind, sentence = WRONG[name]
    with pytest.raises(kind, match=sentence):
        call()

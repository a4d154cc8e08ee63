"""The exercise is the solution without the answer, and nothing else changes."""

import ast

import nbformat
import pytest
from conftest import ROOT

from ddplab.exercises import exercise, main, plain_markdown, stub, with_exercises, write_exercises
from ddplab.pages import PageError

LABS = sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))


def test_a_function_keeps_signature_and_docstring_and_loses_the_rest():
    source = '''import torch
def ring(x, n: int = 4) -> list:
    """Sum x over n ranks."""
    # send to the right
    y = x + 1
    return y

LATER = 3'''
    text = stub(source, "write it.")
    assert (
        text
        == '''import torch
def ring(x, n: int = 4) -> list:
    """Sum x over n ranks."""
    raise NotImplementedError('ring: write it.')

LATER = 3'''
    )


def test_comments_before_the_first_statement_are_answers_too():
    text = stub("def f(x):\n    # the answer is 42\n\n    # really\n    return 42\n")
    assert "42" not in text and "really" not in text
    with pytest.raises(NotImplementedError, match="f: write it"):
        names: dict = {}
        exec(text, names)
        names["f"](1)


def test_methods_async_and_several_functions():
    source = "class A:\n    def one(self):\n        return 1\n\n    async def two(self):\n        return 2\n\n"
    source += "def f():\n    return 3"
    text = stub(source)
    assert text.count("NotImplementedError") == 3 and "return" not in text
    assert "'A.one: write it" in text and "'f: write it" in text
    ast.parse(text)


def test_a_nested_function_goes_with_its_parent():
    text = stub("def outer():\n    def inner():\n        return 42\n    return inner()")
    assert text == "def outer():\n    raise NotImplementedError('outer: write it, then run the cell below.')"


def test_a_docstring_of_many_lines_and_a_multiline_signature_stay():
    source = 'def f(\n    a,\n    b=2,\n):\n    """One.\n\n    Two.\n    """\n    return a + b'
    assert stub(source).startswith('def f(\n    a,\n    b=2,\n):\n    """One.\n\n    Two.\n    """\n    raise NotImpl')


def test_a_cell_without_functions_becomes_a_comment():
    assert stub("x = 42\nprint(x)", "find x.") == "# Your turn: find x."


@pytest.mark.parametrize("source", ["%time x", "!ls", "def f(: pass"])
def test_a_cell_that_is_not_python_is_refused(source):
    with pytest.raises(PageError, match="plain Python"):
        stub(source)


def test_an_answer_on_the_signature_line_is_refused():
    with pytest.raises(PageError, match="solution of f: put the body on lines of its own"):
        stub("def f(): return 42")


def test_hints_with_quotes_stay_python():
    assert ast.parse(stub("def f():\n    return 1", 'say "no" and don\'t stop'))


def notebook():
    v4 = nbformat.v4
    cells = [
        v4.new_markdown_cell("(lab)=\n# Lab\n\n```{claim} C21\n```\n\nSee {ref}`the ring <ring>` and {cite}`paper`."),
        v4.new_code_cell("RANKS = 4", metadata={"tags": ["parameters"]}),
        v4.new_code_cell("RANKS = 2", metadata={"tags": ["injected-parameters", "hide-input"]}),
        v4.new_code_cell(
            "def answer():\n    return 'the secret'",
            metadata={"tags": ["solution", "hide-input"], "hint": "think.", "execution": {"t": "1"}},
            execution_count=3,
            outputs=[v4.new_output("stream", text="the secret")],
        ),
    ]
    return v4.new_notebook(cells=cells, metadata={"widgets": {}, "ddplab": {"key": "x"}})


def test_the_readers_version_has_no_trace_of_the_run():
    claims = {"C21": {"verdict": "false", "says": "GPU0 holds chunk 1.", "correct": "It misses two parts."}}
    nb = exercise(notebook(), claims)
    text = nbformat.writes(nb)
    assert [c.cell_type for c in nb.cells] == ["markdown", "code", "code"]
    assert "the secret" not in text and "solution" not in text and "widgets" not in text and '"key"' not in text
    assert nb.cells[-1].source.endswith("raise NotImplementedError('answer: think.')")
    assert nb.cells[-1].metadata.tags == ["exercise"] and nb.cells[-1].execution_count is None


def test_markdown_of_the_book_becomes_markdown_of_a_notebook():
    claims = {"C21": {"verdict": "false", "says": "GPU0 holds chunk 1.", "correct": "It misses two parts."}}
    text = plain_markdown(notebook().cells[0].source, claims)
    assert text.startswith("# Lab") and "{" not in text
    assert "> **Claim C21** (false). The article says: GPU0 holds chunk 1.\n>\n> It misses two parts." in text
    assert "See *the ring* and [paper]." in text
    box = plain_markdown(":::{admonition} Predict\n:class: tip\nHow many?\n:::\nNext.")
    assert box == "**Predict**\nHow many?\nNext."
    assert plain_markdown("$a_{1}$ and `{x}`") == "$a_{1}$ and `{x}`"


def test_write_names_the_lab_and_leaves_nothing_behind_on_a_mistake(tmp_path, notebook_file):
    lab = notebook_file(tmp_path / "labs/07_bad.ipynb", [("solution", "def f(): return 42")])
    with pytest.raises(PageError, match="07_bad.ipynb: solution of f"):
        write_exercises([lab], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_every_lab_gives_a_valid_exercise(lab, tmp_path):
    """Each has something to solve, and every cell of the reader's version is Python."""
    (file,) = write_exercises([lab], tmp_path)
    nb = nbformat.read(file, 4)
    nbformat.validate(nb)
    stubs = [c.source for c in nb.cells if "exercise" in c.metadata.get("tags", [])]
    assert stubs and all("NotImplementedError" in s or "Your turn" in s for s in stubs)
    for cell in nb.cells:
        if cell.cell_type == "code":
            ast.parse(cell.source)
    assert write_exercises([lab], tmp_path) == [file], "deriving twice is the same"


def test_make_exercises_writes_the_pages_with_something_to_solve_and_what_they_read(tmp_path, notebook_file, capsys):
    notebook_file(tmp_path / "labs/01_lab.ipynb", [("solution", "def f():\n    return 42")])
    notebook_file(tmp_path / "labs/02_plain.ipynb", [("", "print(42)")])
    (tmp_path / "labs/data").mkdir()
    (tmp_path / "labs/data/x.txt").write_text("1")
    (tmp_path / "_toc.yml").write_text("root: labs/01_lab\nchapters:\n  - file: labs/02_plain\n")
    assert main([str(tmp_path)]) == 0
    made = sorted(p.relative_to(tmp_path / "_build/exercises").as_posix() for p in (tmp_path / "_build").rglob("*.*"))
    assert made == ["labs/01_lab.ipynb", "labs/data/x.txt"]
    assert "labs/01_lab.ipynb" in capsys.readouterr().out


def test_every_lab_has_at_least_two_exercises():
    assert {lab.name for lab in LABS} <= {page.name for page in with_exercises(ROOT)}
    for lab in LABS:
        cells = nbformat.read(lab, 4).cells
        assert sum("solution" in c.metadata.get("tags", []) for c in cells) >= 2, lab.name

"""The book is strict: whatever is wrong on a page stops the build and is named; a good book leaves no report."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
import yaml
from conftest import ROOT

from ddplab.notebooks import main
from ddplab.pages import PageError
from ddplab.stage import build_html, fingerprint, mirror, recorded

HEAD = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n"
CELL = "```{{code-cell}} python\n:tags: [{}]\n{}\n```\n\n"
PARAMETERS = CELL.format("parameters", "QUICK = True")
PROOF = CELL.format("claim-C1", "assert QUICK in (True, False)")
LEDGER = """
- id: C1
  says: Two halves make one.
  verdict: "true"
  correct: Yes, $\\frac{1}{2} + \\frac{1}{2} = 1$, as {cite}`paper` has it, see {ref}`proof`.
  evidence: {notebook: book/intro, tag: claim-C1}
- id: C2
  says: Three halves make one.
  verdict: misleading
  correct: No.
  evidence: {source: "the paper {cite}`paper`"}
"""
INTRO = """
(proof)=
# A small book

```{math}
:label: half
T = \\frac{S}{B}
```

By {eq}`half` and [the other page](other).

```{claim} C1
```

```{claim} C2
```

"""
OTHER = """# Other

```{claim-ledger}
```

```{bibliography}
```

> Back to [the proof](#proof). $N/2$

\\begin{align}
a &= b \\\\
c &= d
\\end{align}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A book of two pages with the project's own settings and extensions, executed and built without a warning."""
    root = tmp_path_factory.mktemp("small")
    shutil.copytree(ROOT / "book/_ext", root / "book/_ext", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "book/_static", root / "book/_static")
    shutil.copy(ROOT / "_config.yml", root)
    (root / "_toc.yml").write_text(
        yaml.safe_dump({"format": "jb-book", "root": "book/intro", "chapters": [{"file": "book/other"}]})
    )
    (root / "book/references.bib").write_text("@article{paper, title={T}, author={A, B}, journal={J}, year={2009}}\n")
    (root / "book/claims.yml").write_text(LEDGER)
    (root / "book/intro.md").write_text(HEAD + INTRO + PARAMETERS + PROOF)
    (root / "book/other.md").write_text(OTHER)
    assert main([str(root), "--build"]) == 0
    return root


def page(root: Path, name: str) -> str:
    return (root / f"_build/html/book/{name}.html").read_text("utf8")


def test_a_good_book_builds_and_leaves_no_report(small):
    assert (small / "_build/html/index.html").exists()
    assert not list((small / "_build/html").glob("reports/*"))
    intro = page(small, "intro")
    assert 'class="claim-true claim admonition"' in intro or "claim-true" in intro
    assert intro.count('href="#claim-c1"') >= 1 and 'id="claim-c1"' in intro, "the box links to the cell"
    assert "<mfrac>" in intro and "(1)" in intro and 'href="#equation-half"' in intro
    other = page(small, "other")
    assert 'href="intro.html#claim-c1"' in other, "the ledger links to the cell"
    assert "<mtable" in other and "\\begin" not in other


def test_pages_carry_no_script_for_formulas_and_no_path_of_this_machine(small):
    for file in (small / "_build/html").rglob("*.html"):
        text = file.read_text("utf8")
        assert not re.search("<script[^>]*mathjax|MathJax *=", text) and str(small) not in text


def test_pages_are_kept_where_nothing_changed_and_made_anew_where_anything_did(small, tmp_path, monkeypatch):
    """The tool is not needed for a second build; a changed stage, a lost page and a page that differs need it."""
    root = tmp_path / "again"
    shutil.copytree(small, root)

    class Called(Exception):
        pass

    def tool(*_, **__):
        raise Called

    monkeypatch.setattr("ddplab.stage.subprocess.run", tool)
    kept = page(root, "other")
    assert build_html(root) == root / "_build/html/index.html" and page(root, "other") == kept

    def appended(file):
        file.write_text(file.read_text("utf8") + "\n", "utf8")

    changes = {
        "_build/executed/book/other.md": appended,
        "_build/executed/_config.yml": appended,
        "_build/executed/book/_ext/lean.py": appended,
        "_build/html/book/other.html": appended,
        "_build/html/book/intro.html": Path.unlink,
        "_build/built.txt": appended,
    }
    for file, change in changes.items():
        shutil.rmtree(root)
        shutil.copytree(small, root)
        change(root / file)
        with pytest.raises(Called):
            build_html(root)
        assert not (root / "_build/built.txt").exists(), "a build that fails is not taken for a good one"


@pytest.fixture(scope="module")
def broken(small, tmp_path_factory) -> str:
    """The same book with one of each mistake: what the build says about it."""
    root = tmp_path_factory.mktemp("broken")
    shutil.copytree(small, root, dirs_exist_ok=True)
    stage = root / "_build/executed/book"
    nb = nbformat.read(stage / "intro.ipynb", 4)
    nb.cells[-1].outputs = [nbformat.v4.new_output("stream", name="stderr", text="a stray warning")]
    nb.cells.append(nbformat.v4.new_code_cell("print('never ran')"))
    nbformat.write(nb, stage / "intro.ipynb")
    mistakes = "\n\n```{claim} C99\n```\n\n[gone](#nowhere) {ref}`gone` {cite}`nobody` $\\nosuch$ ![box](gone.png)\n"
    (stage / "other.md").write_text(OTHER + mistakes)
    lost = LEDGER.replace("tag: claim-C1", "tag: claim-C7")
    (stage / "claims.yml").write_text(lost)
    with pytest.raises(PageError) as caught:
        build_html(root)
    with pytest.raises(PageError) as again:  # the second build after a failed one is not milder
        build_html(root)
    assert sorted(str(again.value).split("\n")) == sorted(str(caught.value).split("\n"))
    return str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        "a code cell was not executed",
        "stderr was found in the cell outputs",
        "there is no claim C99 in book/claims.yml",
        "undefined label: 'book/intro#claim-c7'",
        "'nowhere'",
        "undefined label: 'gone'",
        '"nobody"',
        "no MathML for \\nosuch",
        "image file not readable: book/gone.png",
    ],
)
def test_every_mistake_stops_the_build_by_name(broken, message):
    assert message in broken
    assert "book/other.md" in broken and "book/intro.ipynb" in broken


def test_old_copies_leave_the_stage(tmp_path):
    """A page that was renamed, or is no notebook any more, would be found twice by Jupyter Book."""
    (tmp_path / "book/pics").mkdir(parents=True)
    (tmp_path / "book/a.md").write_text("# A\n")
    (tmp_path / "book/pics/x.svg").write_text("<svg/>")
    (tmp_path / "_config.yml").write_text("title: t\n")
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/a\n")
    stage = tmp_path / "_build/executed"
    (stage / "book").mkdir(parents=True)
    for old in ("a.ipynb", "gone.md"):
        (stage / "book" / old).write_text("old")
    mirror(tmp_path, set())
    left = {f.relative_to(stage).as_posix() for f in stage.rglob("*") if f.is_file()}
    assert left == {"book/a.md", "book/pics/x.svg", "_config.yml", "_toc.yml"}
    assert yaml.safe_load((stage / "_config.yml").read_text())["execute"]["execute_notebooks"] == "off"


def test_the_key_follows_everything_that_could_change_a_number(tmp_path, monkeypatch):
    source = tmp_path / "book/a.md"
    source.parent.mkdir()
    source.write_text("one")
    keys = [fingerprint(tmp_path, source, {}), fingerprint(tmp_path, source, {"RANKS": 8})]
    source.write_text("two")
    keys.append(fingerprint(tmp_path, source, {}))
    (tmp_path / "labs/data").mkdir(parents=True)
    (tmp_path / "labs/data/x.csv").write_text("1")
    keys.append(fingerprint(tmp_path, source, {}))
    (tmp_path / "book/claims.yml").write_text("[]")
    keys.append(fingerprint(tmp_path, source, {}))
    (tmp_path / "labs/results").mkdir()
    before = recorded(tmp_path)
    (tmp_path / "labs/results/grid.json").write_text("{}")
    assert recorded(tmp_path) != before
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    keys.append(fingerprint(tmp_path, source, {}))
    assert len(set(keys)) == len(keys)
    assert fingerprint(tmp_path, source, {}) == keys[-1]

"""Every notebook of the book runs, and the runner lets nothing pass that papermill passes in silence.

The small notebooks are made here, and run in one go; what must happen to each comes from papermill's own issues.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import yaml
from conftest import ROOT

from ddplab.notebooks import _joined, execute_all, main
from ddplab.pages import PageError, convert, pages, parameters, read

NOTEBOOKS = [path.relative_to(ROOT).as_posix() for path in pages(ROOT) if read(path) is not None]
PARAMETERS = ("parameters", 'STEPS = 10\nRATE = 0.5\nQUICK = True\nDEVICE = "auto"')


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_every_notebook_runs(executed, page):
    assert executed[page].error is None, executed[page].error


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_committed_notebooks_are_sources(page):
    """One literal parameters cell, the standard kernel, no outputs, no reliance on a tag that papermill ignores."""
    nb = read(ROOT / page)
    assert parameters(nb, page) is not None
    assert nb.metadata.kernelspec.name == "python3"
    for cell in nb.cells:
        assert "raises-exception" not in cell.metadata.tags, "papermill fails there: catch the error in the cell"
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, "strip the outputs (nbstripout)"


def write_toc(root: Path, names: list[str]) -> None:
    toc = {"format": "jb-book", "root": names[0], "chapters": [{"file": name} for name in names[1:]]}
    (root / "_toc.yml").write_text(yaml.safe_dump(toc))
    (root / "_config.yml").write_text("title: small\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run over notebooks that go wrong in every way, and one that is good."""
    root = tmp_path_factory.mktemp("small {book}")  # papermill formats paths: braces must survive
    cells = {
        "good": [PARAMETERS, "total = STEPS * 10\nprint('total', total, QUICK)", "# only a comment"],
        "divides": [PARAMETERS, "x = 1", "1 / 0", "print('never')"],
        "slow": [PARAMETERS, "import time\ntime.sleep(600)"],
        "stubborn": [
            PARAMETERS,
            "import time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    pass",
            "y = 1",
        ],
        "exits": [PARAMETERS, "import sys\nsys.exit(0)", "print('never')"],
        "exits3": [PARAMETERS, "import sys\nsys.exit(3)"],
        "dies": [PARAMETERS, "x = 1", "import os\nos._exit(1)", "print('never')"],
        "tagged": [PARAMETERS, ("raises-exception", "raise ValueError('shown')"), "z = 1"],
        "skips": [PARAMETERS, ("skip-execution", "print('never')")],
    }
    for name, sources in cells.items():
        made = []
        for source in sources:
            tag, text = source if isinstance(source, tuple) else (None, source)
            made.append(nbformat.v4.new_code_cell(text, metadata={"tags": [tag]} if tag else {}))
        # another machine's kernel name, and another's missing one: the runner always takes its own
        kernel = {"kernelspec": {"name": "conda-env-7", "display_name": "gone"}} if name == "good" else {}
        nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=kernel), root / f"{name}.ipynb")
    write_toc(root, list(cells))
    failed = {}
    for result in execute_all(root, {"STEPS": "2"}, 3, say=lambda line: None, at_once=3):
        if result.error:
            page, _, text = result.error.partition(", ")
            failed[page.removesuffix(".ipynb")] = text
    return SimpleNamespace(root=root, failed=failed)


def test_a_failing_run_says_so_and_builds_nothing(tmp_path, notebook_file, capsys):
    """The command, with fresh kernels."""
    notebook_file(tmp_path / "good.ipynb", [PARAMETERS, "print('total', STEPS)"])
    notebook_file(tmp_path / "divides.ipynb", [PARAMETERS, "1 / 0"])
    write_toc(tmp_path, ["good", "divides"])
    assert main([str(tmp_path), "--timeout", "60", "--build", "-p", "STEPS", "2"]) == 1
    out, err = capsys.readouterr()
    assert "total 2" in outputs(tmp_path / "_build/executed/good.ipynb")
    assert "FAILED divides.ipynb, cell 2: ZeroDivisionError" in out and "Traceback" not in err
    assert "1 of 2 notebooks failed: divides.ipynb" in err
    assert not (tmp_path / "_build/html").exists()


@pytest.mark.parametrize(
    ("name", "where", "what"),
    [
        ("divides", "cell 3", "ZeroDivisionError: division by zero"),
        ("slow", "cell 2", "interrupted after 3 s"),
        ("stubborn", "cell 2", "interrupted after 3 s"),
        ("exits", "cell 2", "SystemExit ended the notebook here"),
        ("exits3", "cell 2", "SystemExit: 3"),
        ("dies", "cell 3", "the kernel died"),
        ("tagged", "cell 2", "ValueError: shown"),
        ("skips", "cell 2", "the cell never ran"),
    ],
)
def test_every_failure_names_its_notebook_and_cell(run, name, where, what):
    first = run.failed[name].splitlines()[0]
    assert first.startswith(f"{where}: ") and what in first
    assert (run.root / "_build/failed" / f"{name}.ipynb").exists(), "the failed copy is kept"
    assert not (run.root / "_build/executed" / f"{name}.ipynb").exists(), "a failed notebook is not an executed one"


def test_the_report_puts_what_failed_first(run):
    text = (run.root / "_build/report.md").read_text("utf8")
    assert text.startswith(f"# {len(run.failed)} of {len(run.failed) + 1} notebooks failed\n")
    for name, error in run.failed.items():
        where, what = error.splitlines()[0].split(": ", 1)
        assert f"**{name}.ipynb, {where}**: `{what[:60]}" in text
    assert "| good.ipynb |" in text and text.index("**divides.ipynb") < text.index("| good.ipynb |")


def test_a_failure_keeps_its_traceback(run):
    assert "1 / 0" in run.failed["divides"] or "1/0" in run.failed["divides"]
    saved = nbformat.read(run.root / "_build/failed/divides.ipynb", 4)
    assert any(o.output_type == "error" for c in saved.cells if c.cell_type == "code" for o in c.outputs)


def outputs(path: Path) -> str:
    nb = nbformat.read(path, 4)
    return "".join(o.get("text", "") for c in nb.cells if c.cell_type == "code" for o in c.outputs)


def test_parameters_reach_values_that_are_derived_later(run):
    assert "total 20 True" in outputs(run.root / "_build/executed/good.ipynb")


def test_executed_copies_are_clean(run):
    """No timestamps, no machine paths, ids by position: equal runs give equal pages."""
    text = (run.root / "_build/executed/good.ipynb").read_text()
    nb = json.loads(text)
    assert "papermill" not in nb["metadata"] and str(run.root) not in text
    assert [c["id"] for c in nb["cells"]] == [f"cell-{i}" for i in range(len(nb["cells"]))]
    injected = next(c for c in nb["cells"] if "injected-parameters" in c["metadata"]["tags"])
    assert "hide-input" in injected["metadata"]["tags"]
    assert not list(run.root.glob("kernel-*")), "no socket of the kernel is left beside the notebook"


def test_unchanged_notebooks_are_kept_and_changed_ones_run(tmp_path, notebook_file):
    notebook_file(tmp_path / "one.ipynb", [PARAMETERS, "print('first', STEPS)"])
    write_toc(tmp_path, ["one"])

    def run(**options):
        return execute_all(tmp_path, options.pop("given", {}), say=lambda line: None, at_once=2, **options)[0]

    assert not run().kept and run().kept
    assert run(given={"STEPS": "10"}).kept, "the default, given, changes nothing"
    changed = run(given={"STEPS": "3"})
    assert not changed.kept and "first 3" in outputs(changed.output)
    notebook_file(tmp_path / "one.ipynb", [PARAMETERS, "1 / 0"])
    assert run().error and run().error, "a failure is never kept, nor does it leave the old copy"
    assert not (tmp_path / "_build/executed/one.ipynb").exists()


HERE = """
import json, os, sys
import numpy, torch
from ddplab.launch import launch

def rank():
    import torch.distributed as dist
    return dist.get_rank()

print(json.dumps({
    "folder": os.path.basename(os.getcwd()), "pid": os.getpid(), "drawn": numpy.random.rand(), "path": sys.path,
    "late": os.environ["LATE"], "threads variable": "OMP_NUM_THREADS" in os.environ, "ranks": launch(rank, ranks=2),
    "tests": [name for name in sys.modules if name.startswith("test_")],
}))
"""


def test_notebooks_side_by_side_report_in_order_and_run_in_their_own_folders(tmp_path, notebook_file, monkeypatch):
    for folder in ("a", "b"):
        notebook_file(tmp_path / folder / "here.ipynb", [PARAMETERS, HERE])
    write_toc(tmp_path, ["a/here", "b/here"])
    monkeypatch.setenv("LATE", "set by the caller")
    results = execute_all(tmp_path, {}, say=lambda line: None, at_once=2)
    order = [path.relative_to(tmp_path).as_posix() for path in pages(tmp_path)]
    assert [(r.page, r.error) for r in results] == [(page, None) for page in order]
    found = [json.loads(outputs(r.output)) for r in results]
    assert [each["folder"] for each in found] == [page.split("/")[0] for page in order]
    assert len({each["drawn"] for each in found}) == len({each["pid"] for each in found}) == 2
    for each in found:  # what a kernel is forked from does not show
        assert each["ranks"] == [0, 1] and each["late"] == "set by the caller"
        assert not each["threads variable"] and not each["tests"]
        assert "" in each["path"] and str(ROOT / "tests") not in each["path"]


def test_an_unknown_parameter_is_an_error(tmp_path, notebook_file, capsys):
    notebook_file(tmp_path / "one.ipynb", [PARAMETERS, "print(STEPS)"])
    write_toc(tmp_path, ["one"])
    assert main([str(tmp_path), "-p", "STPES", "2"]) == 1
    error = capsys.readouterr().err
    assert "no notebook has a parameter STPES: one.ipynb has STEPS, RATE, QUICK, DEVICE" in error
    assert not (tmp_path / "_build").exists(), "nothing ran"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["x = 1"], "0 cells are tagged `parameters`"),
        ([PARAMETERS, PARAMETERS], "2 cells are tagged `parameters`"),
        ([("parameters", "STEPS = 10\nTOTAL = STEPS * 10")], "compute in a later cell"),
        ([("parameters", "STEPS: int | None = 10")], "compute in a later cell"),
        ([("parameters", "import os")], "compute in a later cell"),
        ([("parameters", "A = B = 1")], "compute in a later cell"),
        ([("parameters", "STEPS = (")], "compute in a later cell"),
    ],
)
def test_the_parameters_cell_holds_literals_only(tmp_path, notebook_file, cells, message):
    path = notebook_file(tmp_path / "one.ipynb", cells)
    with pytest.raises(PageError, match="one.ipynb") as caught:
        parameters(read(path), "one.ipynb")
    assert message in str(caught.value)


def test_parameter_values_take_the_type_of_the_default():
    assert convert("p", "QUICK", "0", True) is False and convert("p", "QUICK", "true", False) is True
    assert convert("p", "RANKS", "8", 4) == 8 and convert("p", "RATE", "1e-3", 0.5) == 1e-3
    assert convert("p", "RATE", "2", 0.5) == 2.0 and convert("p", "DEVICE", "1", "auto") == "1"
    assert convert("p", "SIZES", "[1, 2]", [4]) == [1, 2]
    for name, text, default in [
        ("RANKS", "many", 4),
        ("RANKS", "2.5", 4),
        ("QUICK", "maybe", True),
        ("RANKS", "True", 4),
    ]:
        with pytest.raises(PageError, match=name):
            convert("p", name, text, default)


def test_a_missing_or_doubled_page_is_named(tmp_path):
    write_toc(tmp_path, ["one", "two"])
    (tmp_path / "one.md").write_text("# One\n")
    with pytest.raises(PageError, match="names two, but there is no file"):
        pages(tmp_path)
    (tmp_path / "two.md").write_text("# Two\n")
    (tmp_path / "two.ipynb").write_text("{}")
    with pytest.raises(PageError, match="two files"):
        pages(tmp_path)


def test_markdown_notebooks_report_lines(tmp_path):
    head = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n# Title\n\n"
    (tmp_path / "one.md").write_text(head + "```{code-cell} python\n:tags: [parameters]\nSTEPS = f()\n```\n")
    with pytest.raises(PageError, match="one.md, line 8"):
        parameters(read(tmp_path / "one.md"), "one.md")


def test_text_that_a_kernel_cut_is_one_piece_again():
    out = nbformat.v4.new_output
    table = out("display_data", data={"text/plain": "table"})
    texts = [out("stream", name="stdout", text=text) for text in "abc"]
    pieces = _joined([texts[0], texts[1], out("stream", name="stderr", text="!"), table, texts[2]])
    assert [piece.get("text") for piece in pieces] == ["ab", "!", None, "c"]

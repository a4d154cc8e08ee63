"""Parameters for all notebooks: RANKS=auto, DEVICE=cuda without a GPU, and what pytest says before it runs anything."""

import os
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, check_given

from ddplab.given import values_for
from ddplab.pages import PageError

CELL = ("parameters", 'RANKS = 4\nDEVICE = "auto"\nQUICK = True')


@pytest.fixture
def root(tmp_path, notebook_file):
    notebook_file(tmp_path / "one.ipynb", [CELL])
    notebook_file(tmp_path / "two.ipynb", [("parameters", "RANKS = 2")])
    (tmp_path / "_toc.yml").write_text(yaml.safe_dump({"root": "one", "chapters": [{"file": "two"}]}))
    return tmp_path


@pytest.fixture
def gpus(monkeypatch):
    import ddplab.launch  # noqa: F401 - so that the module is there to be patched

    def have(n):
        monkeypatch.setattr(sys.modules["ddplab.launch"], "gpu_count", lambda: n)

    return have


def by_name(root, **given):
    return {path.stem: values for path, values in values_for(root, given).items()}


@pytest.mark.parametrize(
    ("count", "given", "one", "two"),
    [
        (8, {"RANKS": "auto"}, {"RANKS": 8}, {"RANKS": 8}),
        (8, {"RANKS": "auto", "DEVICE": "cuda"}, {"RANKS": 8, "DEVICE": "cuda"}, {"RANKS": 8}),
        (4, {"RANKS": "auto"}, {}, {"RANKS": 4}),  # what is the default already changes nothing
        (8, {"RANKS": "auto", "DEVICE": "cpu"}, {"DEVICE": "cpu"}, {}),
        (1, {"RANKS": "auto"}, {}, {}),  # one rank has nobody to talk to
        (0, {"RANKS": "auto"}, {}, {}),
        (0, {"RANKS": "3", "QUICK": "0"}, {"RANKS": 3, "QUICK": False}, {"RANKS": 3}),
    ],
)
def test_ranks_auto_is_one_rank_a_gpu_else_each_notebooks_default(root, gpus, count, given, one, two):
    gpus(count)
    assert by_name(root, **given) == {"one": one, "two": two}


def test_cuda_without_a_gpu_is_refused_before_anything_runs(root, gpus):
    gpus(0)
    for given in ({"DEVICE": "cuda"}, {"DEVICE": "cuda", "RANKS": "auto"}):
        with pytest.raises(PageError, match=r"DEVICE=cuda, but .*\. Use DEVICE=auto"):
            values_for(root, given)
    with pytest.raises(PageError, match="DEVICE is auto, cpu or cuda, not 'gpu'"):
        values_for(root, {"DEVICE": "gpu"})
    assert not (root / "_build").exists()


def test_pytest_says_so_at_once(gpus):
    """`make test DEVICE=cuda RANKS=8` on a machine without a GPU: one line instead of a failure a notebook."""
    gpus(0)
    with pytest.raises(pytest.UsageError, match="DEVICE=cuda, but"):
        check_given(["QUICK=1", "RANKS=8", "DEVICE=cuda"])
    with pytest.raises(pytest.UsageError, match="no notebook has a parameter RANK:"):
        check_given(["RANK=8"])
    with pytest.raises(pytest.UsageError, match="NAME=VALUE, not 'RANKS'"):
        check_given(["RANKS"])
    with pytest.raises(pytest.UsageError, match="QUICK takes 0 or 1, not 'maybe'"):
        check_given(["QUICK=maybe"])
    check_given(["QUICK=1"])


def test_make_refuses_a_name_that_it_does_not_know_and_hands_on_the_others():
    """-n prints the commands and runs none."""

    def make(*given):
        out = subprocess.run(["make", "-n", "test", *given], cwd=ROOT, capture_output=True, text=True, env=clean)
        return out.returncode, out.stdout, out.stderr

    outer = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")  # where `make test` runs this
    clean = {name: value for name, value in os.environ.items() if name not in outer}
    code, said, problem = make("RNAKS=8")
    assert code == 2 and "unknown: RNAKS;" in problem and "RANKS" in problem and "pytest" not in said
    code, said, _ = make("RANKS=8", "DEVICE=cuda")
    assert code == 0
    (command,) = (line for line in said.splitlines() if "pytest" in line)
    assert "--given RANKS=8" in command and "--given DEVICE=cuda" in command


def test_every_notebook_of_the_book_takes_eight_ranks(gpus):
    """As the multi-GPU job asks: each notebook that has ranks gets a number of the right type."""
    gpus(8)
    values = values_for(ROOT, {"RANKS": "auto", "DEVICE": "cuda", "QUICK": "1"})
    assert {v["RANKS"] for v in values.values() if "RANKS" in v} == {8}
    assert sum("RANKS" in v for v in values.values()) >= 10

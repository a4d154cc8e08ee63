"""The checkout itself: its requirements, style, and the README's own code."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec

from conftest import ROOT

from ddplab.pages import pages, read

TRACKED = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
FILES = [ROOT / name for name in TRACKED if name and (ROOT / name).is_file()]
# the name that is imported -> the name that is installed, where they differ
INSTALLED = {
    "yaml": "pyyaml",
    "jupyter_book": "jupyter-book",
    "myst_nb": "myst-nb",
    "pynvml": "nvidia-ml-py",
    "xdist": "pytest-xdist",
    "IPython": "ipython",
    "axe_playwright_python": "axe-playwright-python",
}
# come with a requirement that is built on them
IMPLIED = {"docutils", "sphinx", "traitlets", "conftest", "ddplab", "jupyter_client", "torchgen"}
IMPLIED |= {file.stem for file in (ROOT / "book/_ext").glob("*.py")}  # the book's own extensions


def test_style():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def imports(folders: list[str]) -> set[str]:
    found = set()
    for file in (f for folder in folders for f in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - IMPLIED


def page_imports() -> set[str]:
    """What the code cells of the book import."""
    found = set()
    for path in pages(ROOT):
        for cell in nb.cells if (nb := read(path)) else []:
            if cell.cell_type == "code":
                found |= set(re.findall(r"^\s*(?:import|from) (\w+)", cell.source, re.M))
    return found - set(sys.stdlib_module_names) - IMPLIED


def required(name: str) -> set[str]:
    lines = (ROOT / name).read_text().splitlines()
    return {re.split(r"[<>=;!~ ]", line)[0].lower() for line in lines if line and not line.startswith("#")}


def test_every_import_is_a_requirement():
    have = required("requirements.txt")
    assert {INSTALLED.get(n, n) for n in imports(["ddplab", "book/_ext"]) | page_imports()} <= have
    # Names of the tests' own modules, and of those that a test writes for itself, are not installed anywhere.
    theirs = {n for n in imports(["tests"]) if (found := find_spec(n)) and "site-packages" in str(found.origin)}
    assert {INSTALLED.get(n, n) for n in theirs} <= have | required("requirements-dev.txt")


def test_jupyter_book_stays_below_two():
    assert any(
        re.fullmatch(r"jupyter-book>=1[\d.]*,<2", line) for line in (ROOT / "requirements.txt").open().read().split()
    )


def test_no_big_file_and_no_notebook_output_in_git():
    for file in FILES:
        assert file.stat().st_size <= 2**20, f"{file.name} is over 1 MiB"
    notebooks = [str(f) for f in FILES if f.suffix == ".ipynb"]
    if notebooks:
        command = [sys.executable, "-m", "nbstripout", "--verify", "--keep-id", *notebooks]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_readmes_code_runs(tmp_path):
    """As a reader runs it: a plain script without a guard."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf8"), re.S)[1]
    script = tmp_path / "readme.py"
    script.write_text(code.replace("dl.launch(work, ranks=4) ", "print(dl.launch(work, ranks=4)) "))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[4.0, 4.0, 4.0, 4.0]"


def test_the_readmes_files_exist():
    text = (ROOT / "README.md").read_text("utf8")
    for name in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / name).exists(), name

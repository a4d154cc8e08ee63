"""Rules that hold for the whole repository: cheap imports, documented names, small files, clean sources."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ddplab

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddplab"
MODULES = sorted(PACKAGE.rglob("*.py"))
PUBLIC = sorted(ddplab._HOME)
MOST_LINES = 300

# Read by people and programs that have no use for torch: they must start at once and stay small.
LIGHT = [
    "ddplab",
    "ddplab.schedule",
    "ddplab.cost",
    "ddplab.trace",
    "ddplab.nccl",
    "ddplab.dcgm",
    "ddplab.cli",
    "ddplab.doctor",
]


def tracked() -> list[Path]:
    """The files under version control; in a copy without it, the files of the rooms that are."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    rooms = ("ddplab", "tests", "book", "labs", "benchmarks")
    found = [*ROOT.glob("*.*"), *(path for room in rooms for path in (ROOT / room).rglob("*"))]
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


# ---------------------------------------------------------------- imports


def test_light_modules_load_neither_torch_nor_pandas():
    present = [
        name
        for name in LIGHT
        if (ROOT / name.replace(".", "/")).is_dir() or (ROOT / (name.replace(".", "/") + ".py")).exists()
    ]
    assert {"ddplab", "ddplab.schedule", "ddplab.cost", "ddplab.cli"} <= set(present)
    code = f"""
import importlib, sys
for name in {present}:
    importlib.import_module(name)
    heavy = {{"torch", "pandas", "matplotlib"}} & set(sys.modules)
    assert not heavy, f"{{name}} loads {{heavy}}"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_resolves_and_says_what_it_is(name):
    value = getattr(ddplab, name)
    assert name in dir(ddplab) and name in ddplab.__all__
    if not (inspect.isclass(value) or callable(value)):
        return  # data, documented where it is defined
    assert (inspect.getdoc(value) or "").strip(), f"ddplab.{name} has no docstring"
    assert value.__module__.startswith("ddplab")
    if not inspect.isclass(value):
        return
    for member, part in vars(value).items():
        function = getattr(part, "__func__", part)
        if member.startswith("_") or not (inspect.isfunction(function) or isinstance(part, property)):
            continue
        assert (inspect.getdoc(getattr(value, member)) or "").strip(), f"ddplab.{name}.{member} has no docstring"


def test_a_function_that_shares_its_modules_name_stays_the_function():
    for name, module in ddplab._HOME.items():
        if name == module:
            importlib.import_module(f"ddplab.{module}")
            assert callable(getattr(ddplab, name)), name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'rnig'"):
        ddplab.rnig  # noqa: B018


def test_every_package_that_is_imported_is_a_direct_requirement():
    required = {
        re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0].lower().replace("_", "-")
        for line in (ROOT / "requirements.txt").read_text("utf8").splitlines()
        if line.strip() and not line.startswith(("#", "-"))
    }
    homes = importlib.metadata.packages_distributions()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for top in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"ddplab"}:
                owners = {home.lower().replace("_", "-") for home in homes.get(top, [top])}
                assert owners & required, f"{path.relative_to(ROOT)} imports {top}; requirements.txt lacks {owners}"


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_is_short_and_says_what_it_is_about(path):
    text = path.read_text("utf8")
    assert len(text.splitlines()) <= MOST_LINES
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "no docstring"


# Put together here, so that this file does not hold what it forbids.
FORBIDDEN = {
    "a path of one machine": ["/" + "work/", "/" + "root/", "/tmp/" + "team", "shared" + "/DESIGN", "../" + "shared"],
    "a package registry": ["py" + "pi.org", "python" + "hosted", "registry." + "npmjs", "npm" + "js.com"],
    "unfinished work": ["TO" + "DO", "FIX" + "ME", "X" + "XX"],
}


def test_no_source_holds_a_forbidden_word():
    found = []
    for path in tracked():
        try:
            text = path.read_text("utf8")
        except UnicodeDecodeError:
            continue  # a picture
        for kind, words in FORBIDDEN.items():
            for word in words:
                for match in re.finditer(rf"(?<!\w){re.escape(word)}", text):
                    line = text.count("\n", 0, match.start()) + 1
                    found.append(f"{path.relative_to(ROOT)}:{line}: {word} ({kind})")
    assert not found, "\n".join(found)


def test_ruff_is_content():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_notebooks_carry_no_outputs_and_no_machine():
    for path in (path for path in tracked() if path.suffix == ".ipynb"):
        nb = json.loads(path.read_text("utf8"))
        name = path.relative_to(ROOT)
        assert nb["metadata"]["kernelspec"]["name"] == "python3", f"{name}: kernel {nb['metadata']['kernelspec']}"
        for number, cell in enumerate(nb["cells"], 1):
            if cell["cell_type"] == "code":
                assert not cell["outputs"] and cell["execution_count"] is None, f"{name}, cell {number} has outputs"

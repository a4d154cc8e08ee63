"""The stage `_build/executed`: a mirror of `book/` and `labs/` with executed notebooks, and the HTML built from it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ddplab.pages import PageError

ROOMS = ("book", "labs")
_TRASH = {"__pycache__", ".ipynb_checkpoints"}


def _files(folder: Path) -> list[Path]:
    return [f for f in sorted(folder.rglob("*")) if f.is_file() and not _TRASH & set(f.parts)]


def fingerprint(root: Path, path: Path, values: dict[str, Any]) -> str:
    """A key that changes with anything that could change the notebook's outputs: sources, data, packages, machine."""
    seen: dict[str, Any] = {
        "values": {name: repr(value) for name, value in values.items()},
        "machine": [platform.platform(), platform.processor(), os.cpu_count()],
        "software": installed(),
        "env": {k: v for k, v in os.environ.items() if k.startswith(("DDPLAB_", "NCCL_", "CUDA_", "TORCH_"))},
    }
    files = [path, root / "book/claims.yml"]
    files += [f for room in (Path(__file__).parent, *(root / r / "data" for r in ROOMS)) for f in _files(room)]
    seen["files"] = _digest(files)
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def recorded(root: Path) -> str:
    """A key for the recorded results in `labs/results`, which the quick edition reads and the full one writes."""
    return _digest(_files(root / "labs/results"))


@functools.cache
def installed() -> list[str]:
    """Python and every package, with versions."""
    return [sys.version, *sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions())]


def _digest(files: Iterable[Path], also: Iterable[str] = ()) -> str:
    found = [[*f.parts[-2:], hashlib.sha256(f.read_bytes()).hexdigest()] for f in files if f.exists()]
    return hashlib.sha256(json.dumps([found, *also]).encode()).hexdigest()


def mirror(root: Path, notebooks: set[Path], keep: Iterable[Path] = ()) -> None:
    """Bring everything but the notebooks onto the stage: plain pages, pictures, data. `keep`: other files to leave.

    A page that was renamed, or is no longer a notebook, must not leave its old copy: Jupyter Book would take it.
    """
    stage = root / "_build/executed"
    stage.mkdir(parents=True, exist_ok=True)
    wanted = {*keep, *((stage / p.relative_to(root)).with_suffix(".ipynb") for p in notebooks)}
    for source in (f for room in ROOMS for f in _files(root / room)):
        if source in notebooks:
            continue
        copy = stage / source.relative_to(root)
        wanted.add(copy)
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
    for old in _files(stage):
        if old not in wanted and old.parent != stage:
            old.unlink()
    config = yaml.safe_load((root / "_config.yml").read_text("utf8"))
    config.setdefault("execute", {})["execute_notebooks"] = "off"
    # Jupyter Book resolves these against the folder it is given: the stage.
    (stage / "_config.yml").write_text(yaml.safe_dump(config, allow_unicode=True, sort_keys=False), "utf8")
    shutil.copyfile(root / "_toc.yml", stage / "_toc.yml")


def build_html(root: Path) -> Path:
    """Build `_build/html` from the stage; any warning is a PageError. Returns the path of the first page.

    All pages or none: an incremental build after a failed one reads nothing anew and would succeed. Where neither
    the stage, nor what builds from it, nor the pages changed since the last good build, the pages are kept.
    """
    stage, html, note = root / "_build/executed", root / "_build/html", root / "_build/built.txt"
    made_from = _digest([*_files(stage), *_files(Path(__file__).parent)], installed())
    if note.exists() and note.read_text("utf8") == f"{made_from} {_digest(_files(html))}\n":
        return html / "index.html"
    note.unlink(missing_ok=True)
    shutil.rmtree(html, ignore_errors=True)  # a page that was renamed must not stay
    # No search for garbage: of a book's trees there is little, and to search them again and again takes a fifth longer.
    tool = [sys.executable, "-c", "import gc; gc.disable(); from jupyter_book.cli.main import main; main()"]
    options = ["--path-output", str(root), "-n", "-W", "--keep-going", "--all", "-q"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONUTF8": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [*tool, "build", str(stage), *options], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode or not (html / "index.html").exists():
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
        problems = [line for line in text.splitlines() if re.search(r"WARNING|ERROR|CRITICAL", line)]
        shown = "\n".join(problems[:40]) or text[-3000:]
        raise PageError("the book was not built:\n" + shown.replace(f"{stage}/", ""))
    note.write_text(f"{made_from} {_digest(_files(html))}\n", "utf8")
    return html / "index.html"

"""Build the book as `make book` does: execute the notebooks that changed, then write the pages; or open what is built.

It works in a checkout of the repository. The quick edition is the default; --full measures the full grids."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from pathlib import Path

from ddplab.cli.checkout import find
from ddplab.cli.values import Problem, one_of, seconds

EXAMPLE = "ddplab book\nddplab book -p RANKS 8\nddplab book open"

# What the pipeline imports, by the name that pip installs.
NEEDED = {"papermill": "papermill", "myst_nb": "myst-nb", "jupyter_book": "jupyter-book<2", "ipykernel": "ipykernel"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", type=one_of(("build", "open"), "action"), default="build", help="build (default) or open"
    )
    parser.add_argument("--full", action="store_true", help="measure the full grids (QUICK=0); takes much longer")
    parser.add_argument("--force", action="store_true", help="execute unchanged notebooks too")
    parser.add_argument(
        "-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="notebook parameter"
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help="seconds for one cell (default 600, full 3600)")


def run(args: argparse.Namespace) -> int:
    root = find("the book")
    if args.action == "open":
        return _open(root / "_build/html/index.html")
    missing = [pip for module, pip in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        quoted = " ".join(f"'{name}'" if "<" in name else name for name in missing)
        raise Problem(f"the book cannot be built without {', '.join(missing)}; pip install {quoted}", 1)
    version = importlib.metadata.version("jupyter-book")
    if int(version.split(".")[0]) >= 2:
        raise Problem(f"jupyter-book {version} is another program; pip install 'jupyter-book<2'", 1)
    from ddplab.notebooks import main as notebooks

    given = [*[["QUICK", "0"]] * args.full, *args.p]
    line = [str(root), "--build", "--timeout", f"{args.timeout or (3600 if args.full else 600):g}"]
    return notebooks([*line, *(word for pair in given for word in ("-p", *pair)), *["--force"] * args.force])


def _open(page: Path) -> int:
    import webbrowser

    if not page.exists():
        raise Problem("the book is not built yet; run 'ddplab book' first", 1)
    print(page)
    if not webbrowser.open(page.as_uri()):
        raise Problem("no browser was found; open the page above yourself", 1)
    return 0

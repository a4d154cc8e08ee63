"""Execute every notebook of the book with papermill, once, into `_build/executed`; the book is built from there.

So the page that a reader sees is the run that the tests checked. papermill lets three things pass in silence: an
unknown parameter, `sys.exit(0)` in the middle of a notebook, and a cell that never ran. Here each fails, by name.

    python -m ddplab.notebooks .                        # every notebook of _toc.yml; unchanged ones are kept
    python -m ddplab.notebooks . --build -p QUICK 0     # the full grids, then the HTML pages
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError, strip_color
from traitlets.config import Config

from ddplab.exercises import write_exercises
from ddplab.given import values_for
from ddplab.pages import PageError, read
from ddplab.runreport import write_report
from ddplab.stage import build_html, fingerprint, mirror, recorded

WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass
class Result:
    """What became of one notebook: `error` is None where every cell ran; `output` is the executed or failed copy."""

    page: str
    seconds: float
    error: str | None
    output: Path
    kept: bool = False


class _Engine(NBClientEngine):
    """papermill's, which writes the notebook when all is over, failed or not: it would do so twice for each cell."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
        path, nb_man.output_path = nb_man.output_path, None
        try:
            return super().execute_managed_notebook(nb_man, kernel_name, **options)
        finally:
            nb_man.output_path = path


papermill_engines.register(_Engine.__name__, _Engine)


@contextlib.contextmanager
def _kernel_environment() -> Iterator[Config]:
    """The kernel of this very environment, over Unix sockets: no TCP port, nothing left in the notebook's folder."""
    saved = dict(os.environ)
    # A python3 kernel in the home folder must not win over this one.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    # Where pytest shows through, ipykernel does not capture what subprocesses print.
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    with tempfile.TemporaryDirectory(prefix="ddplab-k") as sockets:
        try:
            yield Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/k"}})
        finally:
            os.environ.clear()
            os.environ.update(saved)


def _why(error: Exception, nb: nbformat.NotebookNode, page: str, timeout: float) -> str:
    """One message for whatever ended a run: the page, the cell, then the error itself."""
    # papermill marks all cells of a dead kernel as completed: the last one that has a time is the one it died in.
    ran = [c for c in nb.cells if c.metadata.get("papermill", {}).get("start_time")]
    if isinstance(error, PapermillExecutionError):
        same = (error.source, error.exec_count)
        ran = [c for c in ran if c.cell_type == "code" and (c.source, c.execution_count) == same]
    at = ran[-1].metadata.get("at", "the injected parameters") if ran else "before the first cell"
    seconds = ran[-1].metadata.papermill.get("duration") or 0.0 if ran else 0.0
    if isinstance(error, PapermillExecutionError) and seconds < timeout:
        trace = strip_color("\n".join(error.traceback)).strip() or f"{error.ename}: {error.evalue}"
        return f"{page}, {at}: {error.ename}: {error.evalue}\n{trace}"
    if isinstance(error, PapermillExecutionError) or "Timeout" in type(error).__name__:
        trace = strip_color("\n".join(getattr(error, "traceback", []))).strip()
        return f"{page}, {at}: interrupted after {timeout:g} s (the limit for one cell)\n{trace}"
    if type(error).__name__ == "DeadKernelError":
        return f"{page}, {at}: the kernel died (a crash, os._exit, or out of memory)"
    return f"{page}, {at}: {type(error).__name__}: {error}"


def _unexecuted(nb: nbformat.NotebookNode, page: str) -> str | None:
    for cell in nb.cells:
        if cell.cell_type == "code" and cell.source.strip():
            where = f"{page}, {cell.metadata.get('at')}"
            for output in cell.outputs:
                if output.output_type == "error":
                    return f"{where}: {output.ename} ended the notebook here; the later cells never ran"
            if cell.execution_count is None:
                return f"{where}: the cell never ran"
    return None


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Text that follows text in one piece: where a kernel cuts it depends on the time, and pages show the cut."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if output.output_type == "stream" and output.name == last.get("name"):
            last["text"] += output.text
        else:
            joined.append(output)
    return joined


def execute(root: Path, path: Path, values: dict[str, Any], timeout: float = 600, force: bool = True) -> Result:
    """Run one notebook in its own folder with a fresh kernel; `values` are the parameters to inject.

    The executed copy replaces an older one only when every cell ran. Otherwise the failed copy stays, with its
    traceback, under `_build/failed`. `timeout` is in seconds, for each cell.
    """
    page, nb = path.relative_to(root).as_posix(), read(path)
    out = (root / "_build/executed" / page).with_suffix(".ipynb")
    key = fingerprint(root, path, values)
    if not force and out.exists():
        noted = nbformat.read(out, 4).metadata.get("ddplab", {})
        if (noted.get("key"), noted.get("recorded")) == (key, recorded(root)):
            return Result(page, 0.0, None, out, kept=True)
    work = (root / "_build/failed" / page).with_suffix(".ipynb")
    work.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    nbformat.write(nb, work)
    name = str(work).replace("{", "{{").replace("}", "}}")  # papermill formats its paths
    late = {"ename": "CellTimeout", "evalue": f"interrupted after {timeout:g} s", "traceback": []}
    start, error = time.perf_counter(), None
    with _kernel_environment() as config:
        try:
            papermill.execute_notebook(
                name, name, values, kernel_name="python3", language="python", cwd=str(path.parent), progress_bar=False,
                execution_timeout=timeout, interrupt_on_timeout=True, error_on_timeout=late, start_timeout=120,
                config=config, engine_name=_Engine.__name__,
            )  # fmt: skip
        except Exception as problem:  # whatever papermill or the kernel did, the other notebooks still run
            error = _why(problem, nbformat.read(work, 4), page, timeout)
    seconds = time.perf_counter() - start
    nb = nbformat.read(work, 4)
    error = error or _unexecuted(nb, page)
    if error:
        return Result(page, seconds, error, work)
    for i, cell in enumerate(nb.cells):  # timestamps and absolute paths would make every run a different page
        for noise in ("papermill", "execution", "at"):
            cell.metadata.pop(noise, None)
        cell["id"] = f"cell-{i}"
        if "injected-parameters" in cell.metadata.tags:
            cell.metadata.tags.append("hide-input")
        if cell.cell_type == "code":  # a control needs a kernel, and a page has none
            cell.outputs = _joined([o for o in cell.outputs if WIDGET not in o.get("data", {})])
    nb.metadata.pop("papermill", None)
    nb.metadata.pop("widgets", None)
    # A full edition writes recorded results itself, hence their state after the run.
    nb.metadata["ddplab"] = {"key": key, "recorded": recorded(root), "seconds": round(seconds, 1)}
    nbformat.write(nb, work)
    out.parent.mkdir(parents=True, exist_ok=True)
    os.replace(work, out)
    return Result(page, seconds, None, out)


def execute_all(
    root: Path,
    given: dict[str, str],
    timeout: float = 600,
    force: bool = False,
    say: Callable[[str], None] = print,
    at_once: int = 1,
) -> list[Result]:
    """Run every notebook of `_toc.yml` and mirror the other files: `_build/executed` is then ready for jupyter-book.

    `given` maps parameter names to text, as on the command line: see `ddplab.given`. What became of each notebook is
    written to `_build/report.md`. `at_once`: notebooks that run side by side. Tests may; a book that is read should
    have its measurements to itself.
    """
    values = values_for(root, given)
    calls = [(root, path, mine, timeout, force) for path, mine in values.items()]
    results = []
    for r in _runs(calls, at_once):
        results.append(r)
        time_taken = "unchanged, kept" if r.kept else f"{r.seconds:6.1f} s"
        say(f"FAILED {r.error}" if r.error else f"  {r.page:<28} {time_taken}")
    write_report(root, results, given)
    derived = []
    for path in values:
        if any("solution" in cell.metadata.tags for cell in read(path).cells):
            derived += write_exercises([path], root / "_build/executed" / path.parent.relative_to(root) / "exercises")
    mirror(root, set(values), keep=derived)
    return results


def _runs(calls: list[tuple[Any, ...]], at_once: int) -> Iterator[Result]:
    """`execute(*call)` for each call, in order; side by side in processes, because papermill changes the folder.

    On Linux their kernels are forks of one that has torch and the like already: see `ddplab/_warm.py`.
    """
    if at_once == 1:
        yield from (execute(*call) for call in calls)
    elif sys.platform == "linux":
        from ddplab import _warm

        with ThreadPoolExecutor(at_once) as pool:
            yield from pool.map(lambda call: _warm.call(execute, *call), calls)
    else:
        with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
            yield from pool.map(execute, *zip(*calls, strict=True))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ddplab.notebooks", description=__doc__.split("\n")[0])
    parser.add_argument("root", type=Path, help="the folder of _toc.yml")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="set a parameter")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one cell (default 600)")
    parser.add_argument("--force", action="store_true", help="run unchanged notebooks too")
    parser.add_argument("--build", action="store_true", help="build the HTML pages afterwards")
    args = parser.parse_args(argv)
    try:
        root = args.root.resolve()
        results = execute_all(root, dict(args.p), args.timeout, args.force, lambda line: print(line, flush=True))
        failed = [r for r in results if r.error]
        if failed:
            names = ", ".join(r.page for r in failed)
            raise PageError(
                f"{len(failed)} of {len(results)} notebooks failed: {names}; see _build/report.md and _build/failed"
            )
        if args.build:
            print(f"The book: {build_html(root)}")
    except PageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What several test modules share: the executed notebooks, the book built from them, a browser that drives its pages.

Each notebook runs once in a session, always afresh; the pages are built from those runs. With pytest-xdist (`-n 2`,
as in `make test`) the files that need them go to one worker, and every other file to one worker as a whole: what its
tests share is made once, too.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import http.server
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

gc.disable()  # until all tests are collected: what they import stays
ROOT = Path(__file__).parents[1]
STILL = {"reduced_motion": "reduce"}  # to draw what moves, frame by frame without a GPU, takes most of a test's time
QUIET = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
ALONE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # nothing outside of this machine has an address


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--given", action="append", default=[], metavar="NAME=VALUE", help="a parameter for the notebooks")
    parser.addoption("--every-lab", action="store_true", help="drive every lab in JupyterLab, not only one")
    parser.addoption("--every-view", action="store_true", help="check each page in light and dark, wide and narrow")


def pytest_configure(config: pytest.Config) -> None:
    # What a shell starts with `&` ignores Ctrl-C, and so would every program that a test starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        check_given(config.getoption("given"))


def check_given(items: list[str]) -> None:
    """Before anything runs: DEVICE=cuda without a GPU would fail in every notebook, one after the other."""
    from ddplab.given import values_for
    from ddplab.pages import PageError

    if wrong := [item for item in items if "=" not in item]:
        raise pytest.UsageError(f"--given takes NAME=VALUE, not {wrong[0]!r}")
    given = dict(item.split("=", 1) for item in items)
    if given.keys() <= {"QUICK"} and given.get("QUICK") in (None, "0", "1"):
        return  # what make always gives: not worth the time to read all notebooks
    try:
        values_for(ROOT, given)
    except PageError as error:
        raise pytest.UsageError(str(error)) from None


@functools.cache
def needs_the_book(file: str) -> bool:
    """Whether a test or fixture of this file, a path in the checkout, takes the executed notebooks or their pages."""
    return bool(re.search(r"def \w+\([^)]*\b(executed|html|site|watch)\b", (ROOT / file).read_text("utf8")))


@functools.cache
def takes_a_browser(file: str) -> bool:
    """Whether a test or fixture of this file, a path in the checkout, drives a page."""
    return bool(re.search(r"def \w+\([^)]*\b(browser|show|watch)\b", (ROOT / file).read_text("utf8")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:  # a file that was not seen to need the notebooks would execute them all once more
        if "executed" in getattr(item, "fixturenames", ()) and not needs_the_book(item.nodeid.partition("::")[0]):
            raise pytest.UsageError(f"{item.nodeid} takes the executed notebooks; needs_the_book overlooks that")
    if hasattr(config, "workerinput"):  # the longest unit first, so that the workers end together; then by browser

        def place(item: pytest.Item) -> tuple[bool, bool]:
            file = item.nodeid.partition("::")[0]
            return not needs_the_book(file), not takes_a_browser(file)

        items.sort(key=place)


def pytest_collection_finish() -> None:
    """What a test gives to ranks travels by value: no rank has to import pytest, a quarter of a second, to find it."""
    import cloudpickle

    for module in list(sys.modules.values()):
        if (getattr(module, "__file__", None) or "").startswith(f"{ROOT}/tests/"):
            cloudpickle.register_pickle_by_value(module)
    gc.freeze()  # what was collected stays to the end: no need to search it for garbage again and again
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        """Hands out whole files, and all files that need the book as one unit, in the order of collection."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "the book" if needs_the_book(file) else file

    config.option.loadscopereorder = False
    return Units(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has no terminal: what it had to say about the notebooks comes when it ends."""
    for line in getattr(node, "workeroutput", {}).get("notebooks", []):
        node.config.pluginmanager.getplugin("terminalreporter").write_line(line)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def executed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every notebook of the book, executed: the `Result` of each page, by its path in the checkout."""
    from ddplab.notebooks import execute_all

    if hasattr(request.config, "workeroutput"):
        say = request.config.workeroutput.setdefault("notebooks", []).append
    else:
        say = request.config.pluginmanager.getplugin("terminalreporter").write_line
    given = dict(item.split("=", 1) for item in request.config.getoption("given"))
    # The quick edition mostly waits, for paced links and for ranks that time out; the full one measures for the record.
    limit, at_once = (3600, 1) if given.get("QUICK") == "0" else (600, 3)
    say("\nexecuting the notebooks")
    results = execute_all(ROOT, given, limit, force=True, say=lambda line: say(line.split("\n")[0]), at_once=at_once)
    return {result.page: result for result in results}


@pytest.fixture(scope="session")
def html(executed: dict[str, Any]) -> Path:
    """The folder of the built pages."""
    from ddplab.stage import build_html

    failed = [result.page for result in executed.values() if result.error]
    if failed:
        pytest.fail(f"no book without its notebooks; these failed: {', '.join(failed)}")
    return build_html(ROOT).parent


def browser_path() -> str:
    """The path of a Chromium; without one the test is skipped, and on a CI machine it fails."""
    from ddplab.doctor import find_browser

    if path := find_browser():
        return path
    reason = "no Chromium: install it (apt-get install chromium-headless-shell) or put its path into CHROMIUM"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


_open: list[Any] = []  # playwright and the browser, while there is one


@pytest.fixture(scope="module")
def browser() -> Any:
    """A headless Chromium (playwright's sync API), the same for all files in a row that take one."""
    from playwright.sync_api import sync_playwright

    if not _open or not _open[1].is_connected():
        close_browser()
        path = browser_path()
        playwright = sync_playwright().start()
        flags = ["--no-sandbox", "--no-first-run", ALONE, *QUIET]
        _open.extend([playwright, playwright.chromium.launch(executable_path=path, args=flags)])
    return _open[1]


def close_browser() -> None:
    if _open:
        playwright, chromium = _open
        _open.clear()
        chromium.close()
        playwright.stop()


@pytest.fixture(scope="module", autouse=True)
def no_browser_beside_kernels(request: pytest.FixtureRequest) -> None:
    """The event loop of playwright would disturb the kernels of other files."""
    if not takes_a_browser(request.path.relative_to(ROOT).as_posix()):
        close_browser()


def pytest_sessionfinish() -> None:
    close_browser()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """A server on loopback for the files of a folder; gives its address, ends with the block."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="session")
def site(html: Path) -> Iterator[str]:
    """The address of a server on loopback that serves the built pages."""
    with serve(html) as address:
        yield address


class Watch:
    """A page whose console and requests are recorded: `problems` are errors and warnings, `outside` went elsewhere."""

    def __init__(self, context: Any, base: str) -> None:
        self.page, self.base = context.new_page(), base
        self.problems: list[str] = []
        self.outside: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(f"exception {error}"))
        self.page.on("console", self._console)
        self.page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type} {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.base, "data:", "blob:")):
            self.outside.append(request.url)

    def open(self, path: str) -> Any:
        self.page.goto(f"{self.base}/{path}", wait_until="load")
        return self.page


@pytest.fixture
def watch(browser: Any, site: str, html: Path) -> Iterator[Any]:
    """`watch("http")` or `watch("file", viewport=..., color_scheme=...)`: a watched page, nothing outside reachable."""
    contexts = []

    def make(scheme: str = "http", **options: Any) -> Watch:
        contexts.append(browser.new_context(**STILL | options))
        return Watch(contexts[-1], site if scheme == "http" else html.as_uri())

    yield make
    for context in contexts:
        context.close()


def a_page(*figures: Any, head: str = "") -> str:
    body = "\n".join(figure.html() for figure in figures)
    start = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return f'{start}<title>Figures</title><link rel="icon" href="data:,">{head}<body>{body}</body></html>'


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """`show(figure, ..., scheme="http" or "file", **browser options)`: a watched page with only these figures on it."""
    contexts = []
    with serve(tmp_path) as address:

        def make(*figures: Any, scheme: str = "http", head: str = "", **options: Any) -> Watch:
            (tmp_path / "figure.html").write_text(a_page(*figures, head=head), "utf-8")
            contexts.append(browser.new_context(**STILL | options))
            watched = Watch(contexts[-1], address if scheme == "http" else tmp_path.as_uri())
            watched.open("figure.html")
            return watched

        yield make
        for context in contexts:
            context.close()


@pytest.fixture
def notebook_file() -> Any:
    """`notebook_file(path, cells)` writes a small notebook; a cell is source, (tag, source) or ("markdown", text)."""
    import nbformat
    import nbformat.v4 as v4

    def write(path: Path, cells: list[Any], **metadata: Any) -> Path:
        made = []
        for cell in cells:
            tag, source = cell if isinstance(cell, tuple) else (None, cell)
            if tag == "markdown":
                made.append(v4.new_markdown_cell(source))
            else:
                made.append(v4.new_code_cell(source, metadata={"tags": [tag]} if tag else {}))
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nb = v4.new_notebook(cells=made, metadata=metadata or kernel)
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, path)
        return path

    return write

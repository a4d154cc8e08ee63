"""A real JupyterLab, started here and ended here: Run All, then mouse and arrow keys move figures and controls.

The last section of each lab runs in a copy that has only the cells which that section needs. One lab is driven in
every run of the tests, all of them with `make test ARGS=--every-lab`, which takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from conftest import ROOT, Watch

import ddplab as dl

NOTEBOOK = ["import ddplab as dl\ndl.RingStepper(4)", "dl.tree(4).figure()", "print('the end', 6 * 7)"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """Address, token and folder of a JupyterLab on a free loopback port that reads nobody's settings."""
    home = tmp_path_factory.mktemp("lab")
    token = secrets.token_hex(16)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "PYTEST"))}
    env |= {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    env |= {"JUPYTER_TOKEN": token, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(home / "ipython")}
    work = home / "work"
    work.mkdir()
    news = home / "config/lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false"}', "utf-8")
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.root_dir={work}"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", "--LabApp.extension_manager=readonly"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate"]
    server = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    said = []
    drain = threading.Thread(target=lambda: said.extend(server.stderr), daemon=True)  # a full pipe would stop it
    try:
        for line in server.stderr:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail(f"JupyterLab ended before it listened:\n{''.join(said)}")
        drain.start()
        yield found[0], token, work
    finally:
        kernels = psutil.Process(server.pid).children(recursive=True)
        server.kill()  # asked to end, it takes ten seconds; a kernel whose server is gone ends by itself
        server.wait()
        assert psutil.wait_procs(kernels, timeout=20)[1] == []
        if drain.ident:
            drain.join(20)  # the last process that could write has ended
        server.stderr.close()


@pytest.fixture(scope="module")
def window(browser: Any) -> Iterator[Any]:
    """One browser context for all: JupyterLab's own files, 10 MB, are fetched and compiled once."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(120_000)  # a busy machine takes long to load JupyterLab; a quick one does not wait
    yield context
    context.close()


def slider_text(page: Any, figure: int) -> str:
    return page.locator(".jp-OutputArea-output .ddp-slider").nth(figure).get_attribute("aria-valuetext")


def run_all(window: Any, lab: tuple[str, str, Path], name: str) -> tuple[Watch, Any]:
    """Open a notebook of the lab's folder and choose Run All; the watched page, and the page."""
    address, token, _ = lab
    watched = Watch(window, address)
    page = watched.open(f"lab/tree/{name}?token={token}&reset")  # without the tabs of earlier tests
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    # asked to run before its kernel is there, JupyterLab opens a dialog
    page.get_by_text("(ipykernel) | Idle").wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    return watched, page


def test_run_all_then_mouse_and_arrow_keys(window: Any, lab: tuple[str, str, Path], notebook_file: Any) -> None:
    _, _, work = lab
    notebook_file(work / "live.ipynb", NOTEBOOK)
    watched, page = run_all(window, lab, "live.ipynb")
    page.get_by_text("the end 42", exact=True).wait_for()
    page.locator(".ddp-slider").nth(1).wait_for()
    assert [slider_text(page, i) for i in (0, 1)] == ["step 0 of 6, start", "step 0 of 4, start"]

    active = "[...document.querySelectorAll('.jp-Notebook .jp-Cell')].findIndex(c => c.matches('.jp-mod-active'))"
    for figure, last in ((0, 6), (1, 4)):
        box = page.locator(".jp-OutputArea-output .ddplab-figure").nth(figure)
        box.get_by_role("button", name="One step forward").click()
        assert slider_text(page, figure).startswith("step 1 of")
        slider = box.locator(".ddp-slider")
        slider.focus()
        selected = page.evaluate(active)
        for key, expected in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", last), ("Home", 0)):
            page.keyboard.press(key)
            assert slider_text(page, figure).startswith(f"step {expected} of {last}"), key
        assert page.evaluate(active) == selected  # the keys were the figure's, not the notebook's
        play = box.get_by_role("button", name="Play")
        play.focus()
        page.keyboard.press(" ")
        page.wait_for_function("i => +document.querySelectorAll('.ddp-slider')[i].value >= 1", arg=figure)
        box.get_by_role("button", name="Pause").click()

    choice = page.locator(".ddplab-figure").first
    choice.get_by_role("button", name="gloo").click()
    choice.get_by_label("Ranks", exact=True).select_option("8")
    assert choice.locator(".ddp-who").count() == 8
    assert [line for line in watched.problems if "exception" in line] == []
    assert watched.outside == []

    # saved and opened again, the figure is alive without running anything
    page.get_by_role("menuitem", name="File", exact=True).click()
    page.locator(".lm-Menu-item[data-command='docmanager:save']").click()
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
    saved = json.loads((work / "live.ipynb").read_text("utf-8"))
    assert saved["cells"][0]["outputs"][0]["data"].keys() == {"text/html", "image/svg+xml", "text/plain"}
    page = watched.open("lab/tree/live.ipynb?reset")
    page.locator(".ddp-slider").first.wait_for()
    page.locator(".ddplab-figure").first.get_by_role("button", name="One step forward").click()
    assert slider_text(page, 0).startswith("step 1 of 6")
    page.close()


# lab -> the control that is moved between two runs, and how: a key for a slider, a value for a menu
MOVES = {
    "01": ("hosts", "ArrowLeft"),
    "02": ("ranks", "ArrowLeft"),
    "03": ("bucket cap mb", "ArrowLeft"),
    "04": ("bucket KiB", "ArrowRight"),
    "05": ("every", "ArrowRight"),
    "06": ("delay ms", "ArrowLeft"),
    "07": ("megabytes", "ArrowLeft"),
    "08": ("rank", "ArrowRight"),
    "09": ("ranks per host", "ArrowLeft"),
    "10": ("hook", "1-bit"),
    "11": ("method", "fp16"),
}
NEED_HOSTS = {"01", "02", "07", "09", "10", "11"}
LABS = {path.stem[:2]: path for path in sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))}


def trimmed(number: str, work: Path) -> str:
    """Write the copy of a lab: parameters, imports, what its last section needs, and that section. Its file's name."""
    nb, seen = nbformat.read(LABS[number], 4), 0
    kept = []
    for cell in nb.cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "code" and (seen < 2 or "controls" in tags):
            kept.append(cell)
        seen += cell.cell_type == "code"
    nb.cells = kept
    for name in ("data", "results"):
        if not (work / name).exists():
            (work / name).symlink_to(ROOT / "labs" / name)
    nbformat.write(nb, work / LABS[number].name)
    return LABS[number].name


def test_every_lab_has_controls() -> None:
    assert LABS.keys() == MOVES.keys()
    for path in LABS.values():
        cells = [c for c in nbformat.read(path, 4).cells if "controls" in c.metadata.get("tags", [])]
        assert "dl.controls(" in cells[-1].source, path.name


@pytest.mark.parametrize("number", MOVES)
def test_a_moved_control_changes_the_picture(
    window: Any, lab: tuple[str, str, Path], number: str, request: pytest.FixtureRequest
) -> None:
    if number != "02" and not request.config.getoption("every_lab"):
        pytest.skip("one lab stands for all; make test ARGS=--every-lab drives each")
    problem = dl.hosts_problem() if number in NEED_HOSTS else None
    watched, page = run_all(window, lab, trimmed(number, lab[2]))
    button = page.get_by_role("button", name="measure")
    button.wait_for()
    box, said = page.locator(".widget-vbox").last, page.locator(".widget-html span[role]")
    assert said.inner_text().startswith("will run: ")
    screen = page.locator(".jp-Notebook .jp-CodeCell").last.locator(".widget-output").last

    def run(count: int) -> str:
        button.click()
        page.wait_for_function(
            """count => (s => s.role === "alert" || s.innerText.startsWith(`run ${count}: `))(
                document.querySelector(".widget-html span[role]"))""",
            arg=count,
        )
        button.and_(page.locator(":enabled")).wait_for()
        return said.inner_text()

    first = run(1)
    if problem and not first.startswith("run 1: "):  # with enough GPUs a lab may need no hosts
        assert problem in first
    else:
        assert first.startswith("run 1: "), first
        screen.locator("table").wait_for()
        before, picture = screen.inner_text(), screen.locator("img").first
        still = picture.get_attribute("src") if picture.count() else None
        name, how = MOVES[number]
        control = box.locator(".widget-slider, .widget-dropdown").filter(has=page.get_by_text(name, exact=True))
        if how.startswith("Arrow"):
            control.locator(".noUi-handle").press(how)
        else:
            control.get_by_label(name, exact=True).select_option(how)
        page.wait_for_function("document.querySelector('.widget-html span[role]').innerText.startsWith('will run')")
        assert said.inner_text() != f"will run: {first.split(': ', 1)[1]}"
        second = run(2)
        assert second.startswith("run 2: ") and second.split("(")[1] != first.split("(")[1], (first, second)
        page.wait_for_function("([e, t]) => e.innerText !== t", arg=[screen.element_handle(), before])
        if still:
            assert screen.locator("img").first.get_attribute("src") != still
        print(f"lab {number}", first, second, sep="\n  ")
    assert "Traceback" not in page.locator(".jp-Notebook").inner_text()
    assert [line for line in watched.problems if "exception" in line] == []
    assert watched.outside == []
    page.close()

"""What this machine can run, and what is in the way: the facts behind `ddplab doctor`.

`examine()` collects facts, `findings(facts)` judges them, `text(facts)` lays them out in 80 columns. torch is asked in
a process of its own: a broken build, a driver that hangs or a CUDA context then cannot hurt the caller, such as a
notebook.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import textwrap
from pathlib import Path

from ddplab import __version__
from ddplab._torch_probe import finish, start

PACKAGES = ("torch", "numpy", "pandas", "jupyter-book", "papermill", "jupyterlab", "pyroute2")
BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
OLDEST_TORCH = (2, 9)
MOST_RANKS = 16  # what the executor is tested with
# A forked rank has 60 MiB of its own (measured, torch 2.14 on Linux); the rest is five copies of a 64 MiB tensor, which
# is what a benchmark of that size holds at once.
RANK_BYTES = 400 * 2**20


def examine(attempt: bool = True) -> dict:
    """Facts about this machine as plain data (JSON-ready; bytes and seconds in the names, None for unknown).

    With `attempt`, two ranks really sum a tensor on every backend that is present, which takes a few seconds.
    """
    probe = start(attempt)
    facts = {
        "ddplab": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "versions": {name: _version(name) for name in PACKAGES},
        **_memory(),
        "hosts_problem": _hosts_problem(),
        "chromium": find_browser(),
        "make": shutil.which("make"),
        "gpu_devices": len(list(Path("/dev").glob("nvidia[0-9]*"))),
    }
    facts |= finish(probe)
    gpus = len(facts["gpus"])
    by_memory = facts["memory_available_bytes"] // RANK_BYTES if facts["memory_available_bytes"] else MOST_RANKS
    works = {name: backend["available"] and not backend["problem"] for name, backend in facts["backends"].items()}
    facts["ranks"] = {
        "gloo": min(MOST_RANKS, max(1, by_memory)) if works["gloo"] else 0,
        "nccl": gpus if works["nccl"] else 0,
        "with_own_core": facts["cores"],
    }
    facts["findings"] = findings(facts)
    return facts


def findings(facts: dict) -> list[dict]:
    """What is missing (the labs do not run without it) or limited (they run, with less), each with its remedy."""
    found: list[dict] = []

    def add(level: str, what: str, remedy: str) -> None:
        found.append({"level": level, "what": what, "remedy": remedy})

    versions, backends = facts["versions"], facts["backends"]
    if facts["torch_problem"]:
        add("missing", f"torch does not work: {facts['torch_problem']}", "pip install torch")
    elif _numbers(versions["torch"]) < OLDEST_TORCH:
        add("missing", f"torch {versions['torch']} is too old", "pip install 'torch>=2.9'")
    for name, backend in backends.items():
        if backend["problem"]:
            add("missing", f"{name} does not work: {backend['problem']}", "see the message; the rest may still run")
    if not facts["torch_problem"] and not backends["gloo"]["available"]:
        add("missing", "this build of torch has no gloo", "install a build of torch with distributed support")
    if facts["gpu_devices"] > len(facts["gpus"]):
        what = f"{facts['gpu_devices']} NVIDIA GPUs are here, but torch sees {len(facts['gpus'])}"
        add("limited", what, "install a CUDA build of torch that fits the driver, and check CUDA_VISIBLE_DEVICES")
    book = versions["jupyter-book"]
    if book is None or _numbers(book) >= (2,):
        what = f"jupyter-book {book} is another program" if book else "jupyter-book is not installed"
        add("limited", what + "; the book cannot be built", "pip install 'jupyter-book<2'")
    if facts["hosts_problem"]:
        add("limited", facts["hosts_problem"], "see there; measurements over shaped links are left out until then")
    if not facts["chromium"]:
        add("limited", "no Chromium was found; the browser tests cannot run", "install your system's chromium package")
    if not facts["make"]:
        add("limited", "no make was found", "install make, or use 'ddplab book'")
    if facts["ranks"]["gloo"] == 1 and not backends["gloo"]["problem"]:
        add("limited", "memory for one rank only", "close other programs, or use smaller sizes")
    return found


def text(facts: dict) -> str:
    """The facts for a reader, at most 80 columns wide."""
    ranks, gpus, gib = facts["ranks"], facts["gpus"], 2**30
    total, free = facts["memory_total_bytes"], facts["memory_available_bytes"]
    names = {name: sum(gpu["name"] == name for gpu in gpus) for name in dict.fromkeys(gpu["name"] for gpu in gpus)}
    rows = {
        "ddplab": facts["ddplab"],
        "python": facts["python"],
        **{name: version or "not installed" for name, version in facts["versions"].items()},
        "torch": f"{facts['versions']['torch'] or 'not installed'} ({facts['torch_build'] or 'does not work'})",
        "system": facts["platform"],
        "cores": str(facts["cores"]),
        "memory": f"{free / gib:.1f} of {total / gib:.1f} GiB free" if total and free else "unknown",
        "GPUs": ", ".join(f"{count} x {name}" for name, count in names.items()) or "none",
        "gloo": _state(facts["backends"]["gloo"]),
        "NCCL": _state(facts["backends"]["nccl"]),
        "ranks that fit": f"{ranks['gloo']} with gloo on CPU, {ranks['nccl']} with NCCL (one a GPU); "
        f"{ranks['with_own_core']} get a core of their own",
        "4 ranks use": facts["auto"] or "unknown",
        "emulated hosts": "not possible here, see below" if facts["hosts_problem"] else "possible",
        "chromium": facts["chromium"] or "not found",
    }
    lines = [
        textwrap.fill(f"{name:<16}{value}", 80, subsequent_indent=" " * 16, break_long_words=False)
        for name, value in rows.items()
    ]
    for finding in facts["findings"]:
        body = f"{finding['level']}: {finding['what']}. Remedy: {finding['remedy']}"
        lines += ["", textwrap.fill(body, 80, subsequent_indent="  ", break_long_words=False)]
    verdict = (
        "Something is missing." if any(f["level"] == "missing" for f in facts["findings"]) else "The labs run here."
    )
    return "\n".join([*lines, "", verdict])


def _state(backend: dict) -> str:
    if not backend["available"]:
        return "not in this build of torch"
    name = f"{backend['version']}: " if backend["version"] else ""
    if backend["problem"]:
        return f"{name}does not work, see below"
    if backend["seconds"] is None:
        return f"{name}present, not tried" + " (it takes a GPU a rank)" * (backend["version"] is not None)
    return f"{name}works: 2 ranks summed a tensor (tried now; {backend['seconds']:.1f} s with their start)"


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", (version or "0").split("+")[0])[:2])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> dict:
    """Total and available bytes; a container's own limit counts where it is smaller."""
    total = available = None
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, available = min(total, limit), min(available, max(0, limit - used))
    except (OSError, ValueError, KeyError):  # not Linux, no limit ("max"), or another cgroup version
        if total is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"memory_total_bytes": total, "memory_available_bytes": available}


def _hosts_problem() -> str | None:
    try:
        from ddplab.hosts import hosts_problem
    except ImportError as error:
        return f"{error}; install the requirements of ddplab"
    return hosts_problem()


def find_browser() -> str | None:
    """The path of a Chromium for the tests: the variable CHROMIUM, else what is installed; None without one.

    Debian's chromium-headless-shell comes first: the same engine without windows, which opens a page in a third of
    the processor's time.
    """
    own = os.environ.get("CHROMIUM")
    return next(filter(None, map(shutil.which, ((own,) if own else ()) + BROWSERS)), None)

"""The doctor: facts against what the system itself says, verdicts on machines that are described, not owned."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddplab import _torch_probe, doctor
from ddplab.cli import main

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def facts() -> dict:
    """This machine, examined once, two real ranks included, through the command line."""
    done = subprocess.run(
        [sys.executable, "-m", "ddplab", "doctor", "--json"], capture_output=True, text=True, timeout=200, cwd=ROOT
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert done.returncode == any(finding["level"] == "missing" for finding in found["findings"])
    return found


@pytest.fixture
def healthy() -> dict:
    """A workstation with two GPUs where everything is in order."""
    backend = {"available": True, "version": None, "problem": None, "seconds": 0.3}
    return {
        "ddplab": "0.1.0",
        "python": "3.11.2",
        "platform": "Linux-6.1-x86_64",
        "cores": 16,
        "versions": {name: "2.14.1" for name in doctor.PACKAGES} | {"jupyter-book": "1.0.4"},
        "memory_total_bytes": 64 * 2**30,
        "memory_available_bytes": 60 * 2**30,
        "hosts_problem": None,
        "chromium": "/usr/bin/chromium",
        "make": "/usr/bin/make",
        "torch_problem": None,
        "torch_build": "CUDA 13.0",
        "gpu_devices": 2,
        "gpus": [{"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 80 * 2**30}] * 2,
        "auto": "gloo on cpu",
        "backends": {"gloo": dict(backend), "nccl": backend | {"version": "2.27.5"}},
        "ranks": {"gloo": 16, "nccl": 2, "with_own_core": 16},
        "findings": [],
    }


def test_facts_of_this_machine_match_the_system(facts):
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    names = (os.environ.get("CHROMIUM", ""), "chromium-headless-shell", "chromium")
    assert facts["chromium"] == next(filter(None, map(shutil.which, names)), facts["chromium"])
    page = os.sysconf("SC_PAGE_SIZE")
    assert facts["memory_total_bytes"] <= os.sysconf("SC_PHYS_PAGES") * page
    assert 0 < facts["memory_available_bytes"] <= facts["memory_total_bytes"]


def test_the_browser_is_the_quickest_that_is_there_or_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    assert doctor.find_browser() is None
    for name in ("google-chrome", "chromium", "chromium-headless-shell"):
        (tmp_path / name).touch(0o755)
        assert doctor.find_browser() == str(tmp_path / name)
    (tmp_path / "mine").touch(0o755)
    monkeypatch.setenv("CHROMIUM", str(tmp_path / "mine"))
    assert doctor.find_browser() == str(tmp_path / "mine")


def test_two_ranks_really_met_on_gloo(facts):
    gloo = facts["backends"]["gloo"]
    assert gloo["available"] and gloo["problem"] is None and gloo["seconds"] > 0
    assert facts["ranks"]["gloo"] >= 2


def test_gpus_and_hosts_are_what_torch_and_the_kernel_say(facts):
    import torch

    from ddplab.hosts import hosts_problem

    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert bool(facts["hosts_problem"]) == bool(hosts_problem())


def test_a_healthy_machine_has_no_findings(healthy):
    assert doctor.findings(healthy) == []
    text = doctor.text(healthy)
    assert "2 x NVIDIA A100" in text and "2.27.5: works: 2 ranks" in text and text.endswith("The labs run here.")


BROKEN = {
    "no torch": (
        {"torch_problem": "No module named 'torch'"},
        "missing",
        "torch does not work: No module named 'torch'",
    ),
    "old torch": ({"versions.torch": "2.8.0+cpu"}, "missing", "torch 2.8.0+cpu is too old"),
    "gloo fails": ({"backends.gloo.problem": "rank 1 was killed"}, "missing", "gloo does not work: rank 1 was killed"),
    "no gloo": ({"backends.gloo.available": False}, "missing", "has no gloo"),
    "jupyter-book 2": ({"versions.jupyter-book": "2.0.1"}, "limited", "jupyter-book 2.0.1 is another program"),
    "no jupyter-book": ({"versions.jupyter-book": None}, "limited", "jupyter-book is not installed"),
    "no hosts": ({"hosts_problem": "AppArmor forbids it; run sysctl -w x=0"}, "limited", "AppArmor forbids it"),
    "CPU build beside GPUs": ({"gpus": []}, "limited", "2 NVIDIA GPUs are here, but torch sees 0"),
    "no chromium": ({"chromium": None}, "limited", "no Chromium"),
    "no make": ({"make": None}, "limited", "no make"),
    "little memory": ({"ranks.gloo": 1}, "limited", "memory for one rank only"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_defect_is_found_alone_with_a_remedy(healthy, case):
    changes, level, what = BROKEN[case]
    machine = copy.deepcopy(healthy)
    for place, value in changes.items():
        *path, last = place.split(".") if not place.startswith("versions") else place.split(".", 1)
        target = machine
        for key in path:
            target = target[key]
        target[last] = value
    (finding,) = doctor.findings(machine)
    assert finding["level"] == level and what in finding["what"] and finding["remedy"]
    machine["findings"] = [finding]
    text = doctor.text(machine)
    assert max(map(len, text.splitlines())) <= 80
    assert text.endswith("Something is missing." if level == "missing" else "The labs run here.")
    if changes.get("hosts_problem"):
        assert "sysctl -w x=0" in text


def test_exit_codes(healthy, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda attempt: healthy)
    assert main(["doctor"]) == 0
    healthy["findings"] = [{"level": "limited", "what": "no make was found", "remedy": "install make"}]
    assert main(["doctor"]) == 0
    assert main(["doctor", "--strict"]) == 1
    healthy["findings"][0]["level"] = "missing"
    assert main(["doctor", "--json"]) == 1
    assert "\033" not in capsys.readouterr().out


@pytest.mark.parametrize(("line", "says"), [("", "trying each backend with two ranks"), ("--no-try", "sees ...")])
def test_a_terminal_is_told_at_once_that_it_takes_a_while(healthy, monkeypatch, capsys, line, says):
    seen = []
    monkeypatch.setattr(doctor, "examine", lambda attempt: seen.append(capsys.readouterr().err) or healthy)
    assert main(["doctor", *line.split()]) == 0
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["doctor", *line.split()]) == 0
    quiet, told = seen
    assert quiet == "" and says in told and told.count("\n") == 1
    assert capsys.readouterr().err == ""


def test_a_torch_that_cannot_be_imported_is_reported_not_raised(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = _torch_probe.finish(_torch_probe.start(attempt=False))
    assert found["torch_problem"] == "ImportError: libcudart.so.13: cannot open shared object file"
    assert found["backends"]["gloo"]["available"] is False


def test_a_torch_that_hangs_is_given_up(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(_torch_probe, "_PROBE_SECONDS", 1)
    probe = _torch_probe.start(attempt=False)
    assert "did not answer within 1 s" in _torch_probe.finish(probe)["torch_problem"]
    assert probe.poll() is not None


def test_doctor_module_loads_no_torch():
    code = "import sys, ddplab.doctor; assert not {'torch', 'pandas', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

"""What torch says about this machine, asked in a process of its own.

A build that does not import, a driver that hangs, a crash and a CUDA context stay in that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

_PROBE_SECONDS = 120


def start(attempt: bool) -> subprocess.Popen:
    """Start the process that asks torch; `attempt` lets two ranks meet on every backend that is present."""
    code = f"from ddplab._torch_probe import answer; answer({attempt})"
    home = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        errors="replace",
    )


def finish(probe: subprocess.Popen) -> dict:
    """Its answer; where there is none, the reason as `torch_problem` (one line), and everything else unknown."""
    try:
        out, err = probe.communicate(timeout=_PROBE_SECONDS)
        return json.loads(out.splitlines()[-1])
    except subprocess.TimeoutExpired:
        problem = f"it did not answer within {_PROBE_SECONDS} s (a GPU driver that hangs?)"
    except (IndexError, ValueError):
        last = err.strip().splitlines()
        problem = last[-1] if last else f"its process ended with code {probe.returncode}"
    finally:
        if probe.poll() is None:
            probe.kill()
            probe.wait()
    absent: dict = {"available": False, "version": None, "problem": None, "seconds": None}
    return {
        "torch_problem": problem,
        "torch_build": None,
        "gpus": [],
        "auto": None,
        "backends": {"gloo": absent, "nccl": dict(absent)},
    }


def answer(attempt: bool) -> None:
    """Print, as one line of JSON, what torch says about this machine."""
    import torch
    import torch.distributed as dist

    from ddplab.launch import resolve_backend

    present = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
    }
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if present["nccl"] else None
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    able = {"gloo": True, "nccl": len(gpus) >= 2}
    backends = {}
    for name in present:
        problem = seconds = None
        if attempt and present[name] and able[name]:
            problem, seconds = _attempt("cuda" if name == "nccl" else "cpu")
        backends[name] = {
            "available": present[name],
            "version": nccl if name == "nccl" else None,
            "problem": problem,
            "seconds": seconds,
        }
    facts = {
        "torch_problem": None,
        "torch_build": _build(torch.version),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "auto": " on ".join(resolve_backend(4)),
        "backends": backends,
    }
    print(json.dumps(facts))


def _build(version) -> str:
    if version.hip:
        return f"ROCm {version.hip}"
    return f"CUDA {version.cuda}" if version.cuda else "CPU only"


def _attempt(device: str) -> tuple[str | None, float | None]:
    from ddplab.launch import launch

    start = time.perf_counter()
    try:
        sums = launch(_sum_of_ranks, device, ranks=2, device=device, show=False, timeout=60)
    except Exception as error:  # whatever it is, the reader wants to know it, and the other facts too
        return str(error).strip().splitlines()[0], None
    if sums != [3.0, 3.0]:
        return f"1 + 2 came out as {sums}", None
    return None, time.perf_counter() - start


def _sum_of_ranks(device: str) -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(value)
    return value.item()

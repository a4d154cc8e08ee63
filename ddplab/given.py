"""Parameters given to all notebooks at once, `RANKS=8 DEVICE=cuda`: checked before anything runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddplab.pages import PageError, convert, pages, parameters, read

_ASK_TORCH = "import torch; print(torch.__version__, torch.version.cuda or torch.version.hip or '')"


def values_for(root: Path, given: Mapping[str, str]) -> dict[Path, dict[str, Any]]:
    """For each notebook of `_toc.yml` the values to inject: those it has a parameter for, where they change something.

    `given` maps names to text, as on a command line. RANKS=auto is one rank a GPU where torch sees two or more, and
    each notebook's own default elsewhere. PageError for a name that no notebook has, a value of another kind, and
    DEVICE=cuda where torch sees no GPU.
    """
    known = {p: parameters(nb, p.relative_to(root).as_posix()) for p in pages(root) if (nb := read(p)) is not None}
    for name in given:
        if not any(name in names for names in known.values()):
            have = "; ".join(f"{p.relative_to(root)} has {', '.join(names) or 'none'}" for p, names in known.items())
            raise PageError(f"no notebook has a parameter {name}: {have}")
    given = _settled(dict(given))
    values = {}
    for path, defaults in known.items():
        page = path.relative_to(root).as_posix()
        mine = {name: convert(page, name, text, defaults[name]) for name, text in given.items() if name in defaults}
        values[path] = {name: value for name, value in mine.items() if value != defaults[name]}
    return values


def _settled(given: dict[str, str]) -> dict[str, str]:
    device, ranks = given.get("DEVICE", "auto"), given.get("RANKS")
    if device not in ("auto", "cpu", "cuda"):
        raise PageError(f"DEVICE is auto, cpu or cuda, not {device!r}")
    if device != "cuda" and ranks != "auto":
        return given
    from ddplab.launch import gpu_count

    gpus = 0 if device == "cpu" else gpu_count()
    if device == "cuda" and gpus == 0:
        raise PageError(f"DEVICE=cuda, but {_no_gpu()}. Use DEVICE=auto, which takes GPUs where there are any")
    if ranks == "auto":
        del given["RANKS"]
        if gpus > 1:
            given["RANKS"] = str(gpus)
    return given


def _no_gpu() -> str:
    """Why torch sees no GPU."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return "this machine has no NVIDIA GPU, or its driver is not loaded"
    asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True)
    version, _, build = asked.stdout.strip().partition(" ")
    if asked.returncode == 0 and not build:
        return f"torch {version} is a build without CUDA"
    return "torch sees no GPU: look at nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the driver fits torch's CUDA"

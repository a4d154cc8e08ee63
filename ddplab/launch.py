"""Run a function on N ranks from a script or a notebook cell, and get its results back.

    def mean_rank():
        import torch, torch.distributed as dist
        t = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(t)
        return t.item() / dist.get_world_size()

    launch(mean_rank, ranks=4)      # [1.5, 1.5, 1.5, 1.5]

The function travels by value, so it may be defined in a cell, be a lambda or close over local variables. The ranks
are forked from a warm process that has torch loaded (`_forkserver.py`), watched by a supervisor (`_supervisor.py`) and
leave nothing behind. They meet at a file without a name and talk over loopback, or over the links of emulated hosts.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplab import _rank
from ddplab._forkserver import fork_server

if TYPE_CHECKING:
    from ddplab.hosts import Hosts


class RankError(RuntimeError):
    """A rank failed. `.rank` is the one that failed first (None where it cannot be told), `.traceback` its traceback
    (or the stacks of ranks that hang), `.consequences` one line for each other rank that failed because of it."""

    def __init__(self, message: str, rank: int | None, traceback: str = "", consequences: list[str] | None = None):
        super().__init__(message)
        self.rank, self.traceback, self.consequences = rank, traceback, consequences or []


def gpu_count(env: Mapping[str, str] = os.environ) -> int:
    """How many GPUs the ranks would see, found without creating a CUDA context (and without torch if none is here)."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    import torch

    count = torch.cuda.device_count()  # asks NVML
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible != os.environ.get("CUDA_VISIBLE_DEVICES"):
        count = len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return count


def resolve_backend(ranks: int, device: str = "auto") -> tuple[str, str]:
    """The backend and the device that `launch(ranks=ranks, device=device)` uses.

    ("nccl", "cuda") with one GPU a rank where there are enough GPUs; ("gloo", "cuda") where there are GPUs but not
    enough (gloo stages the tensors through host memory, ranks share GPUs); ("gloo", "cpu") otherwise and for "cpu".
    ValueError for another device, and for "cuda" where there is no GPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f'device is "auto", "cpu" or "cuda", not {device!r}')
    gpus = 0 if device == "cpu" else gpu_count()
    if device == "cuda" and gpus == 0:
        raise ValueError('device="cuda", but no GPU is visible here; device="auto" falls back to the CPU')
    if gpus == 0:
        return "gloo", "cpu"
    return ("nccl" if gpus >= ranks else "gloo"), "cuda"


def launch(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 4,
    hosts: Hosts | None = None,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    device: str = "auto",
    show: bool = True,
    seed: int = 0,
) -> list[Any]:
    """Run `fn(*args)` on `ranks` processes and return their results in rank order."""
    if _rank._current is not None:
        raise RuntimeError(f"launch was called inside rank {_rank._current}: a rank cannot launch ranks of its own")
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is the number of processes, at least 1, not {ranks!r}")
    backend, _ = ("gloo", "cpu") if hosts is not None else resolve_backend(ranks, device)
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "e0" if hosts is not None else "lo", **(env or {})}
    import cloudpickle

    request = {
        "ranks": ranks,
        "timeout": timeout,
        "env": environ,
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "sources": {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None},
        "call": cloudpickle.dumps((fn, args)),
        "backend": backend,
        "hosts": [hosts.namespaces(r) for r in range(ranks)] if hosts is not None else None,
        "seed": seed,
    }
    outcome, reports = _converse(pickle.dumps(request))
    if show:
        _show(reports)
    if outcome != "returned":
        raise _error(outcome, reports, timeout)
    return [pickle.loads(report["value"]) for report in reports]


def _converse(request: bytes) -> tuple[str, list[dict[str, Any]]]:
    """Hand the request to a fresh supervisor and wait for the outcome; on Ctrl-C wait until all ranks are gone."""
    conn = fork_server().connect()
    try:
        conn.send_bytes(request)
        return pickle.loads(conn.recv_bytes())
    except BaseException:
        try:
            conn.send_bytes(b"stop")
            if conn.poll(5):
                conn.recv_bytes()
        except (OSError, EOFError):
            pass
        raise
    finally:
        conn.close()


def _show(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        for line in report["output"].splitlines():
            print(f"[{report['rank']}] {line}")


def _error(outcome: str, reports: list[dict[str, Any]], timeout: float) -> RankError:
    if outcome == "timeout":
        pending = [r for r in reports if r["state"] in ("starting", "running")]
        stacks = "\n".join(f"--- rank {r['rank']} ({r['state']})\n{r['stack']}" for r in pending)
        names = ", ".join(str(r["rank"]) for r in pending)
        return RankError(f"no answer in {timeout:g} s from rank {names}:\n{stacks}", None, stacks)
    failed = [r for r in reports if r["state"] in ("failed", "died")]
    first = min(failed, key=lambda r: (bool(r["failure"].get("secondary")), r["time"]))
    others = [f"rank {r['rank']}: {_summary(r)}" for r in failed if r is not first]
    text = first["failure"].get("traceback", "")
    listed = "\nIn consequence:\n" + "\n".join(f"  {line}" for line in others) if others else ""
    return RankError(f"rank {first['rank']}: {_summary(first)}\n{text}{listed}", first["rank"], text, others)


def _summary(report: dict[str, Any]) -> str:
    if report["state"] == "died":
        return f"died without a word (exit code {report['status']})"
    return report["failure"]["summary"]

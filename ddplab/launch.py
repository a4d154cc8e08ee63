"""Run a function on N ranks from a script or a notebook cell, and get its results back.

    def mean_rank():
        import torch, torch.distributed as dist
        t = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(t)
        return t.item() / dist.get_world_size()

    launch(mean_rank, ranks=4)      # [1.5, 1.5, 1.5, 1.5]

The function travels by value, so it may be defined in a cell, be a lambda or close over local variables. The ranks
are forked from a warm process that has torch loaded (`_forkserver.py`), watched by a supervisor (`_supervisor.py`),
and leave nothing behind. They meet at a file without a name and talk over loopback, or over the links of emulated
hosts. In a job started by torchrun the same call joins that job instead.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplab import _report
from ddplab._forkserver import fork_server
from ddplab._pickling import pack
from ddplab._rank import join_job
from ddplab._report import RankError

if TYPE_CHECKING:
    from ddplab.hosts import Hosts

__all__ = ["RankError", "launch", "resolve_backend"]

_MOST_RANKS = 256
_STOP_S = 5.0
# A call that names one of these imports torch._dynamo, for seconds: once in the fork server rather than in every rank.
_TRAINS = re.compile(
    rb"DistributedDataParallel|OneBitAdam|\boptim\b|ddplab\.(_schemes|strategyruns|compare|ddp_checks|measured)\b"
)


def launch(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int | None = None,
    hosts: Hosts | None = None,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    device: str = "auto",
    show: bool = True,
    seed: int = 0,
    realtime: bool = False,
) -> list[Any]:
    """Run `fn(*args)` on every rank and return the results in rank order.

    Inside, `torch.distributed` is initialised, torch uses one thread, and torch, numpy and random are seeded with
    seed + rank. RANK, LOCAL_RANK and WORLD_SIZE are set. More ranks than processors are scheduled as batch jobs
    (SCHED_BATCH): who wakes up does not interrupt who computes.

    ranks: processes; 4, or as many as `hosts` has places for.
    hosts: run rank r on emulated host r // hosts.ranks_per_host instead of on this machine's loopback.
    timeout: seconds until a launch that hangs ends with each rank's Python stack.
    env: environment variables for the ranks, over those of this process at this moment. (What the fork server's torch
        read when it was loaded, such as OMP_NUM_THREADS and TORCH_LOGS, no longer changes.)
    device: see `resolve_backend`.  show: print what the ranks print, as "[rank] line", the first and last 8 kB each.
    realtime: schedule the ranks before everything else on this machine (SCHED_RR; root only, for benchmarks).

    Raises RankError if a rank raises, dies or does not answer in time; TypeError if `fn` or an argument cannot be
    sent; ValueError for numbers that make no sense; RuntimeError inside a rank, which cannot launch ranks of its own.
    """
    if "DDPLAB_RANK" in os.environ:
        raise RuntimeError(f"launch was called inside rank {os.environ['DDPLAB_RANK']}: a rank cannot launch ranks")
    if not callable(fn):
        raise TypeError(f"launch takes a function and its arguments, not {fn!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout is a positive number of seconds, not {timeout!r}")
    if hosts is not None and not hasattr(hosts, "namespaces"):
        raise TypeError(f"hosts is a ddplab.Hosts that is up, not {hosts!r}")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if hosts is not None:
            raise ValueError("this process belongs to a torchrun job, whose ranks cannot move to emulated hosts")
        return join_job(fn, args, timeout, {**(env or {})}, device, seed)
    ranks = count_ranks(ranks, hosts)
    if realtime and os.geteuid() != 0:
        raise PermissionError("realtime=True needs root: only root may schedule before everything else")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed is a whole number, not {seed!r}")
    backend, device = resolve_backend(ranks, "cpu" if hosts is not None and device == "auto" else device)
    if hosts is not None:
        backend = "gloo"  # NCCL would go round the links, through the machine's memory
    request = {
        "ranks": ranks,
        "timeout": timeout,
        "env": _environment(hosts, backend, env or {}),
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "sources": {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None},
        "call": pack(fn, args),
        "backend": backend,
        "device": device,
        "hosts": [hosts.namespaces(r) for r in range(ranks)] if hosts is not None else None,
        "seed": seed,
        "realtime": realtime,
    }
    if _TRAINS.search(request["call"]):
        fork_server().preload_dynamo()
    outcome, reports = _converse(pickle.dumps(request), show)
    if outcome == "interrupted":  # raised here, where the traceback is the caller's and one line of ours
        raise KeyboardInterrupt("the launch was interrupted, and its ranks were ended")
    if outcome == "failed":
        raise _report.failure(reports)
    if outcome == "timeout":
        raise _report.hang(reports, timeout)
    if any(report["dynamo"] for report in reports):
        fork_server().preload_dynamo()
    return [pickle.loads(report["value"]) for report in reports]


def resolve_backend(ranks: int, device: str = "auto") -> tuple[str, str]:
    """The backend and the device that `launch(ranks=ranks, device=device)` uses.

    ("nccl", "cuda") with one GPU a rank where there are enough GPUs; ("gloo", "cuda") where there are GPUs but not
    enough (gloo stages tensors through host memory, ranks share GPUs); ("gloo", "cpu") otherwise and for "cpu".
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


def gpu_count() -> int:
    """GPUs that torch sees, asked of NVML: no CUDA context here, and no torch where there is no GPU at all."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def count_ranks(ranks: int | None, hosts: Hosts | None) -> int:
    """The number of ranks that `launch(ranks=ranks, hosts=hosts)` starts; ValueError for one that cannot be."""
    if ranks is None:
        ranks = hosts.ranks if hosts is not None else 4
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= _MOST_RANKS:
        raise ValueError(f"ranks is the number of processes, from 1 to {_MOST_RANKS}, not {ranks!r}")
    if hosts is not None and not (hosts.n - 1) * hosts.ranks_per_host < ranks <= hosts.ranks:
        raise ValueError(
            f"{ranks} ranks do not fill {hosts.n} hosts of {hosts.ranks_per_host}: "
            f"use ranks={hosts.ranks}, or hosts for that many ranks"
        )
    return ranks


def _environment(hosts: Hosts | None, backend: str, env: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, then ours (nothing reachable from outside the machine), then the caller's."""
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env maps names to text, but {name!r} is {value!r}")
    if hosts is None and "GLOO_SOCKET_IFNAME" in env:
        from ddplab.nccl.env import check_env

        for finding in check_env({"GLOO_SOCKET_IFNAME": env["GLOO_SOCKET_IFNAME"]}):
            raise ValueError(str(finding))
    from ddplab.hosts import DEVICE

    ours = {"GLOO_SOCKET_IFNAME": "lo" if hosts is None else DEVICE}
    if sys.platform == "darwin":
        ours["GLOO_SOCKET_IFNAME"] = "lo0"
    if backend == "nccl":
        ours |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0"}
    return {**os.environ, **ours, **env}


def _converse(request: bytes, show: bool) -> tuple[str, list[dict[str, Any]]]:
    """Hand the request to a fresh supervisor, wait for the outcome, print the output; Ctrl-C leaves no rank behind."""
    conn = fork_server().connect()
    try:
        try:
            conn.send_bytes(request)
            conn.poll(None)
        except KeyboardInterrupt:
            # A second Ctrl-C, or a supervisor that is gone: closing the connection ends the ranks, too.
            with contextlib.suppress(KeyboardInterrupt, EOFError, OSError, RankError):
                conn.send_bytes(b"stop")
                if conn.poll(_STOP_S):
                    _receive(conn, show)
            return "interrupted", []
        return _receive(conn, show)
    except (EOFError, OSError):
        raise RankError("the supervisor of the ranks was killed, and the ranks with it", None) from None
    finally:
        conn.close()


def _receive(conn: Connection, show: bool) -> tuple[str, list[dict[str, Any]]]:
    outcome, reports = pickle.loads(conn.recv_bytes())
    if outcome == "broken":
        raise RankError(f"the ranks could not be started: {reports}", None)
    if show and (text := _report.output(reports)):
        print(text, end="", flush=True)
    return outcome, reports

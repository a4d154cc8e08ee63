"""What runs in a rank: from a fresh fork to the caller's function and back."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import linecache
import os
import pickle
import random
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from ddplab._child import die_with_parent
from ddplab._links import enter_host
from ddplab._pickling import dumps
from ddplab.processors import here

_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|socket timeout|remote process (has )?exited|"
    r"application timeout|connection was likely closed|recvvalue failed",
    re.IGNORECASE,
)


def run_rank(
    rank: int, request: dict[str, Any], meeting: str, conn: Connection, out: int, stack: int, supervisor: int
) -> None:
    """Run the request's function as this rank; never returns."""
    os.setpgid(0, 0)
    _redirect(out)
    faulthandler.enable(file=stack)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)

    def tell(kind: str, body: Any = None) -> None:
        _flush()
        conn.send_bytes(pickle.dumps((kind, time.monotonic(), body)))

    try:
        if request["hosts"]:
            enter_host(*request["hosts"][rank])  # first: a user namespace takes only a process with one thread
        die_with_parent(supervisor)  # after entering a user namespace, which would forget it
        value = _call(rank, request, meeting, tell)
    except BaseException as error:  # SystemExit too: a rank that leaves early has no result
        # Tell before anything is closed: closing makes the peers fail, and they would be heard first.
        tell("failed", {"secondary": is_consequence(error), **describe(error)})
        os._exit(1)
    tell("returned", (value, "torch._dynamo" in sys.modules))
    conn.recv_bytes()  # until all ranks have returned: nobody loses a peer that is merely faster
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed or replaced them
            stream.flush()


def _redirect(out: int) -> None:
    """Send file descriptors 1 and 2 to the pipe `out` (so C code is captured too), and give the rank an empty stdin."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(out)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")


def _call(rank: int, request: dict[str, Any], meeting: str, tell: Callable[..., None]) -> bytes:
    ranks = request["ranks"]
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{ranks}", LOCAL_WORLD_SIZE=f"{ranks}")
    os.environ["DDPLAB_RANK"] = f"{rank}"
    if request["hosts"]:
        os.environ["DDPLAB_HOST"] = request["hosts"][rank][1]
    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
    for name, lines in request["sources"].items():  # the text of notebook cells, so that tracebacks show it
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    if request["realtime"]:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    elif ranks > here() and hasattr(os, "SCHED_BATCH"):
        # Who wakes up does not interrupt who computes: the same messages with half the switches from rank to rank.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    seed_everything(request["seed"] + rank)
    fn, args = pickle.loads(request["call"])
    tell("joining")
    import torch.distributed as dist

    # Longer than the launch's own limit, which shows the stacks.
    limit = _timedelta(request["timeout"] + 30)
    _start_group(
        request["backend"], request["device"], limit, store=dist.FileStore(meeting, ranks), rank=rank, world_size=ranks
    )
    tell("running")
    value = fn(*args)
    try:
        return dumps(value)
    except Exception as error:
        message = f"the result of rank {rank} (a {type(value).__name__}) cannot be sent back: {error}"
        raise TypeError(message) from None


def _timedelta(seconds: float) -> timedelta:
    """A time limit that torch can hold, in milliseconds: 30 years stand for any longer one."""
    return timedelta(seconds=min(seconds, 1e9))


def _start_group(backend: str, device: str, limit: timedelta, **rendezvous: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.set_debug_level_from_env()  # TORCH_DISTRIBUTED_DEBUG was read when torch was loaded
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=limit, **rendezvous)


def join_job(
    fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, env: dict[str, str], device: str, seed: int
) -> list[Any]:
    """Be one rank of the torchrun job that started this process; every process returns all results.

    The job's size counts, whatever `ranks` says. Its launcher ends the job if a rank fails.
    """
    import torch.distributed as dist

    from ddplab.launch import resolve_backend

    os.environ.update(env)
    if not dist.is_initialized():
        here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        backend, device = resolve_backend(here, device)
        if backend == "gloo" and here < int(os.environ["WORLD_SIZE"]):
            _require_address()
        limit = _timedelta(timeout)
        _start_group(backend, device, limit, **_agreed(f"{backend} on {device}", limit))
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    seed_everything(seed + dist.get_rank())
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, dumps(fn(*args)))
    return [pickle.loads(result) for result in results]


def _require_address() -> None:
    """Before machines connect: gloo gives the others the address of this machine's name, unless told which device."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name, address = socket.gethostname(), ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
    if not address or address.startswith("127."):
        raise RuntimeError(
            f"this machine's name, {name}, is {address or 'no address'} to itself, and other machines cannot reach it "
            "there: set GLOO_SOCKET_IFNAME on it to the device that leads to them (`ip -br address` lists the devices)"
        )


def _agreed(ours: str, limit: timedelta) -> dict[str, Any]:
    """How to join the job's process group, once this rank knows that rank 0 uses the same backend and device.

    Ranks with different ones would wait for each other: a machine without GPUs among others, or one with too few.
    """
    import torch.distributed as dist

    store, rank, size = next(dist.rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    store.set(f"ddplab/backend/{rank}", ours)
    theirs = store.get("ddplab/backend/0").decode()
    if theirs != ours:
        raise RuntimeError(f'rank 0 uses {theirs}, but here rank {rank} would use {ours}: give device="cpu" to all')
    return {"store": dist.PrefixStore("default_pg", store), "rank": rank, "world_size": size}


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and random."""
    import numpy
    import torch

    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def is_consequence(error: BaseException) -> bool:
    """Whether the error began as a lost connection to a peer, so that the cause is to be sought in another rank."""
    import torch.distributed as dist

    origin = list(_chain(error))[-1]
    network = (ConnectionError, dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)
    return isinstance(origin, network) or (isinstance(origin, RuntimeError) and bool(_LOST_PEER.search(str(origin))))


def describe(error: BaseException) -> dict[str, str]:
    """One line and the traceback of an error, without our own frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be shown: __str__ raised)"
    summary = f"{type(error).__name__}: {text}".strip().splitlines()[0]
    if isinstance(error, SystemExit):
        summary = f"left by sys.exit({error.code!r}) before it had a result: return from the function instead"
    return {
        "summary": summary,
        "traceback": "".join(traceback.format_exception(type(error), error, frames)) if frames else "",
    }

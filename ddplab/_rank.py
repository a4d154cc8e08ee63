"""What runs in a rank: from a fresh fork to the caller's function and back."""

from __future__ import annotations

import faulthandler
import linecache
import os
import pickle
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from ddplab._links import CLONE_NEWNET, CLONE_NEWUSER, enter
from ddplab._supervisor import die_with_parent

_current: int | None = None  # the number of this rank, None outside one

_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|socket timeout|remote process (has )?exited|"
    r"application timeout|connection was likely closed|recvvalue failed",
    re.IGNORECASE,
)


def run_rank(
    rank: int, request: dict[str, Any], meeting: str, conn: Connection, out: int, stack: int, supervisor: int
) -> None:
    """Run the request's function as this rank; never returns."""
    global _current
    os.setpgid(0, 0)
    if request["hosts"]:
        _move_to_host(*request["hosts"][rank])
    die_with_parent(supervisor)
    _current = rank
    _redirect(out)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)

    def tell(kind: str, body: Any = None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        conn.send_bytes(pickle.dumps((kind, time.monotonic(), body)))

    try:
        value = _call(rank, request, meeting, tell)
    except BaseException as error:  # SystemExit too: a rank that leaves early has no result
        # Tell before anything is closed: closing makes the peers fail, and they would be heard first.
        tell("failed", {"secondary": is_consequence(error), **describe(error)})
        os._exit(1)
    tell("returned", value)
    try:
        conn.recv_bytes()
    except EOFError:
        os._exit(1)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _move_to_host(user: str | None, net: str) -> None:
    """Enter an emulated host. First thing after the fork: a user namespace takes only a process with one thread."""
    fds = [(os.open(path, os.O_RDONLY), flag) for path, flag in ((user, CLONE_NEWUSER), (net, CLONE_NEWNET)) if path]
    for fd, flag in fds:
        enter(fd, flag)


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


def _call(rank: int, request: dict[str, Any], meeting: str, tell: Any) -> bytes:
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request["ranks"]))
    if request["hosts"]:
        os.environ["DDPLAB_HOST"] = request["hosts"][rank][1]
    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
    for name, lines in request["sources"].items():  # the text of notebook cells, so that tracebacks show it
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    join_group(rank, request["ranks"], request["backend"], request["timeout"], meeting)
    tell("running")
    seed_everything(request["seed"] + rank)
    fn, args = pickle.loads(request["call"])
    value = fn(*args)
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(
            f"the result of rank {rank} (a {type(value).__name__}) cannot be sent back: {error}"
        ) from None


def join_group(rank: int, ranks: int, backend: str, timeout: float, meeting: str) -> None:
    """Initialise `torch.distributed` as `rank` of `ranks`, meeting the others at a file: no port, no listener."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.set_debug_level_from_env()  # TORCH_DISTRIBUTED_DEBUG was read when the fork server loaded torch
    if backend == "nccl":
        torch.cuda.set_device(rank)
    # Longer than the launch's own limit, which shows the stacks.
    limit = timedelta(seconds=timeout + 30)
    dist.init_process_group(backend, store=dist.FileStore(meeting, ranks), rank=rank, world_size=ranks, timeout=limit)


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and random."""
    import numpy
    import torch

    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def dumps(value: Any) -> bytes:
    """Pickle by value with cloudpickle; CUDA tensors become CPU tensors, so that the reader needs no GPU."""
    import io

    import cloudpickle
    import torch

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.is_cuda:
                return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(2)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


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
    shown = traceback.TracebackException.from_exception(error)
    return {
        "summary": "".join(traceback.format_exception_only(error)).strip().splitlines()[-1],
        "traceback": "".join(shown.format()),
    }

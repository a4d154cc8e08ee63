"""The warm process that ranks are forked from: it has torch loaded, so a launch costs milliseconds instead of seconds.

One fork server belongs to one caller process. It is started by `subprocess` (so the caller may have threads, a CUDA
context or a notebook's event loop) and imports torch once. A launch is one connection handed to it: the server forks
a *supervisor* for that connection, and the supervisor forks the ranks (`_supervisor.py`). Nothing is left on disk and
nothing listens: all talk goes over unnamed socket pairs. When the caller goes away, for whatever reason, the server
sees it and exits; supervisors and ranks die with their parent.

`multiprocessing` has a fork server too. This one is separate because that one re-runs the caller's script in each
child, keeps a socket file in the temporary folder that a killed caller leaves behind, and is shared with whatever
else the caller uses multiprocessing for.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.metadata
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddplab._hugepages import collapse

_START, _PRELOAD = b"s", b"p"
_PARENT_CHECK_S = 5.0
_MANY = 10  # launches, from which on it pays to rearrange the memory that they are forked from

_lock = threading.Lock()
_server: ForkServer | None = None


class ForkServer:
    """The caller's end: starts the server process and opens connections to new supervisors."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.owner, self.process, self.control = os.getpid(), process, control

    @classmethod
    def start(cls) -> ForkServer:
        control, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parent.parent)
        code = f"import sys; sys.path.insert(0, {root!r}); from ddplab._forkserver import serve"
        code += f"; serve({theirs.fileno()})"
        # One thread while forking: OpenBLAS and OpenMP would start a pool at import.
        single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal and a kernel interrupt go to the caller alone
                env={**os.environ, **single},
            )
        return cls(process, control)

    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def connect(self) -> Connection:
        """A connection whose other end is a supervisor forked for it."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [_START], [theirs.fileno()])
        return Connection(mine.detach())

    def preload_dynamo(self) -> None:
        with contextlib.suppress(OSError):
            self.control.send(_PRELOAD)

    def close(self) -> None:
        self.control.close()
        if self.owner == os.getpid():
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def fork_server() -> ForkServer:
    """The fork server of this process, started on first use and again if it died. Safe to call from any thread."""
    global _server
    with _lock:
        if _server is None or not _server.usable():
            if _server is None:
                atexit.register(stop)
            else:
                _server.close()
            _server = ForkServer.start()
        return _server


def adopt(process: Any, control: socket.socket) -> None:
    """Take for this process's fork server a child of it, in the shape of a Popen, that serves `control`'s other end."""
    global _server
    with _lock:
        atexit.register(stop)
        _server = ForkServer(process, control)


def stop() -> None:
    """End the fork server, if there is one; the next launch starts a new one."""
    global _server
    with _lock:
        if _server is not None:
            _server.close()
            _server = None


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What the block imports stays. It is not searched for garbage meanwhile, which would take a fifth of the time, nor
    afterwards: in a fork a search would write to, and so copy, every page of it."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@kept()
def load() -> None:
    """What every rank would load, look up or copy for itself is here before it is forked."""
    import numpy.random  # noqa: F401  (numpy leaves it out until it is used)
    import torch.distributed  # noqa: F401

    from ddplab import _rank

    _rank.seed_everything(0)
    # torch 2.14 asks for backends of other packages whenever a group is made: a read of every installed package's files
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    importlib.metadata.entry_points(group="torch.distributed.backends")


def serve(fd: int) -> None:
    """The server process: fork one supervisor for each connection that arrives on the socket `fd`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    parent = os.getppid()
    control = socket.socket(fileno=fd)

    from ddplab._supervisor import supervise

    load()
    launches, moved = 0, False
    while os.getppid() == parent:  # a child that the caller forked may keep the socket open after the caller died
        if not select.select([control], [], [], _PARENT_CHECK_S)[0]:
            continue
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        if message == _PRELOAD:
            # DDP and every optimizer import this (seconds) on first use; once one launch needed it, the next has it.
            with kept(), contextlib.suppress(Exception):
                import torch._dynamo  # noqa: F401

            moved = False
            continue
        launches += 1
        if launches > _MANY and not moved:
            collapse()
            moved = True
        if os.fork() == 0:
            code = 1
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                supervise(Connection(fds[0]))
                code = 0
            finally:
                os._exit(code)
        os.close(fds[0])
    os._exit(0)

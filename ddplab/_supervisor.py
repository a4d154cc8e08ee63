"""The supervisor of one launch: forks the ranks, hears them, decides who failed first, and leaves nothing behind.

It is a single-threaded process forked from the fork server. It talks with the caller over one connection (a request
in, an outcome out) and with each rank over one connection and two pipes (what the rank prints; its Python stack). If
the caller goes away or says stop, every rank is killed. Ranks cannot outlive the supervisor (PDEATHSIG), and the
supervisor cannot outlive the fork server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

_OUTPUT_LIMIT = 8192  # bytes kept from the start and from the end of what each rank prints
_GRACE_S = 1.0  # after a real failure: time for the other ranks to fail in consequence
_SUSPICION_S = 10.0  # after a failure that looks like a consequence: time for the real one to be reported
_EXIT_S = 10.0  # after all ranks returned: time to close the process group
_STACK_S = 1.0
_REPORTED = ("rank", "state", "time", "value", "dynamo", "failure", "status")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere the connection's end does it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


class Output:
    """The first and the last bytes of a stream, and how many were dropped between them."""

    def __init__(self) -> None:
        self.head, self.tail, self.total = b"", b"", 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = _OUTPUT_LIMIT - len(self.head)
        self.head += data[:room]
        self.tail = (self.tail + data[room:])[-_OUTPUT_LIMIT:]

    def text(self) -> str:
        dropped = self.total - len(self.head) - len(self.tail)
        middle = f"\n... {dropped} bytes left out ...\n".encode() if dropped else b""
        return (self.head + middle + self.tail).decode(errors="replace")


@dataclass
class Rank:
    """What the supervisor knows of one rank. `state`: starting, joining, running, then returned, failed or died."""

    rank: int
    pid: int
    conn: Connection
    out: int
    stack: int
    state: str = "starting"
    time: float = 0.0
    value: bytes = b""
    dynamo: bool = False  # it loaded torch._dynamo, as DDP and optimizers do
    failure: dict[str, Any] = field(default_factory=dict)
    status: int | None = None  # of waitpid, as an exit code or minus a signal; None while it lives
    output: Output = field(default_factory=Output)
    stacks: Output = field(default_factory=Output)

    @property
    def pending(self) -> bool:
        return self.state in ("starting", "joining", "running")

    def hear(self) -> None:
        """Take the messages that wait on the connection; close it at its end."""
        try:
            while not self.conn.closed and self.conn.poll():
                kind, at, body = pickle.loads(self.conn.recv_bytes())
                self.state, self.time = kind, at
                if kind == "returned":
                    self.value, self.dynamo = body
                elif kind == "failed":
                    self.failure = body
        except (EOFError, OSError):
            self.conn.close()

    def drain(self) -> None:
        """Read what the rank printed so far (both pipes are non-blocking)."""
        for fd, sink in ((self.out, self.output), (self.stack, self.stacks)):
            try:
                while data := os.read(fd, 1 << 16):
                    sink.add(data)
            except BlockingIOError:
                pass

    def look(self) -> None:
        """Notice the rank's end, after taking what it sent before. It stays a zombie, so its number stays its own."""
        if self.status is None and (end := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            self.hear()
            self.status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            if self.pending:
                self.state, self.time = "died", time.monotonic()

    def end(self) -> None:
        """Kill the rank and what it started (its process group, which exists once the rank has made it); reap it."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def report(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _REPORTED},
            "output": self.output.text(),
            "stack": self.stacks.text(),
        }


def supervise(caller: Connection) -> None:
    """Serve one launch: read the request, run the ranks, send the outcome."""
    die_with_parent(os.getppid())
    try:
        request = pickle.loads(caller.recv_bytes())
    except EOFError:
        return
    if caller.poll():  # the caller gave up while the fork server was still loading torch
        caller.send_bytes(pickle.dumps(("stopped", [])))
        return
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    os.set_blocking(wake_r, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    ranks: list[Rank] = []
    meeting, folder = _meeting_place()
    try:
        for r in range(request["ranks"]):
            ranks.append(_fork_rank(r, request, meeting, [caller, *(x.conn for x in ranks)]))
        outcome, problem = _watch(ranks, caller, wake_r, time.monotonic() + request["timeout"]), None
    except Exception as error:  # no memory or no processes left
        outcome, problem = "broken", f"{type(error).__name__}: {error}"
    finally:
        for rank in ranks:
            rank.end()
            rank.drain()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # the caller is gone
        caller.send_bytes(pickle.dumps((outcome, problem or [rank.report() for rank in ranks])))


def _meeting_place() -> tuple[str, str | None]:
    """The file where ranks find each other, and the folder to remove afterwards. On Linux it has no name on disk."""
    if sys.platform == "linux":
        return f"/proc/self/fd/{os.memfd_create('ddplab-rendezvous')}", None
    folder = tempfile.mkdtemp(prefix="ddplab-")
    return f"{folder}/rendezvous", folder


def _fork_rank(r: int, request: dict[str, Any], meeting: str, close: list[Connection]) -> Rank:
    from ddplab._rank import run_rank

    conn, theirs = Pipe()
    out, out_w = os.pipe()
    stack, stack_w = os.pipe()
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in [conn, *close]:
                other.close()
            run_rank(r, request, meeting, theirs, out_w, stack_w, supervisor)
        finally:
            os._exit(70)
    theirs.close()
    for fd in (out_w, stack_w):
        os.close(fd)
    for fd in (out, stack):
        os.set_blocking(fd, False)
    return Rank(r, pid, conn, out, stack)


def _watch(ranks: list[Rank], caller: Connection, wake: int, deadline: float) -> str:
    """Until all ranks are over: "returned", "failed", "timeout", or "stopped" by the caller."""
    open_fds = {fd: rank for rank in ranks for fd in (rank.out, rank.stack)}
    while True:
        pending = [rank for rank in ranks if rank.pending]
        failures = [rank for rank in ranks if rank.state in ("failed", "died")]
        if not pending:
            break
        limit = deadline
        if failures:
            suspicion = all(rank.failure.get("secondary") for rank in failures)
            limit = min(limit, min(rank.time for rank in failures) + (_SUSPICION_S if suspicion else _GRACE_S))
        if time.monotonic() >= limit:
            if failures:
                break
            _dump_stacks(pending)
            return "timeout"
        conns = [rank.conn for rank in ranks if not rank.conn.closed]
        ready = wait([caller, wake, *open_fds, *conns], timeout=max(0.0, limit - time.monotonic()))
        if caller in ready:
            return "stopped"
        if wake in ready:
            os.read(wake, 4096)
        for rank in ranks:
            rank.drain()
            rank.hear()
            rank.look()
    if failures:
        return "failed"
    _let_go(ranks)
    return "returned"


def _let_go(ranks: list[Rank]) -> None:
    """All results are here: let the ranks close their process group and exit, none before the last has returned."""
    for rank in ranks:
        try:
            rank.conn.send_bytes(b"go")
        except OSError:
            pass
    end = time.monotonic() + _EXIT_S
    while any(rank.status is None for rank in ranks) and time.monotonic() < end:
        wait([rank.out for rank in ranks if rank.status is None], timeout=0.005)
        for rank in ranks:
            rank.drain()
            rank.look()


def _dump_stacks(pending: list[Rank]) -> None:
    """Make every rank that has not answered write its Python stack (faulthandler writes it even inside C code)."""
    for rank in pending:
        os.kill(rank.pid, signal.SIGUSR1)
    end = time.monotonic() + _STACK_S
    while any(not rank.stacks.total for rank in pending) and time.monotonic() < end:
        wait([rank.stack for rank in pending], timeout=0.05)
        for rank in pending:
            rank.drain()
    wait([], timeout=0.05)  # the last lines of the last stack

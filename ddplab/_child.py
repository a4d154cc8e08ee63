"""One rank as its supervisor sees it: the process, what it said, what it printed, how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

_OUTPUT_LIMIT = 8192  # bytes kept from the start and from the end of what each rank prints
_PARENT_CHECK_S = 1.0
_READS = 16  # at most this many at once, so that a rank that floods its output does not keep the clock from running
_REPORTED = ("rank", "state", "time", "value", "dynamo", "failure", "status")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; where it cannot (not Linux), a thread looks."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    else:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
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
    pipes: dict[int, Output]  # what it prints and its stack, by the descriptor to read; gone at their end
    output: Output
    stack: Output
    state: str = "starting"
    time: float = 0.0
    value: bytes = b""
    dynamo: bool = False  # it loaded torch._dynamo, as DDP and optimizers do
    failure: dict[str, Any] = field(default_factory=dict)
    status: int | None = None  # of waitpid, as an exit code or minus a signal; None while it lives

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
        """Read what the rank wrote so far into its two pipes, which do not block."""
        for fd, sink in list(self.pipes.items()):
            with contextlib.suppress(BlockingIOError):
                for _ in range(_READS):
                    data = os.read(fd, 1 << 16)
                    sink.add(data)
                    if not data:
                        os.close(fd)
                        del self.pipes[fd]
                        break

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
            "stack": self.stack.text(),
        }


def fork_rank(r: int, request: dict[str, Any], meeting: str, close: list[Connection]) -> Rank:
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
    output, stacks = Output(), Output()
    return Rank(r, pid, conn, {out: output, stack: stacks}, output, stacks)

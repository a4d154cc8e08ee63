"""The supervisor of one launch: forks the ranks, hears them, decides who failed first, and leaves nothing behind.

It is a single-threaded process forked from the fork server. It talks with the caller over one connection (a request
in, an outcome out) and with each rank over one connection and two pipes (what the rank prints; its Python stack). If
the caller goes away or says stop, every rank is killed. Ranks cannot outlive the supervisor (PDEATHSIG), and the
supervisor cannot outlive the fork server.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait

from ddplab._child import Rank, die_with_parent, fork_rank

_GRACE_S = 1.0  # after a real failure: time for the other ranks to fail in consequence
_SUSPICION_S = 10.0  # after a failure that looks like a consequence: time for the real one to be reported
_EXIT_S = 10.0  # after all ranks returned: time to close the process group
_STACK_S = 1.0
_LONGEST_WAIT_S = 3600.0  # of one poll(2), whose milliseconds are an int: a launch may be given years


def supervise(caller: Connection) -> None:
    """Serve one launch: read the request, run the ranks, send the outcome."""
    if sys.platform == "linux":  # elsewhere the caller's end tells, and a thread would be in the way of forking
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
            ranks.append(fork_rank(r, request, meeting, [caller, *(x.conn for x in ranks)]))
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


def _watch(ranks: list[Rank], caller: Connection, wake: int, deadline: float) -> str:
    """Until all ranks are over: "returned", "failed", "timeout", or "stopped" by the caller."""
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
        heard = [rank.conn for rank in ranks if not rank.conn.closed] + [fd for rank in ranks for fd in rank.pipes]
        ready = wait([caller, wake, *heard], timeout=min(max(0.0, limit - time.monotonic()), _LONGEST_WAIT_S))
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
        wait([fd for rank in ranks if rank.status is None for fd in rank.pipes], timeout=0.005)
        for rank in ranks:
            rank.drain()
            rank.look()


def _dump_stacks(pending: list[Rank]) -> None:
    """Make every rank that has not answered write its Python stack (faulthandler writes it even inside C code)."""
    for rank in pending:
        os.kill(rank.pid, signal.SIGUSR1)
    end = time.monotonic() + _STACK_S
    while any(not rank.stack.total for rank in pending) and time.monotonic() < end:
        wait([fd for rank in pending for fd in rank.pipes], timeout=0.05)
        for rank in pending:
            rank.drain()
    wait([], timeout=0.05)  # the last lines of the last stack

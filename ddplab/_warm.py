"""Notebooks in kernels that are forked from a process which has everything imported: for runs of many notebooks.

A fresh kernel imports torch, pandas and matplotlib for seconds, and its first launch does so again in a fork server.
Here one process imports them once (multiprocessing's own fork server, with this module preloaded). Each notebook gets
a fork of it, which runs papermill; before it starts a thread it forks again, and this child becomes the kernel, whose
fork server is a fork, too. Namespace, folder, environment and process group are each kernel's own.

The tests run the book so. A book that is to be read gets fresh kernels: `python -m ddplab.notebooks` has no such thing.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from ddplab import _forkserver

_FRESH_PATH = [folder for folder in sys.path if folder]


def call(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` in a process of its own, which can turn one kernel's start into a fork. Linux only."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ddplab._warm_imports"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, dict(os.environ), fn, args))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError(f"the process that ran {fn.__name__}{args} died") from None
    finally:
        process.join()


def _work(conn: Any, env: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(env)
    _Provisioner.spare = _Spare()
    factory = KernelProvisionerFactory.instance()
    place = f"{__name__}:{_Provisioner.__name__}"
    factory.provisioners["warm"] = EntryPoint("warm", place, KernelProvisionerFactory.GROUP_NAME)
    factory.default_provisioner_name = "warm"
    conn.send(fn(*args))


class _Child:
    """A forked child in the shape of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 1e9) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class _Spare:
    """A child that waits until it is told which kernel to be."""

    def __init__(self) -> None:
        self.conn, theirs = multiprocessing.Pipe()
        if (pid := os.fork()) == 0:
            self.conn.close()
            _forked(lambda: _be_a_kernel(theirs))
        theirs.close()
        self.child = _Child(pid)

    def become(self, cmd: list[str], env: dict[str, str], cwd: str) -> _Child:
        # jupyter_client passes its process id in a variable, which ipykernel read when it was imported
        self.conn.send(([*cmd, f"--IPKernelApp.parent_handle={os.getpid()}"], env, cwd))
        self.conn.recv()  # it has its own process group from here on
        return self.child


class _Provisioner(LocalProvisioner):
    """jupyter_client's, but the kernel is the spare child; a second kernel of the same process is a fresh one."""

    spare: _Spare | None = None

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        if _Provisioner.spare is None:
            return await super().launch_kernel(cmd, **kwargs)
        self.cwd = kwargs.get("cwd") or os.getcwd()
        self.process = _Provisioner.spare.become(cmd, kwargs["env"], self.cwd)
        _Provisioner.spare = None
        self.pid = self.pgid = self.process.pid
        return self.connection_info


def _forked(run: Callable[[], None]) -> None:
    """The life of a forked child: never back into the code of its parent, whatever happens."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except EOFError:  # the parent ended without a kernel
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(code)


def _be_a_kernel(conn: Any) -> None:
    """What `python -m ipykernel_launcher` does, in the state that a fresh process would have."""
    import numpy
    import torch
    from ipykernel.kernelapp import IPKernelApp

    cmd, env, cwd = conn.recv()
    os.setsid()
    conn.send(None)
    conn.close()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:] = _FRESH_PATH
    sys.argv = cmd[cmd.index("ipykernel_launcher") :]
    numpy.random.seed()
    multiprocessing.set_start_method(None, force=True)  # back to the default: this process came from a fork server
    control, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        control.close()
        _forked(lambda: _serve(theirs.detach()))
    theirs.close()
    _forkserver.adopt(_Child(pid), control)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    IPKernelApp.launch_instance()


def _serve(fd: int) -> None:
    os.setsid()
    _forkserver.serve(fd)

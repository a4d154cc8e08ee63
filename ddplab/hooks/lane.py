"""One thread that runs tasks in the order in which they came: the communication lane of a hook.

Every rank's lane gets the same buckets in the same order, so their collectives match. Callbacks of futures do not keep
that order (ranks would add up different buckets), and two lanes on one process group would mix their messages.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

_JOIN_S = 5.0  # a thread that waits for a dead peer ends with the process


class Lane:
    """Starts its thread with the first task; ends it in `close()`, when it is collected, and at exit."""

    def __init__(self, name: str = "ddplab-hook") -> None:
        self._name, self._tasks = name, queue.SimpleQueue()
        self._end: weakref.finalize | None = None
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` after all tasks before it. It must not raise. RuntimeError after `close()`."""
        if self._closed:
            raise RuntimeError("this hook state is closed: make a new one")
        if self._end is None:
            # A daemon: Python would wait for another kind at exit, for ever if a peer died in an exchange.
            thread = threading.Thread(target=_serve, args=(self._tasks,), name=self._name, daemon=True)
            thread.start()
            self._end = weakref.finalize(self, _stop, self._tasks, thread)
        self._tasks.put(task)

    def drain(self) -> None:
        """Wait until every task that was submitted before is done."""
        if self._end is not None and self._end.alive:
            done = threading.Event()
            self._tasks.put(done.set)
            done.wait()

    def close(self) -> None:
        """Finish the tasks and end the thread. A second call does nothing."""
        self._closed = True
        if self._end is not None:
            self._end()


def _serve(tasks: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # while this thread waits it must not keep a hook's state alive


def _stop(tasks: queue.SimpleQueue, thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():  # the last reference may go with a task
        thread.join(_JOIN_S)

"""What a rank leaves behind, whatever becomes of it: its log, its Python stack, its flight recorder.

A job that is to be understood after its death has to write before it dies. So each rank has a black box. Everything
that it says on stderr goes to a file, C++ warnings included. Once the first step has begun, a watchdog thread looks
whether others follow; if none does for `patience_s`, it writes the stack of every thread and the flight recorder,
once, while the rank still hangs. The recorder is written again when the rank fails, and when it ends well.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
from pathlib import Path
from types import TracebackType

_log = logging.getLogger(__name__)


class BlackBox:
    """A context manager for one rank; `beat(step)` says that a step begins.

    Files in `folder`: rank_<r>.log, stack_rank_<r>.txt (only of a rank that hung), and comm_lib_trace_rank_<r>, the
    recorder's pickle under the name that torch gives it with NCCL. A rank that the kernel kills leaves its log only.
    """

    def __init__(self, folder: str | Path, rank: int, patience_s: float):
        self.folder, self.rank, self.patience_s = Path(folder), rank, patience_s
        self._beat, self._over, self._hung = threading.Event(), threading.Event(), threading.Event()

    def __enter__(self) -> BlackBox:
        self._stderr = os.dup(2)
        self._file = open(self.folder / f"rank_{self.rank}.log", "a", buffering=1)
        os.dup2(self._file.fileno(), 2)
        faulthandler.enable(self._file)  # a crash leaves its stack in the log, as on any stderr
        handler = logging.StreamHandler(self._file)
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {self.rank} %(levelname)s %(message)s"))
        _log.handlers, _log.propagate = [handler], False
        _log.setLevel(logging.INFO)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def beat(self, step: int) -> None:
        _log.info("step %d", step)
        self._beat.set()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._beat.set()
        if error is not None:
            _log.error("training failed", exc_info=error)
        if error is None or not self._hung.is_set():  # what it held during the hang says more than what came after
            self.dump()
        faulthandler.disable()
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        self._file.close()

    def note(self, text: str) -> None:
        _log.info(text)

    def dump(self) -> None:
        """Write the flight recorder; the file appears whole or not at all."""
        from torch._C import _distributed_c10d as c10d

        path = self.folder / f"comm_lib_trace_rank_{self.rank}"
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(c10d._dump_fr_trace(True, True, False))
        part.replace(path)

    def _watch(self) -> None:
        self._beat.wait()  # many ranks on few cores take long to connect, and that is no hang
        while self._beat.wait(self.patience_s):
            self._beat.clear()
            if self._over.is_set():
                return
        self._hung.set()
        _log.warning("no step began for %g s: writing stacks and the flight recorder", self.patience_s)
        with open(self.folder / f"stack_rank_{self.rank}.txt", "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        self.dump()

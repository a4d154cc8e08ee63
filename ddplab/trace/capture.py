"""Record a trace of a few training steps on every rank: torch's profiler, with the ways to get nothing closed.

torch's own schedule begins a new cycle after the last one (repeat=0), and each cycle throws the events of the one
before away: a loop that runs one step longer than planned leaves an empty table (claim C47). Recording only the GPU
fails on a machine without one (C46). Here there is one cycle, CPU and GPU are recorded, and a loop that ends too early
is an error that says how many steps were missing.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any


class CaptureError(RuntimeError):
    """The loop ended before the trace was complete, or the trace could not be written."""


class capture:  # noqa: N801 - used like a function: `with dl.capture(folder) as recorder`
    """Record `steps` training steps of this rank to folder/rank<R>.pt.trace.json.gz.

        with dl.capture("traces/") as recorder:
            for batch in loader:
                train_step(batch)
                recorder.step()
                if recorder.done:
                    break
        dl.analyze_trace("traces/")

    Every rank calls it with the same folder and writes a file of its own. Call `step()` at the end of each iteration.
    The loop may go on after the last recorded step, at no cost.

    skip: steps before the recording, at least 0. The default leaves DDP's first two out: in iteration 0 all gradients
        are one bucket, before iteration 1 the buckets are rebuilt.
    warmup: steps, at least 1, that the profiler runs without keeping anything; its own start is slow.
    steps: steps to record, at least 1.  So skip + warmup + steps iterations are needed.
    record_shapes: keep the shapes of operators. gloo's collectives have no other trace of their size.
    stacks: keep Python stacks, too; the file grows by an order of magnitude.
    rank: number in the file's name; that of torch.distributed, else RANK of the environment, else 0.

    CPU and, where there is one, GPU (CUDA, ROCm, XPU) are recorded. The file appears whole, or not at all.
    CaptureError if the loop ends too early, or the file cannot be written; an exception of the loop passes unchanged.
    """

    def __init__(
        self,
        folder: str | Path,
        steps: int = 3,
        skip: int = 2,
        warmup: int = 1,
        record_shapes: bool = True,
        stacks: bool = False,
        rank: int | None = None,
    ) -> None:
        for name, value, least in (("steps", steps, 1), ("skip", skip, 0), ("warmup", warmup, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is a whole number of steps, at least {least}, not {value!r}")
        self.folder = Path(folder)
        self.steps, self.skip, self.warmup = steps, skip, warmup
        self.needed = skip + warmup + steps
        self.path: Path | None = None  # of the trace, once it is written
        self._options = {"record_shapes": record_shapes, "with_stack": stacks}
        self._rank = rank
        self._count = 0
        self._profiler: Any = None

    @property
    def done(self) -> bool:
        """The trace is written."""
        return self.path is not None

    def __enter__(self) -> capture:
        # Without it, Kineto tells every stage on stderr, from each rank.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        from torch import profiler

        kinds = ("CPU", "CUDA", "XPU")
        wanted = [kind for kind in profiler.supported_activities() if kind.name in kinds]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._profiler = profiler.profile(
            activities=wanted,
            schedule=profiler.schedule(skip_first=self.skip, wait=0, warmup=self.warmup, active=self.steps, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,  # nothing to accumulate in one cycle, but torch warns without it
            **self._options,
        )
        self._profiler.__enter__()
        return self

    def step(self) -> None:
        """An iteration of the loop is over. After the last recorded one this does nothing."""
        if self._profiler is None:
            if not self.done:
                raise CaptureError("step() outside the with block: `with dl.capture(folder) as recorder:`")
            return
        self._count += 1
        self._profiler.step()
        if self.done:
            self._close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is None:
            return
        self._close()
        if kind is not None:
            return
        missing = self.needed - self._count
        raise CaptureError(
            f"the loop ended after {self._count} steps, but a trace needs {self.needed} calls of step(): {self.skip} "
            f"skipped, {self.warmup} to warm up, {self.steps} recorded. {missing} missing, nothing was written. "
            "Run the loop longer, or pass smaller steps= or skip="
        )

    def _close(self) -> None:
        """Stop the profiler without a second trace: on leaving early it would write the steps it has."""
        profiler, self._profiler = self._profiler, None
        profiler.on_trace_ready = None
        profiler.__exit__(None, None, None)

    def _write(self, profiler: Any) -> None:
        path = self.folder / f"rank{self._number()}.pt.trace.json.gz"
        part = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            profiler.export_chrome_trace(str(part))
            part.replace(path)
        except (OSError, RuntimeError) as problem:
            part.unlink(missing_ok=True)
            raise CaptureError(f"{path} could not be written: {problem}") from problem
        self.path = path

    def _number(self) -> int:
        if self._rank is not None:
            return self._rank
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
        return int(os.environ.get("RANK", "0"))

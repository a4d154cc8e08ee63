"""How buckets pass through a hook: in which thread or stream, what their futures say, and who hears of a failure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from ddplab.hooks.lane import Lane

_AGREED = (ValueError, TypeError, ArithmeticError)  # raised on every rank for the same bucket; else a peer is lost


class Passage:
    """One step after the other, and within a step bucket after bucket. `HookState` says what happens to a bucket.

    gloo blocks its caller: the exchange runs in the communication lane. NCCL only enqueues: it runs in the hook call,
    on a stream of its own. After a failure no rank sends the rest of the step, for all ranks failed at the same bucket;
    the step is undone and the error is raised when backward is over, so that DDP can take another step.
    """

    def __init__(self) -> None:
        self._lane = Lane()
        self._failure: Exception | None = None
        self._watched = False  # will autograd call us at the end of this backward?
        self._deferred: list[Callable[[], None]] = []  # NCCL: looks at flags that are still on the device

    def exchange(self, work: Any) -> torch.Tensor:
        """The mean of a bucket from what its encoding gave."""
        raise NotImplementedError

    def rollback(self) -> None:
        """Undo what this step did to the state."""
        raise NotImplementedError

    def forgives(self, failure: Exception | None) -> bool:
        """Is this failure to be answered with NaN instead of an error?"""
        raise NotImplementedError

    def start(self) -> None:
        """A new step: wait for the last one."""
        self.settle()
        self._watched = False
        self._deferred.clear()

    def as_it_is(self, buffer: torch.Tensor) -> Future:
        """Alone there is nobody to send to."""
        future = _future(buffer)
        future.set_result(buffer)
        return future

    def refuse(self, error: Exception, buffer: torch.Tensor) -> Future:
        """A bucket that cannot be sent, on any rank."""

        def fail(work: None) -> torch.Tensor:
            raise error

        return self.in_lane(fail, None, buffer)

    def in_lane(self, exchange: Callable[[Any], torch.Tensor], work: Any, buffer: torch.Tensor) -> Future:
        """gloo: the future of `exchange(work)`, run in the communication lane."""
        future = _future(buffer)
        self._lane.submit(partial(self._run, exchange, work, buffer, future))
        return future

    def _run(self, exchange: Callable[[Any], torch.Tensor], work: Any, buffer: torch.Tensor, future: Future) -> None:
        result = buffer
        try:
            if self._failure is None:
                result = exchange(work)
                if buffer.is_cuda:
                    torch.cuda.synchronize(buffer.device)
        except BaseException as problem:
            self._failure = problem if isinstance(problem, Exception) else RuntimeError(repr(problem))
        self._answer(future, result)

    def on_stream(self, work: Any, bucket: dist.GradBucket) -> Future:
        """NCCL: enqueue on a stream of our own, so that backward goes on beside it; nobody waits."""
        result, future, device = bucket.buffer(), _future(bucket.buffer()), bucket.buffer().device
        if not hasattr(self, "_stream"):
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            try:
                if self._failure is None:
                    result = self.exchange(work)
                if bucket.is_last():
                    for look in self._deferred:
                        look()
            except _AGREED as problem:
                self._failure = problem
            self._answer(future, result)
        return future

    def _answer(self, future: Future, result: torch.Tensor) -> None:
        if self._failure is None:
            future.set_result(result)
        elif self.forgives(self._failure):
            future.set_result(result.fill_(float("nan")))
        elif self._watched:  # DDP first finishes its step, so that it can take another; then we raise
            future.set_result(result)
        else:
            future.set_exception(self._failure)

    def watch(self) -> None:
        """Ask autograd to call us when this backward is over, after DDP: twice in the queue puts us behind it."""
        if self._watched:
            return
        queue = torch.autograd.Variable._execution_engine.queue_callback
        with suppress(RuntimeError):  # not in a backward: whoever called us waits for the future, which has the error
            queue(lambda: queue(self._end_of_backward))
            self._watched = True

    def _end_of_backward(self) -> None:
        failure = self._failure
        self.settle()
        if failure is not None and not self.forgives(failure):
            raise failure

    def drain(self) -> None:
        """Wait until the lane is through with all buckets so far."""
        self._lane.drain()

    def settle(self) -> None:
        """Wait until all buckets are through; if the step failed, undo it."""
        self._lane.drain()
        if self._failure is not None:
            self.rollback()
            if isinstance(self._failure, _AGREED):
                self._failure = None

    def close(self) -> None:
        """End the communication lane."""
        self._lane.close()


def _future(buffer: torch.Tensor) -> Future:
    return Future(devices=[buffer.device]) if buffer.is_cuda else Future()

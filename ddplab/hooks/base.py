"""What all communication hooks share: a group of their own, one communication lane, errors that reach every rank.

A hook is a function `hook(state, bucket)` that DDP calls during backward, as soon as a bucket of gradients is full. It
returns a future of the bucket's *mean* over the ranks: with a hook nobody else divides. All hooks of ours are the same
function, `comm_hook`; the state says what is sent. A method is a `HookState` with two methods of its own:

    encode(bucket) -> work       in the hook call, beside backward: turn gradients into what travels
    exchange(work) -> tensor     in the communication lane, bucket after bucket: send, receive, decode, divide
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from ddplab.hooks.agreement import require_agreement
from ddplab.hooks.lane import Lane
from ddplab.hooks.residuals import Residuals
from ddplab.hooks.wire import Wire

_AGREED = (ValueError, TypeError, ArithmeticError)  # raised on every rank for the same bucket; else a peer is lost


class NonFiniteGradient(ValueError):
    """NaN or infinity in a gradient. `.rank`, `.bucket` (its index) and `.parameter` (name or place) say whose."""

    def __init__(self, rank: int, bucket: int, parameter: str) -> None:
        self.rank, self.bucket, self.parameter = rank, bucket, parameter
        super().__init__(
            f"NaN or infinity in the gradient on rank {rank}, bucket {bucket}, {parameter}: nothing of this bucket was "
            "used, and what error feedback holds back is as before this step. Skip the step (zero_grad), clip, or, "
            "where a GradScaler meets this on purpose, give it to the hook: scaler=scaler"
        )


def all_finite(flat: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. The extremes tell, on a CPU ten times as fast as `torch.isfinite`."""
    return flat.numel() == 0 or bool(torch.stack(torch.aminmax(flat)).isfinite().all())


def comm_hook(state, bucket):  # no annotations: torch wants exactly its own there, and ours are text
    """The communication hook of every method: `ddp.register_comm_hook(state, comm_hook)`."""
    if not isinstance(state, HookState):
        raise TypeError(f"the hook's state is one of ddplab's, such as ddplab.OneBit(), not {state!r}")
    return state.reduce(bucket)


class HookState:
    """The state of a communication hook, and its life.

    Args:
        process_group: the ranks that share the model; None means all. Every one of them makes the state, in the same
            order among other collectives, because the state makes a group of its own.
        module: the model, so that messages can name its parameters.
        scaler: the `torch.amp.GradScaler` that scales the loss, if any. A gradient that is not finite is then no error:
            every rank gets NaN for it and the scaler skips the step everywhere. And what error feedback holds back
            follows the scale.

    Attributes:
        wire_bytes: payload bytes that this rank has put on the wire since the state was made.
        overflows, underflows: elements that the method could not represent, where it counts them.
        world_size, rank: of the group.
        residuals: what error feedback holds back, per parameter.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this rank is outside the group.
        ValueError: another rank makes the state of another method.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        module: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.wire = Wire(process_group)
        require_agreement(self.wire, "A communication hook", method=type(self).__name__)  # and nobody leaves before
        self.rank, self.world_size = self.wire.rank, self.wire.size
        self.residuals = Residuals()
        self.scaler, self._scale = scaler, None
        self.overflows = self.underflows = 0
        self._names = {p: name for name, p in module.named_parameters()} if module is not None else {}
        self._lane = Lane()
        self._failure: Exception | None = None
        self._watched = False  # will autograd call us at the end of this backward?
        self._deferred: list[tuple[Any, Any]] = []  # NCCL: flags that are still on the device

    # -- what a method says -----------------------------------------------------------------------------------------

    def encode(self, bucket: dist.GradBucket) -> Any:
        """Whatever `exchange` needs. Runs in the hook call, in bucket order; starts no collective."""
        raise NotImplementedError

    def exchange(self, work: Any) -> torch.Tensor:
        """The mean, shape and dtype of the bucket's buffer; that buffer may be overwritten. Collectives through
        `self.wire`, in the same order on all ranks."""
        raise NotImplementedError

    def begin(self) -> None:
        """A step begins: what the last one did to the state is final. Extend it for other state, and the next two."""
        self.residuals.begin()

    def rollback(self) -> None:
        """Undo what this step did to the state: some rank's gradient was not finite."""
        self.residuals.rollback()

    def rescale(self, factor: float) -> None:
        """The loss is now scaled by `factor` times as much: so is what the state holds of gradients."""
        self.residuals.multiply(factor)

    # -- the life of a bucket ---------------------------------------------------------------------------------------

    def reduce(self, bucket: dist.GradBucket) -> Future:
        """The future of the bucket's mean. This is the hook."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin_step()
        self._await_end_of_backward()
        future: Future = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
        unfit = "sparse" if buffer.layout != torch.strided else ""
        if not unfit and any(p.is_complex() for p in bucket.parameters()):  # torch hands them over as pairs of floats
            unfit = "complex"
        if unfit:
            error = TypeError(f"{unfit} gradients not supported: bucket {bucket.index()}, {self._name(bucket, 0)}")
            self._lane.submit(partial(self._run, _raise, error, buffer, future))
        elif self.world_size == 1:
            future.set_result(buffer)
        elif self.wire.threaded(buffer.device):
            self._lane.submit(partial(self._run, self.exchange, self.encode(bucket), buffer, future))
        else:
            self._run_on_stream(self.encode(bucket), bucket, future)
        return future

    def find_nonfinite(self, flat: torch.Tensor) -> int:
        """The place of the first element that is NaN or infinite, -1 if there is none: the flag that `check` takes."""
        return -1 if all_finite(flat) else int((~torch.isfinite(flat)).int().argmax())

    def gather_flag(self, flag: int, device: torch.device | str = "cpu") -> list[int]:
        """Every rank's flag: a small all-gather, for a method whose payload has no room for one."""
        return self.wire.all_gather(torch.tensor([flag], dtype=torch.int64, device=device)).view(-1).tolist()

    def check(self, flags: Sequence[int] | torch.Tensor, bucket: dist.GradBucket) -> None:
        """Raise NonFiniteGradient if a rank's flag (see `find_nonfinite`) is not -1. Call it with all ranks' flags, in
        `exchange`, so that every rank raises. Flags on a CUDA device are looked at when the step's last bucket is
        under way: to look is to wait."""
        if isinstance(flags, torch.Tensor) and flags.is_cuda:
            self._deferred.append((flags, bucket))
            return
        for rank, place in enumerate(torch.as_tensor(flags).tolist()):
            if place >= 0:
                raise NonFiniteGradient(self.wire.ranks[rank], bucket.index(), self._name(bucket, place))

    def _name(self, bucket: dist.GradBucket, place: int) -> str:
        """The parameter that holds element `place` of the bucket."""
        params, at = bucket.parameters(), 0
        for i, p in enumerate(params):
            at += p.numel()
            if place < at or i == len(params) - 1:
                name = f"parameter {self._names[p]!r}" if p in self._names else f"parameter {i} of it"
                return f"{name}, shape {tuple(p.shape)}"
        return "which has no parameter"

    def _run(self, exchange: Callable[[Any], torch.Tensor], work: Any, buffer: torch.Tensor, future: Future) -> None:
        """One bucket in the lane. After a failure nobody sends the rest of the step: all ranks failed here alike."""
        result = buffer
        try:
            if self._failure is None:
                result = exchange(work)
                if buffer.is_cuda:
                    torch.cuda.synchronize(buffer.device)
        except BaseException as problem:
            self._failure = problem if isinstance(problem, Exception) else RuntimeError(repr(problem))
        self._answer(future, result)

    def _answer(self, future: Future, result: torch.Tensor) -> None:
        if self._failure is None:
            future.set_result(result)
        elif self._forgiven():
            future.set_result(result.fill_(float("nan")))
        elif self._watched:  # DDP first finishes its step, so that it can take another; then we raise
            future.set_result(result)
        else:
            future.set_exception(self._failure)

    def _forgiven(self) -> bool:
        return self.scaler is not None and isinstance(self._failure, NonFiniteGradient)

    def _run_on_stream(self, work: Any, bucket: dist.GradBucket, future: Future) -> None:
        """NCCL: enqueue on a stream of our own, so that backward goes on beside it; nobody waits."""
        device = bucket.buffer().device
        if not hasattr(self, "_stream"):
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            result = bucket.buffer() if self._failure else self.exchange(work)
            if bucket.is_last():
                deferred, self._deferred = self._deferred, []
                try:
                    for flags, which in deferred:
                        self.check(flags.cpu(), which)
                except NonFiniteGradient as problem:
                    self._failure = problem
            self._answer(future, result)

    # -- the life of a step -----------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self.settle()
        self._watched = False
        self._deferred.clear()
        self.begin()
        if self.scaler is not None:
            scale = self.scaler.get_scale()
            if self._scale not in (None, scale):
                self.rescale(scale / self._scale)
            self._scale = scale

    def _await_end_of_backward(self) -> None:
        """Ask autograd to call us when this backward is over, after DDP: twice in the queue puts us behind it."""
        if self._watched:
            return
        queue = torch.autograd.Variable._execution_engine.queue_callback
        with suppress(RuntimeError):  # not in a backward: whoever called us waits for the future, which has the error
            queue(lambda: queue(self._end_of_backward))
            self._watched = True

    def _end_of_backward(self) -> None:
        failure, forgiven = self._failure, self._forgiven()
        self.settle()
        if failure is not None and not forgiven:
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

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that this rank has put on the wire."""
        return self.wire.bytes

    def residual_norm(self) -> float:
        """The L2 norm of what error feedback holds back on this rank, as a worker; 0.0 where there is none."""
        self.settle()
        return self.residuals.norm()

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text only. It belongs to this rank: each rank saves and loads its own."""
        self.settle()
        return {
            "method": type(self).__name__,
            "rank": self.rank,
            "world_size": self.world_size,
            "wire_bytes": self.wire.bytes,
            "overflows": self.overflows,
            "underflows": self.underflows,
            "scale": self._scale or 0.0,
            "residuals": self.residuals.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from `state_dict()`. ValueError if it is another rank's or another method's."""
        self.settle()
        mine = self.state_dict()
        method = saved.get("method") if isinstance(saved, dict) else None
        if method != mine["method"] or saved.keys() != mine.keys():
            what = f"that of {method}" if method else f"no state_dict() of a hook, but {type(saved).__name__}"
            raise ValueError(f"this is no state of {mine['method']}, it is {what}")
        for key in ("rank", "world_size"):
            if saved[key] != mine[key]:
                raise ValueError(f"{key} was {saved[key]} when this state was saved and is {mine[key]} now")
        self.wire.bytes = int(saved["wire_bytes"])
        self.overflows, self.underflows = int(saved["overflows"]), int(saved["underflows"])
        self._scale = float(saved["scale"]) or None
        self.residuals.load_state_dict(saved["residuals"])

    def close(self) -> None:
        """End the communication thread and give the group back; every rank calls it, after its last step."""
        self._lane.close()
        self.wire.close()


def _raise(error: Exception) -> torch.Tensor:
    raise error

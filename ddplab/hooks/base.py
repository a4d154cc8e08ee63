"""What all communication hooks share: a group of their own, one communication lane, errors that reach every rank.

A hook is a function `hook(state, bucket)` that DDP calls during backward, as soon as a bucket of gradients is full. It
returns a future of the bucket's *mean* over the ranks: with a hook nobody else divides. All hooks of ours are the same
function, `comm_hook`; the state says what is sent. A method is a `HookState` with two methods of its own:

    encode(bucket) -> work       in the hook call, beside backward: turn gradients into what travels
    exchange(work) -> tensor     in the communication lane, bucket after bucket: send, receive, decode, divide
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from ddplab._arguments import instance, shown
from ddplab.hooks.agreement import AFTER_LOADING, require_agreement
from ddplab.hooks.checkpoint import require_own
from ddplab.hooks.finite import NonFiniteGradient, find_nonfinite, parameter_at
from ddplab.hooks.passage import Passage
from ddplab.hooks.residuals import Residuals
from ddplab.hooks.wire import Wire

FINE, _LOADED = -1, -2  # flags of a bucket; from 0 on it is the place of a value that is not finite


def comm_hook(state, bucket):  # no annotations: torch wants exactly its own there, and ours are text
    """The communication hook of every method: `ddp.register_comm_hook(state, comm_hook)`."""
    instance(state, HookState, "the hook's state is one of ddplab's, such as ddplab.OneBit()")
    if not all(hasattr(bucket, name) for name in ("buffer", "parameters", "index", "is_last")):
        raise TypeError(f"the hook gets a bucket of gradients from DDP, not {shown(bucket)}")
    return state.reduce(bucket)


class HookState(Passage):
    """The state of a communication hook, and its life.

    Args:
        process_group: the ranks that share the model; None means all. Every one of them makes the state, in the same
            order among other collectives, because the state makes a group of its own.
        module: the model, so that messages can name its parameters.
        scaler: the `torch.amp.GradScaler` that scales the loss, if any. A gradient that is not finite is then no error:
            every rank gets NaN for it and the scaler skips the step everywhere. And what error feedback holds back
            follows the scale. On all ranks or on none.

    Attributes:
        wire_bytes: payload bytes that this rank has put on the wire since the state was made.
        overflows, underflows: elements that the method could not represent, where it counts them.
        world_size, rank: of the group.
        residuals: what error feedback holds back, per parameter.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this rank is outside the group.
        TypeError: an argument of another kind.
        ValueError: another rank makes the state of another method, or gives another option.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        module: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__()
        instance(module, (nn.Module, NoneType), "module is the model, a torch.nn.Module, or None")
        instance(scaler, (torch.amp.GradScaler, NoneType), "scaler is a torch.amp.GradScaler or None")
        self.scaler, self._scale = scaler, None
        self.wire = Wire(process_group)
        method = type(self).__name__
        options = {f"{method}'s {name}": value for name, value in self.options().items()}
        require_agreement(self.wire, {"A communication hook's method": method} | options)  # and nobody leaves before
        self.rank, self.world_size = self.wire.rank, self.wire.size
        self.residuals = Residuals()
        self.overflows = self.underflows = 0
        self._names = {p: name for name, p in module.named_parameters()} if module is not None else {}
        self._loaded = False  # since the ranks last compared what they share?

    # -- what a method says -----------------------------------------------------------------------------------------

    def encode(self, bucket: dist.GradBucket) -> Any:
        """Whatever `exchange` needs. Runs in the hook call, in bucket order; starts no collective."""
        raise NotImplementedError

    def exchange(self, work: Any) -> torch.Tensor:
        """The mean, shape and dtype of the bucket's buffer; that buffer may be overwritten. Collectives through
        `self.wire`, in the same order on all ranks."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """What all ranks must have been given alike. Extend it; called before the rest of the state is made."""
        return {"scaler": "none" if self.scaler is None else "given"}

    def shared(self) -> dict[str, Any]:
        """What all ranks must hold alike before the first bucket of a step, if anything: numbers and words. A method
        that has some raises `alarm` in its payload and calls `hear` where any rank did."""
        return {}

    def begin(self) -> None:
        """A step begins: what the last one did to the state is final. Extend it for other state, and the next two."""
        self.residuals.begin()

    def rollback(self) -> None:
        """Undo what this step did to the state: some rank's gradient was not finite."""
        self.residuals.rollback()

    def rescale(self, factor: float) -> None:
        """The loss is now scaled by `factor` times as much: so is what the state holds of gradients."""
        self.residuals.multiply(factor)

    # -- one bucket --------------------------------------------------------------------------------------------------

    def reduce(self, bucket: dist.GradBucket) -> Future:
        """The future of the bucket's mean. This is the hook."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin_step()
        self.watch()
        unfit = "sparse" if buffer.layout != torch.strided else ""
        if not unfit and any(p.is_complex() for p in bucket.parameters()):  # torch hands them over as pairs of floats
            unfit = "complex"
        if unfit:
            where = f"bucket {bucket.index()}, {parameter_at(0, bucket, self._names)}"
            return self.refuse(TypeError(f"{unfit} gradients not supported: {where}"), buffer)
        if self.world_size == 1:
            return self.as_it_is(buffer)
        if self.wire.threaded(buffer.device):
            return self.in_lane(self.exchange, self.encode(bucket), buffer)
        return self.on_stream(self.encode(bucket), bucket)

    def _begin_step(self) -> None:
        self.start()
        self.begin()
        if self.scaler is not None:
            scale = self.scaler.get_scale()
            if self._scale not in (None, scale):
                self.rescale(scale / self._scale)
            self._scale = scale

    # -- what ranks tell each other -----------------------------------------------------------------------------------

    def alarm(self, bucket: dist.GradBucket) -> int:
        """This rank's flag for `check` and `hear`: the place of the first element that is not finite, -1 if all is
        well, -2 if a state was loaded here and the ranks have to compare what they share."""
        place = find_nonfinite(bucket.buffer())
        return _LOADED if place == FINE and self._loaded and bucket.index() == 0 else place

    def hear(self, flag: int, bucket: dist.GradBucket) -> None:
        """Some rank's flag is not -1: raise for whatever is wrong, on every rank. All of them call it, in `exchange`;
        a small all-gather, for a method whose payload has no room for flags."""
        sent, mine = self.wire.bytes, torch.tensor([flag], dtype=torch.int64, device=bucket.buffer().device)
        flags = self.wire.all_gather(mine).view(-1).tolist()
        self.check(flags, bucket)
        if _LOADED in flags:
            shared = {f"{type(self).__name__}'s {name}": value for name, value in self.shared().items()}
            require_agreement(self.wire, shared, AFTER_LOADING)
            self._loaded, self.wire.bytes = False, sent  # a resumed run counts what an uninterrupted one does

    def check(self, flags: Sequence[int] | torch.Tensor, bucket: dist.GradBucket) -> None:
        """Raise NonFiniteGradient if a rank's flag says so. Call it with all ranks' flags, in `exchange`, so that every
        rank raises. Flags on a CUDA device are looked at when the step's last bucket is under way: to look is to wait.
        """
        if isinstance(flags, torch.Tensor) and flags.is_cuda:
            self._deferred.append(lambda: self.check(flags.cpu(), bucket))
            return
        for rank, place in enumerate(torch.as_tensor(flags).tolist()):
            if place >= 0:
                whose = parameter_at(place, bucket, self._names)
                raise NonFiniteGradient(self.wire.ranks[rank], bucket.index(), whose)

    def forgives(self, failure: Exception | None) -> bool:
        """A scaler meets what is not finite on purpose."""
        return self.scaler is not None and isinstance(failure, NonFiniteGradient)

    # -- what others ask ----------------------------------------------------------------------------------------------

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
        """Go on from `state_dict()`. ValueError, and nothing has changed, if it is another rank's or another method's.

        Every rank does it. What ranks must share is compared in the next step: ValueError there, on every rank.
        """
        require_own(saved, self.state_dict())
        self.wire.bytes = int(saved["wire_bytes"])
        self.overflows, self.underflows = int(saved["overflows"]), int(saved["underflows"])
        self._scale = float(saved["scale"]) or None
        self.residuals.load_state_dict(saved["residuals"])
        self._loaded = True

    def close(self) -> None:
        """End the communication thread and give the group back; every rank calls it, after its last step."""
        super().close()
        self.wire.close()

"""What all our DDPs share: equal replicas, `no_sync`, hooks, and the checks that turn a hang into a sentence."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from ddplab._buckets import Bucket
from ddplab._exchange import broadcast_from_first, check_same_model, gather_ints
from ddplab._transport import Transport
from ddplab.schedule import Schedule

Hook = Callable[[Any, Bucket], torch.Future]


class Replica(nn.Module):
    """One rank's copy of a model. Subclasses say which gradients travel together (`_assign`) and when (`_reduce`).

    Args:
        module: the model. Parameters and buffers are overwritten with those of the group's first rank.
        schedule: the all-reduce to run, e.g. `ddplab.ring(4)`; None means the backend's own.
        process_group: the ranks that share the model; None means all.
        find_unused_parameters: the set of parameters that get a gradient may differ between ranks and steps; costs one
            small all-gather a step. Without it the set is agreed in step 1, and a rank that departs from it raises.
        forward_sync_buffers: broadcast the buffers (BatchNorm's statistics) before a forward that follows a
            synchronised one, as torch does.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this rank is outside the group.
        ValueError: no trainable parameter, models that differ between ranks, or a schedule for another number of ranks.
        TypeError: a module or a schedule that is none.
    """

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule | None = None,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        forward_sync_buffers: bool = True,
    ):
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"{type(self).__name__} wraps a torch module, not {module!r}")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise TypeError(f"schedule is a ddplab.Schedule, such as ddplab.ring(4), or None, not {schedule!r}")
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(f"{type(self).__name__} needs torch.distributed: use ddplab.launch or torchrun")
        self.process_group = process_group or dist.group.WORLD
        if dist.get_rank(self.process_group) < 0:
            raise RuntimeError(f"rank {dist.get_rank()} is not in the process group given to {type(self).__name__}")
        check_same_model(module, self.process_group)
        self.module = module
        self.find_unused_parameters, self.forward_sync_buffers = find_unused_parameters, forward_sync_buffers
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._names = {p: name for name, p in module.named_parameters() if p.requires_grad}  # a tied one comes once
        if not self._names:
            raise ValueError("no parameter of this model requires a gradient: there is nothing to synchronise")
        self._trained = self._signature()
        broadcast_from_first([*module.parameters(), *module.buffers()], self.process_group)

        self._transport = Transport(self.process_group, schedule)
        self._hook: Hook | None = None
        self._hook_state: Any = None
        self._step = 1
        self._agreed: dict[Parameter, int] | None = None  # the parameters that get gradients, known after step 1
        self._used: dict[Parameter, None] = {}  # those that got one since the last reduction, in the order they came
        self._armed = False  # did the last forward run with synchronisation on?
        self._pending = False  # has backward produced gradients that nobody has reduced yet?
        # Gradients become ready roughly in the opposite order of forward; step 1 will tell exactly.
        self._build(list(self._names)[::-1])
        on_gradient = weakref.WeakMethod(self._on_gradient)  # a parameter must not keep its DDP alive
        for p in self._names:
            p.register_post_accumulate_grad_hook(lambda p: (call := on_gradient()) and call(p))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} belongs to the ranks of its group and cannot be copied or saved: copy or save "
            "ddp.module, and wrap the copy"
        )

    # -- what the subclasses say ------------------------------------------------------------------------------------

    def _assign(self, params: Sequence[Parameter]) -> list[list[Parameter]]:
        raise NotImplementedError

    def _reduce(self) -> None:
        """Communicate every bucket. Here: one after the other, when backward is over."""
        for bucket in self._buckets:
            self._launch(bucket)
            self._land(bucket)

    def _on_ready(self, p: Parameter) -> None:
        """Called as soon as `p.grad` is complete in a backward that synchronises."""

    # -- the life of a step -----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._pending:
            raise RuntimeError(
                f"the gradients of step {self._step} were never reduced: backward failed half-way, or finish() was not "
                "called after it (NaiveDDP and FlatDDP reduce there: backward(), finish(), optimizer.step())"
            )
        if self.require_forward_param_sync and self.forward_sync_buffers:
            broadcast_from_first(self.module.buffers(), self.process_group)
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            # As in torch, *forward* decides: changing the flag between forward and backward comes too late.
            self._armed = self.require_backward_grad_sync
            if self._signature() != self._trained:
                raise RuntimeError(self._what_changed())
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards run in here stay local; the next synchronised backward sends the accumulated sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let `hook(state, bucket) -> torch.futures.Future` reduce each bucket, as in torch's DDP.

        With a hook nobody else divides: the hook returns the mean. A hook whose collectives start in a callback (as in
        torch's PowerSGD) needs a backend that keeps their order; on gloo several buckets in flight may lock up, in
        torch's DDP too. RuntimeError on a second call.
        """
        if self._hook is not None:
            raise RuntimeError("register_comm_hook can only be called once")
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {hook!r}; the order is register_comm_hook(state, hook)")
        self._hook_state, self._hook = state, hook

    def finish(self) -> None:
        """Make every `p.grad` the mean over the ranks. Call it between backward and the optimizer's step.

        Does nothing where there is nothing left to reduce, so a second call is harmless.
        """
        if not self._armed:
            return
        self._armed = self._pending = False
        try:
            self._reduce()
            self._settle()
        finally:
            self._used.clear()
            self._step += 1

    def _on_gradient(self, p: Parameter) -> None:
        if p.grad.layout != torch.strided:
            raise TypeError(f"sparse gradients not supported: parameter {self._names[p]!r}; build it with sparse=False")
        self._used[p] = None
        if self._armed:
            self._pending = True
            self._on_ready(p)

    def _build(self, params: Sequence[Parameter]) -> None:
        groups = self._assign(params)
        self._buckets = [Bucket(group, i, last=i == len(groups) - 1) for i, group in enumerate(groups)]
        self._results: dict[Bucket, torch.Future] = {}

    def _launch(self, bucket: Bucket) -> None:
        """Start the all-reduce of one bucket. Divide before the sum, not after: a sum may overflow, a mean does not."""
        if self._hook is None:
            bucket.pack(self._used, scale=1 / dist.get_world_size(self.process_group))
            self._results[bucket] = self._transport.all_reduce(bucket.buffer())
            return
        bucket.pack(self._used, scale=1.0)
        self._results[bucket] = self._hook(self._hook_state, bucket)
        if not isinstance(self._results[bucket], torch.Future):
            kind = type(self._results[bucket]).__name__
            raise TypeError(f"a communication hook returns a torch.futures.Future, not {kind}")

    def _land(self, bucket: Bucket) -> None:
        self._results[bucket].wait()

    def _settle(self) -> None:
        """All buckets are back: check who used what, hand the gradients over, and rebuild the buckets after step 1."""
        first = self._agreed is None
        if first or self.find_unused_parameters:
            self._agreed = self._agree()
        elif self._used.keys() != self._agreed.keys():
            raise RuntimeError(self._what_differs())
        for bucket in self._buckets:
            bucket.unpack(self._result(bucket), into=self._agreed)
        if first and not self.find_unused_parameters:
            self._build(list(self._agreed))

    def _result(self, bucket: Bucket) -> torch.Tensor:
        """The reduced values of a bucket. A hook may return anything: a single number would fill all gradients."""
        value, wanted = self._results.pop(bucket).value(), bucket.buffer().numel()
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, torch.Tensor) and value.numel() == wanted:
            return value
        found = f"a tensor of {value.numel()}" if isinstance(value, torch.Tensor) else repr(value)
        raise RuntimeError(
            f"the communication hook's future for bucket {bucket.index()} holds {found}; it must hold the mean of the "
            f"bucket over the ranks, a tensor of {wanted} elements"
        )

    def _agree(self) -> dict[Parameter, int]:
        """The parameters that got a gradient on any rank, in the order in which they became ready on the first."""
        place = {p: i for i, p in enumerate(self._used)}
        table = gather_ints([place.get(p, -1) for p in self._names], self.process_group)
        where: dict[Parameter, int] = {}
        for p, places in zip(self._names, zip(*table, strict=True), strict=True):
            without = [r for r, i in enumerate(places) if i < 0]
            if len(without) == len(places):
                continue
            if without and not self.find_unused_parameters:
                raise RuntimeError(
                    f"parameter {self._names[p]!r} got a gradient on some ranks and none on rank {_list(without)} in "
                    f"step {self._step}: use it in every rank's loss, or pass find_unused_parameters=True"
                )
            where[p] = places[0]
        if not where:
            raise RuntimeError("no parameter got a gradient on any rank: call backward() before finish()")
        return dict(sorted(where.items(), key=lambda item: item[1]))

    # -- the sentences ----------------------------------------------------------------------------------------------

    def _signature(self) -> dict[str, tuple]:
        params = self.module.named_parameters()
        return {name: (id(p), p.shape, p.dtype, p.device) for name, p in params if p.requires_grad}

    def _what_changed(self) -> str:
        now = self._signature()
        names = sorted({n for n in {*now, *self._trained} if now.get(n) != self._trained.get(n)})
        return (
            f"the trainable parameters changed since {type(self).__name__} was built ({_list(names)}): add, replace, "
            "freeze or convert parameters before wrapping the model, or wrap it again"
        )

    def _what_differs(self) -> str:
        lost = [self._names[p] for p in self._agreed if p not in self._used]
        new = [self._names[p] for p in self._used if p not in self._agreed]
        said = [f"{_list(lost)} got none"] * bool(lost) + [f"{_list(new)} got one for the first time"] * bool(new)
        return (
            f"rank {dist.get_rank(self.process_group)}, step {self._step}: the set of parameters that get a gradient "
            f"changed since step 1 ({' and '.join(said)}): pass find_unused_parameters=True if that is meant"
        )


def _list(things: Collection[Any]) -> str:
    shown = [repr(t) if isinstance(t, str) else str(t) for t in things][:5]
    return ", ".join(shown) + (f" and {len(things) - 5} more" if len(things) > 5 else "")

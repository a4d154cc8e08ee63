"""DistributedDataParallel from scratch, in four steps that differ in two answers only.

|                | which gradients travel together? | when do they leave?            |
|----------------|----------------------------------|--------------------------------|
| `NaiveDDP`     | each alone                       | after backward, one by one     |
| `FlatDDP`      | all                              | after backward                 |
| `OverlappedDDP`| each alone                       | as soon as it is ready         |
| `BucketedDDP`  | buckets of about 25 MiB          | as soon as the bucket is full  |

The rest is the same for all (`ddplab._replica`): equal replicas to begin with, the mean at the end, `no_sync`,
communication hooks, and errors instead of hangs. All of them train exactly as `torch.nn.parallel` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from ddplab._buckets import MIB, Bucket, assign_buckets
from ddplab._replica import Replica
from ddplab.transfers import number


class NaiveDDP(Replica):
    """Step 1: when backward is over, all-reduce each gradient by itself. Right, and slow: a latency per tensor.

    All steps train alike:

        for x, y in batches:
            loss_fn(ddp(x), y).backward()
            ddp.finish()        # the gradients of all ranks become their mean
            optimizer.step()
            optimizer.zero_grad()
    """

    def _assign(self, params: Sequence[Parameter]) -> list[list[Parameter]]:
        return [[p] for p in params]


class FlatDDP(Replica):
    """Step 2: when backward is over, all-reduce everything as one flat buffer (one per dtype). No latency to speak of,
    but the link idles during backward and the processor idles during the all-reduce. Needs `finish()`, too."""

    def _assign(self, params: Sequence[Parameter]) -> list[list[Parameter]]:
        return assign_buckets(params, float("inf"), float("inf"))


class OverlappedDDP(Replica):
    """Step 3: all-reduce each gradient as soon as autograd has finished it, while backward works on the next.

    Backward returns when every gradient is the mean, so `finish()` is not needed. Buckets leave in the same order on
    every rank, whatever order their gradients become ready in: two ranks that disagreed would add up different tensors.
    """

    def _build(self, params: Sequence[Parameter]) -> None:
        super()._build(params)
        self._called_back = False  # has autograd been asked to call us at the very end of this backward?
        self._bucket_of: dict[Parameter, Bucket] = {p: b for b in self._buckets for p in b.parameters()}
        self._restart()

    def _restart(self) -> None:
        self._missing = {b: len(b.parameters()) for b in self._buckets}
        self._next = 0  # the bucket whose turn it is

    def _assign(self, params: Sequence[Parameter]) -> list[list[Parameter]]:
        return [[p] for p in params]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        # Backward reaches the outputs first. A gradient may come first from a backward inside it (a checkpointed last
        # layer, reentrant), whose end is not the end.
        for t in tree_leaves(out) if self._armed else ():
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(lambda grad: self._await_end_of_backward())
        return out

    def _await_end_of_backward(self) -> None:
        if self._armed and not self._called_back:
            torch.autograd.Variable._execution_engine.queue_callback(self._on_end_of_backward)
            self._called_back = True

    def _on_end_of_backward(self) -> None:
        self._called_back = False
        if self._pending:  # not so after torch.autograd.grad with respect to inputs
            self.finish()

    def _on_ready(self, p: Parameter) -> None:
        self._await_end_of_backward()
        if p in self._bucket_of:
            self._missing[self._bucket_of[p]] -= 1
        while self._next < len(self._buckets) and self._missing[self._buckets[self._next]] == 0:
            self._launch(self._buckets[self._next])
            self._next += 1

    def _reduce(self) -> None:
        # What has not left yet holds a parameter without a gradient. It leaves all the same, with zeros: other ranks
        # may be waiting for it, and the check that follows says who had nothing to send.
        late, launched = self._buckets[self._next :], self._buckets
        self._restart()
        for bucket in late:
            self._launch(bucket)
        for bucket in launched:
            self._land(bucket)


class BucketedDDP(OverlappedDDP):
    """Step 4: torch's DDP. Gradients travel in buckets: big enough to hide the latency, small enough to leave early.

    Args:
        bucket_cap_mb: a bucket leaves when it holds this many MiB. None means what it means in torch: 25 MiB, and
            1 MiB for the first bucket, so that communication starts early. A number is the cap of *every* bucket,
            the first included: that, too, is what torch does.
        first_bucket_mb: another cap for the first bucket, in MiB.

    In step 1 the buckets follow the parameters backwards; from step 2 on they follow the order in which the first
    rank's gradients became ready in step 1. The sizes equal those of torch's reducer. The other arguments are those of
    all four classes, see `ddplab._replica.Replica`.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float | None = None,
        first_bucket_mb: float | None = None,
        **options: Any,
    ):
        for name, value in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
            if value is not None:
                number(value, f"{name}, in MiB,", above=True)
        default_first = 1 if bucket_cap_mb is None else bucket_cap_mb
        self._cap_bytes = int((25 if bucket_cap_mb is None else bucket_cap_mb) * MIB)
        self._first_bytes = int((default_first if first_bucket_mb is None else first_bucket_mb) * MIB)
        super().__init__(module, **options)

    def _assign(self, params: Sequence[Parameter]) -> list[list[Parameter]]:
        return assign_buckets(params, self._first_bytes, self._cap_bytes)

    def bucket_sizes(self) -> list[int]:
        """Bytes of each bucket, in the order of communication."""
        return [b.buffer().numel() * b.buffer().element_size() for b in self._buckets]

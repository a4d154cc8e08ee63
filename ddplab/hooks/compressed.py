"""The hook around `TwoPhase`: residuals at both ends that survive new buckets and failed steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddplab.hooks.codec import Codec
from ddplab.hooks.feedback import FeedbackState
from ddplab.hooks.finite import find_nonfinite
from ddplab.hooks.residuals import Flat, deliver
from ddplab.hooks.twophase import TwoPhase

Work = tuple[dist.GradBucket, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class CompressedState(FeedbackState):
    """A hook whose buckets travel in the encoding of `codec`, in two phases. `OneBit` and `Int8` say which codec.

    Error feedback holds back, at each worker, what its encodings did not say of its gradients, and at each server, the
    owner of a shard, what the encoding of the mean did not say. At every moment, summed over the steps so far,

        means handed out + mean over ranks of worker residuals + server residuals = means of the gradients

    When DDP rebuilds its buckets, shards change owners. A server residual then goes into the old owner's worker
    residual, times N because the mean divides by it: nothing is lost, nothing needs to be sent.

    Args:
        process_group, error_feedback, module, scaler: see `ddplab.hooks.feedback.FeedbackState`.
    """

    codec: type[Codec]

    def __init__(self, process_group: dist.ProcessGroup | None = None, **common: Any) -> None:
        super().__init__(process_group, **common)
        self.two = TwoPhase(self.codec(), self.wire)
        self._servers: dict[int, Flat] = {}  # by bucket index

    def encode(self, bucket: dist.GradBucket) -> Work:
        gradients = bucket.buffer()
        old = new = server_old = server_new = None
        if self.error_feedback:
            old, new = self.residuals.take(bucket)
            server_old, server_new = self._server(bucket).take()
        rows, finite = self.two.encode(gradients, old, new)
        if not finite or gradients.is_cuda:
            flag = find_nonfinite(gradients)
            if not finite and flag < 0:  # finite by itself, not together with what was held back, or in float32
                flag = max(0, find_nonfinite(gradients.float() + (0.0 if old is None else old)))
            self.two.flag(rows, flag)
        return bucket, rows, new, server_old, server_new

    def exchange(self, work: Work) -> torch.Tensor:
        bucket, rows, worker, old, new = work
        out = bucket.buffer()
        mean = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self.two.exchange(rows, mean, old, new, lambda flags: self.check(flags, bucket))
        return deliver(mean, out, worker)

    def _server(self, bucket: dist.GradBucket) -> Flat:
        """The residual of the shard of this bucket that this rank owns."""
        layout, buffer = self.residuals.layout(bucket), bucket.buffer()
        flat = self._servers.get(bucket.index())
        if flat is not None and flat.layout == layout:
            return flat
        stale = [i for i, other in self._servers.items() if not other.touched]
        if stale:  # the buckets are new ones; the lane may still be writing residuals of those before this one
            self.drain()
        for index in stale:
            self._fold(self._servers.pop(index))
        part = self.two.shard(buffer.numel())
        self._servers[bucket.index()] = flat = Flat(layout, torch.zeros(part.stop - part.start, device=buffer.device))
        return flat

    def _fold(self, flat: Flat) -> None:
        """Hand a server residual to this rank's worker residual."""
        part = self.two.shard(sum(size for _, size in flat.layout))
        at = 0
        for place, size in flat.layout:
            start, stop = max(at, part.start), min(at + size, part.stop)
            if start < stop:
                values = flat.now[start - part.start : stop - part.start]
                self.residuals.add(place, start - at, values * self.world_size)
            at += size

    def begin(self) -> None:
        super().begin()
        for flat in self._servers.values():
            flat.begin()

    def rollback(self) -> None:
        super().rollback()
        for flat in self._servers.values():
            flat.rollback()

    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        for flat in self._servers.values():
            flat.now.mul_(factor)

    def residual_norm(self) -> float:
        """The L2 norm of what this rank holds back, as a worker and as a server; 0.0 without error feedback."""
        worker = super().residual_norm()
        return (worker**2 + sum(float(flat.now.double().square().sum()) for flat in self._servers.values())) ** 0.5

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"servers": {str(i): flat.state_dict() for i, flat in self._servers.items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self._servers = {int(i): Flat.from_state_dict(flat) for i, flat in saved["servers"].items()}

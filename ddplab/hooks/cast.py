"""fp16 and bf16: half the bytes, by a cast. Divide first, cast then.

torch's `fp16_compress_hook` casts before it divides: gradients (7e4, 0) on two ranks become infinite although their
mean, 3.5e4, fits. And it says nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddplab._arguments import choice, flag
from ddplab.hooks.base import HookState, comm_hook
from ddplab.hooks.finite import all_finite


class Cast(HookState):
    """Send gradients in a 16-bit format, and the sum of them too. `Fp16` and `Bf16` say which.

    Paper: Micikevicius et al., Mixed Precision Training (arXiv:1710.03740), for what fp16 holds.
    Bytes: 2 an element instead of 4, so half the wire bytes of the fp32 ring.
    Bias: none on average; each element of the mean is off by up to 2 roundings and N - 1 additions in 16 bits.
    Memory: one 16-bit copy of each bucket in flight; nothing stays.
    Loses when: the link is fast and the cast costs more than it saves; gradients leave the format's range.

    Args:
        on_overflow: "count": elements of the mean that the format cannot hold become infinite and are counted in
            `overflows`. "raise": OverflowError on every rank instead. The same on all ranks.
        count_underflows: count in `underflows` the elements of this rank's share, gradient / N, that are not zero and
            become zero. It costs a pass over the bucket.
        process_group, module, scaler: see `ddplab.hooks.base.HookState`.
    """

    dtype: torch.dtype

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        on_overflow: str = "count",
        count_underflows: bool = False,
        module: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.on_overflow = choice(on_overflow, "on_overflow", ("count", "raise"))
        self.count_underflows = flag(count_underflows, "count_underflows")
        super().__init__(process_group, module=module, scaler=scaler)

    def options(self) -> dict[str, Any]:
        return super().options() | {"on_overflow": self.on_overflow}

    def encode(self, bucket: dist.GradBucket) -> tuple[dist.GradBucket, torch.Tensor, int]:
        gradients = bucket.buffer()
        share = gradients / self.world_size  # in the gradient's dtype
        alarm = self.alarm(bucket)
        half = share.to(self.dtype)
        if self.count_underflows:
            self.underflows += int(((half == 0) & (gradients != 0)).sum())
        return bucket, half, alarm

    def exchange(self, work: tuple[dist.GradBucket, torch.Tensor, int]) -> torch.Tensor:
        bucket, half, alarm = work
        mean = bucket.buffer().copy_(self.wire.all_reduce(half))
        if not all_finite(mean):  # every rank sees it, so every rank asks whose it is
            bad = int((~torch.isfinite(mean)).sum())
            self.hear(alarm, bucket)
            if self.on_overflow == "raise":
                raise OverflowError(f"{bad} elements of the mean of bucket {bucket.index()} do not fit {self.dtype}")
            self.overflows += bad
        return mean


class Fp16(Cast):
    """`Cast` to fp16: 11 bits of precision, from 6e-8 (subnormal) to 65504. An element of gradient / N under 3e-8 is 0:
    2e-8 on two ranks gives 0."""

    dtype = torch.float16


class Bf16(Cast):
    """`Cast` to bfloat16: 8 bits of precision and the range of float32, so next to nothing overflows or underflows."""

    dtype = torch.bfloat16


def fp16(process_group: dist.ProcessGroup | None = None, **options: Any) -> tuple[Fp16, Any]:
    """`ddp.register_comm_hook(*ddplab.fp16())`. Options: those of `Cast`."""
    return Fp16(process_group, **options), comm_hook


def bf16(process_group: dist.ProcessGroup | None = None, **options: Any) -> tuple[Bf16, Any]:
    """`ddp.register_comm_hook(*ddplab.bf16())`. Options: those of `Cast`."""
    return Bf16(process_group, **options), comm_hook


fp16_hook = bf16_hook = comm_hook

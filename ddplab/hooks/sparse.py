"""Top-k and random-k: send few elements, keep the others for later.

Both send k = max(1, int(ratio n)) of a bucket's n elements and hold back the rest (error feedback), so that an element
waits until it is large enough, or until its turn. They differ in who knows which elements travel. With top-k only the
sender does: indices travel too, and everybody has to hear everybody. With random-k everybody draws the same indices:
only values travel, and values of the same elements can be summed on the way, as in any all-reduce.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ddplab.hooks.base import FINE, comm_hook
from ddplab.hooks.feedback import FeedbackState
from ddplab.hooks.finite import find_nonfinite
from ddplab.hooks.residuals import deliver
from ddplab.transfers import count, number

_ALIGN = 8  # bytes: each part of a message starts at a multiple of the largest element's size


def kept(n: int, ratio: float) -> int:
    """How many of `n` elements travel: max(1, int(n ratio)), and 0 of 0; a function of sizes alone, so ranks agree."""
    return min(n, max(1, int(n * ratio)))


def index_dtype(n: int) -> torch.dtype:
    """The type of an index of n elements: int32, or int64 where n needs it."""
    return torch.int32 if n <= torch.iinfo(torch.int32).max else torch.int64


def largest(flat: torch.Tensor, k: int) -> torch.Tensor:
    """Indices (`index_dtype`) of the k elements of largest magnitude of a 1-D tensor, in no particular order."""
    return flat.abs().topk(k, sorted=False).indices.to(index_dtype(flat.numel()))


def drawn(n: int, k: int, seed: int, draw: int) -> torch.Tensor:
    """k different indices below n, ascending, int64: the same on all ranks for the same seed and number of the draw."""
    return torch.from_numpy(np.sort(np.random.default_rng([seed, draw]).choice(n, k, replace=False, shuffle=False)))


class _Sparse(FeedbackState):
    """What top-k and random-k share: the ratio."""

    def __init__(self, ratio: float, process_group: dist.ProcessGroup | None, **common: Any) -> None:
        self.ratio = number(ratio, "ratio, the share of the elements that travel,", most=1.0, above=True)
        super().__init__(process_group, **common)

    def options(self) -> dict[str, Any]:
        return super().options() | {"ratio": self.ratio}


class TopK(_Sparse):
    """Each rank sends its k largest elements, as (index, value); all-gather, then sum.

    Paper: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory (arXiv:1809.07599); Lin et al., Deep Gradient
        Compression (arXiv:1712.01887), which adds momentum correction, clipping and a warm-up of the ratio (not here).
    Bytes: 8 an element that travels (4 index, 4 value; 6 with 16-bit gradients), to each of N - 1 others: 8 ratio
        (N - 1) an element of the bucket. The fp32 ring sends 8 (N - 1) / N, so the wire carries N ratio of its bytes.
    Bias: yes, each step: small elements do not travel. One step leaves at most 1 - k/n of ||x||^2. What is left out is
        held back, so over time everything arrives, late.
    Memory: 8 bytes an element (residual, and the one before it for a step that fails); messages of all ranks.
    Loses when: N ratio comes near 1: with 100 ranks 1% sends as much as the fp32 ring. Selecting costs a pass through
        all elements, so fast links lose. Late elements hurt momentum: try a larger ratio first.

    Args:
        ratio: share of each bucket's elements that travel, above 0, at most 1: k = max(1, int(n ratio)).
        process_group, error_feedback, module, scaler: see `FeedbackState`. Without error feedback small elements may
            never arrive.

    Raises ValueError if ratio makes no sense or differs between ranks.
    """

    def __init__(self, ratio: float = 0.01, process_group: dist.ProcessGroup | None = None, **common: Any) -> None:
        super().__init__(ratio, process_group, **common)

    def encode(self, bucket: dist.GradBucket) -> tuple[dist.GradBucket, torch.Tensor, torch.Tensor]:
        gradients = bucket.buffer()
        flag = torch.tensor([find_nonfinite(gradients)], device=gradients.device)
        corrected = self.corrected(bucket)
        index = largest(corrected, kept(corrected.numel(), self.ratio))
        values = corrected[index].to(gradients.dtype)
        corrected[index] -= values.float()  # 0, but for what a 16-bit value rounds off
        return bucket, corrected, _pack(flag, index, values)

    def exchange(self, work: tuple[dist.GradBucket, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        bucket, residual, message = work
        gradients = bucket.buffer()
        n = gradients.numel()
        k = kept(n, self.ratio)
        parts = [(torch.int64, 1), (index_dtype(n), k), (gradients.dtype, k)]
        messages = [_unpack(row, parts) for row in self.wire.all_gather(message)]
        self.check(torch.cat([flag for flag, _, _ in messages]), bucket)
        mean = torch.zeros_like(gradients, dtype=torch.float32)
        # Rank after rank: a rank's indices differ, so CUDA's atomic additions have no choice of order either.
        for _, index, values in messages:
            mean.index_add_(0, index, values.float(), alpha=1 / self.world_size)
        return deliver(mean, bucket.buffer(), residual if self.error_feedback else None)


class RandomK(_Sparse):
    """All ranks send the same k elements, drawn at random for each bucket and step; all-reduce of their values.

    Paper: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory (arXiv:1809.07599), its rand_k; that indices need not
        travel: Vogels, Karimireddy and Jaggi, PowerSGD (arXiv:1905.13727), its baseline Random K.
    Bytes: 4 an element that travels, as a ring's: 8 ratio (N - 1) / N an element of the bucket, so the wire carries
        `ratio` of the fp32 ring's bytes at any N. Values are float32 whatever the gradients are: a sum in 16 bits would
        round, and nobody would hold that back.
    Bias: yes, each step: the mean is not scaled up by 1 / ratio, which would be right on average and far too noisy.
        One step leaves 1 - k/n of ||x||^2 on average. What is left out is held back; an element waits 1 / ratio steps.
    Memory: 8 bytes an element (residual, and the one before it for a step that fails).
    Loses when: few elements hold most of the gradient, which top-k would send first; the wait makes gradients stale.

    Args:
        ratio: share of each bucket's elements that travel, above 0, at most 1: k = max(1, int(n ratio)).
        seed: of the draws, the same on all ranks.
        process_group, error_feedback, module, scaler: see `FeedbackState`. Without error feedback gradients are `ratio`
            times too small.

    Raises ValueError if ratio or seed make no sense or differ between ranks; in a step, on every rank, if the ranks
    would draw differently, which they do after a checkpoint was loaded on some of them only.
    """

    def __init__(
        self, ratio: float = 0.01, process_group: dist.ProcessGroup | None = None, *, seed: int = 0, **common: Any
    ) -> None:
        self.seed, self._draws, self._begun_at = count(seed, "seed", least=0, error=ValueError), 0, 0
        super().__init__(ratio, process_group, **common)

    def options(self) -> dict[str, Any]:
        return super().options() | {"seed": self.seed}

    def shared(self) -> dict[str, Any]:
        return {"seed": self.seed, "number of draws": self._begun_at}

    def begin(self) -> None:
        super().begin()
        self._begun_at = self._draws  # the lane compares it, while draws for later buckets go on

    def encode(self, bucket: dist.GradBucket) -> tuple[dist.GradBucket, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        alarm = self.alarm(bucket)
        corrected = self.corrected(bucket)
        n = corrected.numel()
        index = drawn(n, kept(n, self.ratio), self.seed, self._draws).to(corrected.device)
        self._draws += 1
        # One value more says that something is wrong: the draw may well miss an element that is NaN.
        values = corrected.new_full((len(index) + 1,), 0.0 if alarm == FINE else float("nan"))
        values[:-1] = corrected[index] / self.world_size
        corrected[index] = 0
        return bucket, corrected, index, values, alarm

    def exchange(self, work: tuple[dist.GradBucket, torch.Tensor, torch.Tensor, torch.Tensor, int]) -> torch.Tensor:
        bucket, residual, index, values, alarm = work
        self.wire.all_reduce(values)
        if not bool(values[-1].isfinite()):
            self.hear(alarm, bucket)
        mean = torch.zeros_like(residual)
        mean[index] = values[:-1]
        return deliver(mean, bucket.buffer(), residual if self.error_feedback else None)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"draws": self._draws, "seed": self.seed}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self._draws, self.seed = int(saved["draws"]), int(saved["seed"])


def _pack(*parts: torch.Tensor) -> torch.Tensor:
    """Tensors of any dtypes as one message of bytes."""
    padded = [nn.functional.pad(p.view(torch.uint8), (0, -p.nbytes % _ALIGN)) for p in parts]
    return torch.cat(padded)


def _unpack(message: torch.Tensor, parts: list[tuple[torch.dtype, int]]) -> list[torch.Tensor]:
    """The tensors of these dtypes and lengths in a message of `_pack`."""
    tensors, at = [], 0
    for dtype, length in parts:
        size = length * dtype.itemsize
        tensors.append(message[at : at + size].clone().view(dtype))
        at += size + -size % _ALIGN
    return tensors


def topk(ratio: float = 0.01, process_group: dist.ProcessGroup | None = None, **options: Any) -> tuple[TopK, Any]:
    """`ddp.register_comm_hook(*ddplab.topk(ratio=0.01))`. Options: those of `TopK`."""
    return TopK(ratio, process_group, **options), comm_hook


def randomk(ratio: float = 0.01, process_group: dist.ProcessGroup | None = None, **options: Any) -> tuple[RandomK, Any]:
    """`ddp.register_comm_hook(*ddplab.randomk(ratio=0.01))`. Options: those of `RandomK`."""
    return RandomK(ratio, process_group, **options), comm_hook


topk_hook = randomk_hook = comm_hook

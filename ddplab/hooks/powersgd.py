"""PowerSGD: send two thin matrices P and Q instead of a gradient matrix M, whose product is close to it.

One step of power iteration, shared by all ranks: P = mean of M Q, orthonormalised; Q = mean of M^T P; the gradient is
P Q^T. Both means are sums of the same places on all ranks, so an ordinary all-reduce carries them. Q is where the next
step starts (warm start): over steps it turns towards the directions in which gradients are large.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ddplab._arguments import flag
from ddplab.hooks.agreement import digest
from ddplab.hooks.base import FINE, comm_hook
from ddplab.hooks.feedback import FeedbackState
from ddplab.hooks.residuals import deliver
from ddplab.transfers import count

_TOO_LARGE = "gradients of bucket {} are too large: a product or sum of them left float32's range"


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """A gradient as a matrix: (output features, everything else), as in the paper. 1-D is (n, 1), a number (1, 1)."""
    return (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)


def factor_rank(shape: torch.Size, rank: int) -> int:
    """The rank with which a parameter is compressed; 0 if P and Q would hold more than half as many elements as it."""
    rows, columns = matrix_shape(shape)
    r = min(rank, rows, columns)
    return r if 2 * r * (rows + columns) <= rows * columns else 0


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis, (n, r), of the columns of an (n, r) matrix, n >= r.

    By Householder's QR, which gives r orthonormal columns whatever the matrix is: also where columns depend on each
    other or are zero, for which Gram-Schmidt would divide by zero.
    """
    return torch.linalg.qr(matrix.double()).Q.to(matrix.dtype)  # thin, so float64 costs little: P P^T is a projection


class _Part(NamedTuple):
    """One parameter of a bucket: elements `lo` to `hi`; `r` is 0 where it travels as it is."""

    place: int
    lo: int
    hi: int
    rows: int
    columns: int
    r: int

    def matrix(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.lo : self.hi].view(self.rows, self.columns)


class _Work(NamedTuple):
    bucket: dist.GradBucket
    parts: list[_Part]
    corrected: torch.Tensor  # gradient plus residual, float32, in the place of the next residual
    first: torch.Tensor  # what the first all-reduce sums: all P, the uncompressed parameters, one value for the flag
    alarm: int


class PowerSGD(FeedbackState):
    """Rank-r approximation of each gradient matrix, with warm start and error feedback.

    Paper: Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed
        Optimization (arXiv:1905.13727).
    Bytes: r (rows + columns) float32 a matrix instead of rows x columns, as in a ring: a 512 x 4608 convolution at rank
        4 sends 1/115 of the fp32 ring's bytes. 1-D parameters, and matrices whose factors would hold more than half
        their elements, travel uncompressed in the all-reduce of P.
    Bias: yes, each step: only r directions travel. On each rank what is left out is what an orthogonal projection
        leaves, never longer than what came in; it is held back for the next steps.
    Memory: 8 bytes an element (residual, and the one before it for a step that fails), and Q: columns x r a matrix.
    Loses when: matrices are small or the link is fast: it costs 6 r flops an element and a QR a matrix, and two
        all-reduces one after the other for each bucket, so latency counts twice. Gradients without a few large
        directions need a larger rank.

    What is held back on a rank is M - P P^T M, of its own M. The authors' code and torch's `powerSGD_hook` hold back
    M - P Q^T with the *mean* Q. Both have the same mean over the ranks, so both lose nothing; but the second also keeps
    what ranks differ by inside the span of P, which nobody ever sends. With noisy gradients it grows as the square root
    of the steps; ours stops growing, because P comes round to all directions that the mean has.

    Args:
        rank: r, the rank of the approximation. The paper uses 1 to 4 for images, up to 32 for language.
        warm_start: start from the last step's Q; else from a new random one, the same on all ranks.
        seed: of the random Q, the same on all ranks.
        process_group, error_feedback, module, scaler: see `FeedbackState`.

    Raises ValueError if rank or seed make no sense or differ between ranks; in a step, on every rank, if the ranks'
    factors Q differ, which they do after a checkpoint was loaded on some of them only.
    """

    def __init__(
        self,
        rank: int = 4,
        process_group: dist.ProcessGroup | None = None,
        *,
        warm_start: bool = True,
        seed: int = 0,
        **common: Any,
    ) -> None:
        self.matrix_rank = count(rank, "PowerSGD's rank", error=ValueError)
        self.seed = count(seed, "seed", least=0, error=ValueError)
        self.warm_start = flag(warm_start, "warm_start")
        super().__init__(process_group, **common)
        self._place: dict[torch.Tensor, int] = {}  # in the order in which parameters first came
        self._q: dict[int, torch.Tensor] = {}  # by place, float32 (columns, r)
        self._before: dict[int, torch.Tensor | None] = {}  # the Q that this step replaced
        self._steps = 0

    def options(self) -> dict[str, Any]:
        return super().options() | {"rank": self.matrix_rank, "warm_start": self.warm_start, "seed": self.seed}

    def shared(self) -> dict[str, Any]:
        factors = digest(q for _, q in sorted(self._q.items()))
        return {"seed": self.seed, "number of steps": self._steps, "factors Q": factors}

    def encode(self, bucket: dist.GradBucket) -> _Work:
        alarm = self.alarm(bucket)
        parts, corrected = self._parts(bucket), self.corrected(bucket)
        pieces = [(part.matrix(corrected) @ self._query(part, corrected.device)).view(-1) for part in parts if part.r]
        pieces += [corrected[part.lo : part.hi] for part in parts if not part.r]
        # Divided before the sum, as DDP does. One value more says that something is to be heard.
        first = torch.cat([*pieces, corrected.new_zeros(1)]).div_(self.world_size)
        first[-1] = 0.0 if alarm == FINE else float("nan")
        return _Work(bucket, parts, corrected, first, alarm)

    def exchange(self, work: _Work) -> torch.Tensor:
        bucket, parts, corrected, first, alarm = work
        self.wire.all_reduce(first)
        if not bool(first.isfinite().all()):
            self.hear(alarm, bucket)
            if not bool(first[:-1].isfinite().all()):
                raise OverflowError(_TOO_LARGE.format(bucket.index()))
        matrices, result, at = [part for part in parts if part.r], bucket.buffer(), 0
        left = []
        for part in matrices:
            end = at + part.rows * part.r
            left.append(orthonormal(first[at:end].view(part.rows, part.r)))
            at = end
        means = {part: first[lo:hi] for part, lo, hi in _spans([p for p in parts if not p.r], at)}
        right = [part.matrix(corrected).T @ p for part, p in zip(matrices, left, strict=True)]
        for part, p, q in zip(matrices, left, right, strict=True):
            part.matrix(corrected).addmm_(p, q.T, alpha=-1)
        for part in means:
            corrected[part.lo : part.hi] = 0
        second = torch.cat([q.reshape(-1) for q in right]) if right else first[:0]
        self.wire.all_reduce(second.div_(self.world_size))
        if not bool(second.isfinite().all()):
            raise OverflowError(_TOO_LARGE.format(bucket.index()))
        for (part, lo, hi), p in zip(_spans(matrices, 0, right=True), left, strict=True):
            q = second[lo:hi].view(part.columns, part.r)
            self._before.setdefault(part.place, self._q.get(part.place))
            self._q[part.place] = q.clone()
            means[part] = (p @ q.T).view(-1)
        for part, mean in means.items():
            held = corrected[part.lo : part.hi] if self.error_feedback else None
            deliver(mean, result[part.lo : part.hi], held)
        return result

    def begin(self) -> None:
        super().begin()
        self._before.clear()
        self._steps += 1

    def rollback(self) -> None:
        super().rollback()
        for place, q in self._before.items():
            if q is None:
                self._q.pop(place, None)
            else:
                self._q[place] = q
        self._before.clear()

    def _parts(self, bucket: dist.GradBucket) -> list[_Part]:
        parts, at = [], 0
        for p in bucket.parameters():
            place = self._place.setdefault(p, len(self._place))
            parts.append(
                _Part(place, at, at + p.numel(), *matrix_shape(p.shape), factor_rank(p.shape, self.matrix_rank))
            )
            at += p.numel()
        return parts

    def _query(self, part: _Part, device: torch.device) -> torch.Tensor:
        """Q to start from, orthonormal, so that neither tiny nor huge gradients shrink or swell it over the steps."""
        q = self._q.get(part.place) if self.warm_start else None
        if q is not None and q.shape != (part.columns, part.r):
            raise ValueError(
                f"the loaded factor of parameter {part.place} (in the order of the first buckets) has the shape "
                f"{tuple(q.shape)}, not {(part.columns, part.r)}: it was saved with another model"
            )
        if q is None or not bool(q.any(dim=0).all()):  # after a zero gradient all directions are equally good
            fresh = np.random.default_rng([self.seed, part.place, self._steps])
            random = torch.from_numpy(fresh.standard_normal((part.columns, part.r), dtype=np.float32)).to(device)
            q = random if q is None else torch.where(q.any(dim=0), q, random)
        return orthonormal(q.to(device))

    def state_dict(self) -> dict[str, Any]:
        factors = {str(place): q.clone() for place, q in sorted(self._q.items())}
        mine = {"factors": factors, "steps": self._steps, "seed": self.seed, "matrix_rank": self.matrix_rank}
        return super().state_dict() | mine

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        before = saved.get("matrix_rank", self.matrix_rank) if isinstance(saved, dict) else self.matrix_rank
        if before != self.matrix_rank:
            raise ValueError(
                f"PowerSGD's rank was {before} when this state was saved and is {self.matrix_rank} now: its factors do "
                "not fit"
            )
        super().load_state_dict(saved)
        self._q = {int(place): q.clone() for place, q in saved["factors"].items()}
        self._steps, self.seed = int(saved["steps"]), int(saved["seed"])


def _spans(parts: list[_Part], at: int, right: bool = False) -> list[tuple[_Part, int, int]]:
    """Where each part lies in a flat tensor of parts side by side, from `at` on: whole, or `right` factors only."""
    spans = []
    for part in parts:
        end = at + (part.columns * part.r if right else part.hi - part.lo)
        spans.append((part, at, end))
        at = end
    return spans


def powersgd(rank: int = 4, process_group: dist.ProcessGroup | None = None, **options: Any) -> tuple[PowerSGD, Any]:
    """`ddp.register_comm_hook(*ddplab.powersgd(rank=4))`. Options: those of `PowerSGD`."""
    return PowerSGD(rank, process_group, **options), comm_hook


powersgd_hook = comm_hook

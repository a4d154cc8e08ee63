"""Gradient accumulation that equals the big batch: one synchronisation per window of micro-batches.

    for step in accumulate(ddp, loader, every=4):
        with step:                                  # holds no_sync() for forward *and* backward where it is due
            x, y = step.batch
            step.backward(loss_fn(ddp(x), y))       # scales the loss, calls backward
        if step.syncs:                              # the last micro-batch of a window: all ranks hold the same gradient
            step.update(optimizer, max_norm=1.0)

Accumulation saves collectives; it does not overlap anything. What is easy to get wrong, and is right here: which
micro-batch synchronises (the last of a window, also in the short window at the end), what the loss is divided by (the
window's real samples, on all ranks), that `break` leaves nothing switched off, and that ranks with different numbers
of batches hear of it instead of waiting for each other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddplab._exchange import gather_ints
from ddplab._insync import assert_grads_in_sync
from ddplab._microbatch import Step, batch_size

__all__ = ["Accumulation", "Step", "accumulate", "assert_grads_in_sync"]


def accumulate(
    model: nn.Module,
    batches: Iterable[Any],
    every: int,
    *,
    mean_over: str | None = "samples",
    size: Callable[[Any], int] | None = None,
    drop_last: bool = False,
    uneven: str = "error",
    scaler: torch.amp.GradScaler | None = None,
    check_finite: bool = True,
) -> Accumulation:
    """Iterate over `batches` in windows of `every` micro-batches; each yielded `Step` is one micro-batch.

    Args:
        model: torch's DistributedDataParallel, one of `ddplab`'s, or a plain module in a single process. Its gradients
            are cleared at the start of each window.
        batches: this rank's micro-batches. One window is held in memory at a time.
        every: micro-batches per optimizer step, at least 1, the same on all ranks.
        mean_over: what the window's gradient is the mean of. "samples": every sample of the window on every rank counts
            the same, so that it equals one process on the big batch, for a loss that is the mean over its micro-batch.
            "batches": every micro-batch counts the same. None: the sum over the window, the mean over the ranks.
        size: how many samples (or tokens) a batch holds. Default: the first dimension of its first tensor.
        drop_last: leave out the last window when it is short; `.dropped` counts the micro-batches of this rank.
        uneven: "error", or "join": a rank that has run out repeats its last batch with weight 0 until all are done.
        scaler: a `torch.amp.GradScaler`, applied by `step.backward` and `step.update`.
        check_finite: exchange, before a window's reduction, whether a loss was NaN or infinite.

    Raises:
        ValueError: bad `every` or options; `static_graph` with every > 1; while iterating, on all ranks: no batches, or
            different numbers of batches.
        TypeError: no model, or an unwrapped one; nothing to iterate over; a batch of unknown size.
    """
    return Accumulation(model, batches, every, mean_over, size or batch_size, drop_last, uneven, scaler, check_finite)


class Accumulation:
    """What `accumulate` returns. Iterate over it; afterwards `.dropped` says how many micro-batches were left out."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        every: int,
        mean_over: str | None,
        size: Callable[[Any], int],
        drop_last: bool,
        uneven: str,
        scaler: torch.amp.GradScaler | None,
        check_finite: bool,
    ):
        if isinstance(every, bool) or not hasattr(every, "__index__") or not 1 <= operator.index(every) < 2**31:
            raise ValueError(f"every must be a whole number of micro-batches, 1 or more; got every={every!r}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"accumulate takes the wrapped model first, then its batches, not {type(model).__name__}")
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise TypeError(f"batches is something to iterate over, such as a DataLoader, not {batches!r}")
        if not (scaler is None or hasattr(scaler, "scale") and hasattr(scaler, "unscale_")):
            raise TypeError(f"scaler is a torch.amp.GradScaler, not {scaler!r}")
        if mean_over not in ("samples", "batches", None):
            raise ValueError(f"mean_over must be 'samples', 'batches' or None, got {mean_over!r}")
        if uneven not in ("error", "join"):
            raise ValueError(f"uneven must be 'error' or 'join', got {uneven!r}")
        if every > 1 and getattr(model, "static_graph", False):
            raise ValueError(
                f"static_graph=True with every={every} is not supported: torch's reducer fails in the first backward "
                "under no_sync. Wrap the model without static_graph, or use every=1"
            )
        self.ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.group = getattr(model, "process_group", None)
        if hasattr(model, "no_sync"):
            self.ranks = dist.get_world_size(self.group)
        elif self.ranks > 1:
            raise TypeError(f"{type(model).__name__} has no no_sync(): wrap it in DistributedDataParallel first")
        self.model, self.batches, self.every, self.mean_over = model, batches, operator.index(every), mean_over
        self.size, self.drop_last, self.join = size, drop_last, uneven == "join"
        self.scaler, self.check_finite, self.dropped = scaler, check_finite, 0

    def exchange(self, *mine: int) -> list[list[int]]:
        """Every rank's integers, in rank order."""
        return gather_ints(mine, self.group) if self.ranks > 1 else [list(mine)]

    def __iter__(self) -> Iterator[Step]:
        self.dropped = done = 0
        source, last, window = iter(self.batches), None, 0
        while True:
            found = list(islice(source, self.every))
            sizes = [self._size(batch) if self.mean_over == "samples" else 1 for batch in found]
            lengths, total = self._agree(window, done, len(found), sum(sizes))
            if max(lengths) == 0:
                return
            if self.drop_last and min(lengths) < self.every:
                self.dropped = len(found)
                return
            joining = not found
            steps = [last] if joining else found
            units = [0] if joining else sizes
            self.model.zero_grad(set_to_none=True)
            losses: list[torch.Tensor] = []
            for i, (batch, unit) in enumerate(zip(steps, units, strict=True)):
                weight = float(unit) if self.mean_over is None else self.ranks * unit / max(1, total)
                step = Step(self, batch, done + i, window, i == len(steps) - 1, weight, losses)
                yield step
                if not step.done:
                    raise RuntimeError(
                        f"micro-batch {step.index} ended without step.backward(loss): with loss.backward() the loss is "
                        "not scaled, and without any backward the other ranks wait"
                    )
            done, last, window = done + len(found), steps[-1], window + 1

    def _size(self, batch: Any) -> int:
        n = self.size(batch)
        if not hasattr(n, "__index__") or operator.index(n) < 0:
            raise TypeError(f"size(batch) must return a whole number, 0 or more; got {n!r}")
        return operator.index(n)

    def _agree(self, window: int, done: int, here: int, samples: int) -> tuple[list[int], int]:
        """Every rank's number of micro-batches in this window, and all their samples. One small all-gather."""
        known = len(self.batches) if hasattr(self.batches, "__len__") else -1
        table = self.exchange(here, samples, done, known, self.every)
        lengths, sizes, before, hints, everies = (list(column) for column in zip(*table, strict=True))
        if len(set(everies)) > 1:
            raise ValueError(f"every differs between ranks: {_by_rank(everies)}")
        if window == 0 and (max(lengths) == 0 or self.join and min(lengths) == 0):
            raise ValueError(f"no batches on {'any rank' if max(lengths) == 0 else _ranks_with(lengths, 0)}")
        counts = hints if window == 0 and min(hints) >= 0 else [b + n for b, n in zip(before, lengths, strict=True)]
        if len(set(counts)) > 1 and not self.join:
            more = "" if counts is hints else " or more"
            raise ValueError(
                f"the ranks have different numbers of batches ({_by_rank(counts)}{more}): those with more would "
                "wait for the others in an all-reduce. Give every rank the same number, or use uneven='join'"
            )
        return lengths, sum(sizes)


def _by_rank(values: Iterable[int]) -> str:
    return ", ".join(f"rank {r}: {v}" for r, v in enumerate(values))


def _ranks_with(values: list[int], wanted: int) -> str:
    return "rank " + ", ".join(str(r) for r, v in enumerate(values) if v == wanted)

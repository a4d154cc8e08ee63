"""One micro-batch of a window: its context, its scaled backward, and the optimizer's step at the window's end."""

from __future__ import annotations

from contextlib import ExitStack
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ddplab.accumulate import Accumulation


class Step:
    """One micro-batch. Run forward and `backward` inside `with step:`."""

    def __init__(
        self,
        owner: Accumulation,
        batch: Any,
        index: int,
        window: int,
        syncs: bool,
        weight: float,
        losses: list[torch.Tensor],
    ):
        self.batch = batch
        self.index = index  # micro-batches that this rank has seen before this one
        self.window = window
        self.syncs = syncs  # the last of its window: after backward all ranks hold the same gradients
        self.weight = weight  # what the loss is multiplied with before backward
        self.done = False
        self._owner, self._losses, self._open, self._forwards = owner, losses, None, 0
        self._held = False  # did the last forward run under a no_sync()?

    def __enter__(self) -> Step:
        if self._open is not None or self.done:
            raise RuntimeError(f"micro-batch {self.index} was entered before")
        with ExitStack() as stack:
            if not self.syncs and hasattr(self._owner.model, "no_sync"):
                stack.enter_context(self._owner.model.no_sync())
            stack.callback(self._owner.model.register_forward_hook(self._on_forward).remove)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()
        self._open = None

    def _on_forward(self, *_: object) -> None:
        self._forwards += 1
        self._held = not getattr(self._owner.model, "require_backward_grad_sync", True)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of `weight * loss`, for a scalar loss whose forward ran inside this `with step:`.

        FloatingPointError, on all ranks and before anything is reduced, if a loss of the window was NaN or infinite.
        """
        if self._open is None:
            raise RuntimeError("call step.backward inside `with step:`: forward and backward both belong there")
        if self.done:
            raise RuntimeError(f"micro-batch {self.index}: second backward; add the losses and call it once")
        if not self._forwards:
            raise RuntimeError(
                "this loss comes from a forward outside `with step:` (or from model.module): there no_sync() was off, "
                "and DDP decides in forward whether it synchronises"
            )
        if self.syncs and self._held:
            raise RuntimeError(
                f"micro-batch {self.index} ends its window, but its forward ran under a no_sync() of yours: nothing "
                "would be reduced. Leave no_sync() to `with step:`"
            )
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"the loss must be a tensor, for backward, not {loss!r}: leave out .item()")
        if loss.numel() != 1:
            raise ValueError(f"the loss must be one number, got a tensor of shape {tuple(loss.shape)}")
        if not loss.requires_grad:
            raise ValueError("the loss has no gradient: it was detached, or forward ran under torch.no_grad()")
        self._losses.append(loss.detach())
        if self.syncs and self._owner.check_finite:
            self._check_finite()
        loss = loss * self.weight
        (loss if self._owner.scaler is None else self._owner.scaler.scale(loss)).backward()
        if self.syncs and hasattr(self._owner.model, "finish"):
            self._owner.model.finish()
        self.done = True

    def update(self, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> torch.Tensor | None:
        """Clip to `max_norm` if given, step the optimizer, clear its gradients. Returns the norm before clipping.

        RuntimeError anywhere but after a window's last micro-batch: until then each rank holds its own partial sum, and
        a clip or a step would take the ranks apart. ValueError for a max_norm that is not above 0: it would turn the
        gradient round.
        """
        if not (self.syncs and self.done):
            raise RuntimeError(f"micro-batch {self.index}: ranks do not agree yet; update only `if step.syncs`")
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"update takes a torch optimizer, not {optimizer!r}")
        if max_norm is not None and (not isinstance(max_norm, Real) or not max_norm > 0):
            raise ValueError(f"max_norm must be a positive number or None, not {max_norm!r}")
        scaler = self._owner.scaler
        norm = None
        if max_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _check_finite(self) -> None:
        """One small all-gather: the first micro-batch of this window whose loss is not a finite number, if any."""
        finite = torch.stack([x.isfinite().reshape(()) for x in self._losses]).tolist()
        first = self.index - len(finite) + 1
        bad = first + finite.index(False) if False in finite else -1
        nan = bad >= 0 and bool(self._losses[bad - first].isnan())
        found = [(r, i, n) for r, (i, n) in enumerate(self._owner.exchange(bad, nan)) if i >= 0]
        if found:
            said = "; ".join(f"rank {r}, micro-batch {i}: {'nan' if n else 'inf'}" for r, i, n in found)
            raise FloatingPointError(f"the loss is not a finite number ({said}); no gradient was reduced")


def batch_size(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor or array; 1 for a number or one of no dimension."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    while isinstance(batch, (tuple, list)) and batch and not isinstance(batch[0], (int, float)):
        batch = batch[0]
    if isinstance(shape := getattr(batch, "shape", None), tuple):  # torch's, numpy's
        return shape[0] if shape else 1
    if isinstance(batch, (int, float)):
        return 1
    raise TypeError(f"cannot tell how many samples a {type(batch).__name__} holds: pass size=lambda batch: ...")

"""Which gradients travel together: buckets, and torch's rule for filling them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch.nn import Parameter

MIB = 2**20


def assign_buckets(params: Iterable[Parameter], first_bytes: float, cap_bytes: float) -> list[list[Parameter]]:
    """Cut `params`, in the order given, into buckets as torch's reducer does.

    A bucket closes as soon as it holds `cap_bytes` or more (the first of each dtype already at `first_bytes`), so the
    cap is soft: a large tensor overshoots it. Each dtype and device fills buckets of its own. Full buckets come in the
    order in which they filled up, half-full ones last.

    Source: `compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    full: list[list[Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    room: dict[tuple[torch.dtype, torch.device], float] = {}
    for p in params:
        kind = (p.dtype, p.device)
        filling.setdefault(kind, []).append(p)
        room[kind] = room.get(kind, first_bytes) - p.numel() * p.element_size()
        if room[kind] <= 0:
            full.append(filling.pop(kind))
            room[kind] = cap_bytes
    return full + list(filling.values())


class Bucket:
    """Some parameters and one flat buffer for their gradients: what a communication hook is given.

    `pack` and `unpack` are ours; the other methods are those of `torch.distributed.GradBucket`, so that a hook written
    for torch's DDP runs here unchanged.
    """

    def __init__(self, params: Sequence[Parameter], index: int, last: bool):
        self._params, self._index, self._last = list(params), index, last
        first = self._params[0]
        self._flat = torch.zeros(sum(p.numel() for p in params), dtype=first.dtype, device=first.device)
        self._views = self._cut(self._flat)
        self._buffer = self._flat

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views in the parameters' shapes and, where they are dense (channels_last is), with their strides: autograd
        adds to a gradient of another layout with a copy and a warning."""
        views = []
        for p, piece in zip(self._params, flat.split([p.numel() for p in self._params]), strict=True):
            strides = torch.empty_like(p, device="meta").stride()
            views.append(piece.as_strided(p.shape, strides, piece.storage_offset()))
        return views

    def index(self) -> int:
        """Position of this bucket in the order of communication, from 0."""
        return self._index

    def is_last(self) -> bool:
        """True for the last bucket of a step."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """The gradients as one flat tensor, shape (sum of numel,). This rank's gradients, not divided by anything."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put another flat tensor of the same number of elements in the place of `buffer()`."""
        if tensor.numel() != self._flat.numel():
            raise ValueError(f"bucket {self._index} has {self._flat.numel()} elements, set_buffer got {tensor.numel()}")
        self._buffer = tensor.view(-1)

    def gradients(self) -> list[torch.Tensor]:
        """One view into `buffer()` per parameter, in the parameter's shape."""
        return self._views if self._buffer is self._flat else self._cut(self._buffer)

    def parameters(self) -> list[Parameter]:
        """The parameters whose gradients lie in this bucket, in the order of the buffer."""
        return list(self._params)

    def pack(self, used: Collection[Parameter], scale: float) -> None:
        """Copy `scale * p.grad` into the buffer; a parameter that is not in `used` counts as zero."""
        self._buffer = self._flat
        for p, view in zip(self._params, self._views, strict=True):
            if p in used and p.grad is not None:
                torch.mul(p.grad.detach(), scale, out=view)
                continue
            if p.grad is not None and p.grad.data_ptr() == view.data_ptr():
                p.grad = p.grad.clone()  # an older gradient that the user kept: not ours to wipe
            view.zero_()

    def unpack(self, result: torch.Tensor, into: Collection[Parameter]) -> None:
        """Make the reduced values the gradients: `p.grad` becomes a view into the flat buffer, nothing is copied."""
        if result.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(result.view(-1))
        for p, view in zip(self._params, self._views, strict=True):
            if p in into:
                p.grad = view

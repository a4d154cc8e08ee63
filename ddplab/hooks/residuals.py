"""What error feedback holds back: one value per element of each parameter, whatever bucket it travels in.

DDP rebuilds its buckets after the first step; a residual that belonged to a bucket would then be added to other
parameters. Ours belong to parameters, known by their place in the first order in which they came.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Layout = list[tuple[int, int]]  # the place and the number of elements of each parameter of a bucket


class Flat:
    """The residuals of a bucket side by side, as they are now and as they were before this step."""

    def __init__(self, layout: Layout, now: torch.Tensor) -> None:
        self.layout, self.sides, self.side, self.touched = layout, [now, torch.zeros_like(now)], 0, False

    @property
    def now(self) -> torch.Tensor:
        return self.sides[self.side]

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is held back now, and where to write what comes next, which counts from here on."""
        old, self.side, self.touched = self.now, 1 - self.side, True
        return old, self.now

    def begin(self) -> None:
        """A new step: what was written stays."""
        self.touched = False

    def rollback(self) -> None:
        """Back to what was there when the step began."""
        if self.touched:
            self.side, self.touched = 1 - self.side, False

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"layout": torch.tensor(self.layout, dtype=torch.int64).view(-1, 2), "now": self.now.detach().clone()}

    @classmethod
    def from_state_dict(cls, saved: dict[str, torch.Tensor]) -> Flat:
        return cls([tuple(row) for row in saved["layout"].tolist()], positive_zeros(saved["now"]))


def positive_zeros(values: torch.Tensor) -> torch.Tensor:
    """A float32 copy without -0.0: then no sum of a gradient and a residual is -0.0, whose sign the codec would see."""
    return values.detach().float() + 0.0


def deliver(mean: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Put a float32 mean into `out`, a gradient of any dtype, which may be `mean` itself. What a 16-bit gradient rounds
    off goes into the residual, if there is one: on all ranks alike, so the mean of the residuals holds it once."""
    if out is mean:
        return out
    out.copy_(mean)
    if residual is not None and out.dtype != mean.dtype:
        residual += mean.sub_(out)
    return out


class Residuals:
    """float32 residuals per parameter: 8 bytes an element, because a step that fails has to be undone.

    `old, new = take(bucket)` gives two flat tensors in the order of the bucket's buffer: the residual as it is, and the
    place for the next one, which counts from then on. All elements of `new` must be written.
    """

    def __init__(self) -> None:
        self._place: dict[torch.Tensor, int] = {}
        self._flats: dict[int, Flat] = {}  # by bucket index
        self._home: dict[int, tuple[Flat, slice]] = {}  # by place
        self._saved: dict[int, torch.Tensor] = {}  # loaded, and not asked for yet

    def take(self, bucket: dist.GradBucket) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual of the bucket's parameters now, and where to write the next; shape (numel of the bucket,)."""
        layout, params = self.layout(bucket), bucket.parameters()
        flat = self._flats.get(bucket.index())
        if flat is None or flat.layout != layout:
            parts = [self._value(place, p) for (place, _), p in zip(layout, params, strict=True)]
            flat = self._flats[bucket.index()] = Flat(layout, torch.cat(parts).to(bucket.buffer().device))
            at = 0
            for place, size in layout:
                self._home[place] = flat, slice(at, at := at + size)
                self._saved.pop(place, None)
        return flat.take()

    def layout(self, bucket: dist.GradBucket) -> Layout:
        """Which parameters lie in the bucket. A parameter that was never seen gets the next place."""
        return [(self._place.setdefault(p, len(self._place)), p.numel()) for p in bucket.parameters()]

    def _value(self, place: int, p: torch.Tensor) -> torch.Tensor:
        if place in self._home:
            flat, part = self._home[place]
            return flat.now[part]
        if place not in self._saved:
            return torch.zeros(p.numel(), device=p.device)
        value = self._saved[place]
        if value.numel() != p.numel():
            raise ValueError(
                f"the loaded residual of parameter {place} (in the order of the first buckets) has {value.numel()} "
                f"elements, the parameter has {p.numel()}: it was saved with another model, or with the hook "
                "registered later than before the first step"
            )
        return value.to(p.device)

    def add(self, place: int, start: int, values: torch.Tensor) -> None:
        """Add `values` to the residual of the parameter at `place`, from its element `start` on; not undone."""
        if place in self._saved:
            holders = [self._saved[place]]
        else:
            flat, part = self._home[place]
            holders = [side[part] for side in (flat.sides if flat.touched else [flat.now])]
        for holder in holders:
            holder[start : start + values.numel()] += values.to(holder.device)

    def begin(self) -> None:
        """A new step: what was written so far stays."""
        for flat in self._flats.values():
            flat.begin()

    def rollback(self) -> None:
        """Back to what was there when the step began."""
        for flat in self._flats.values():
            flat.rollback()

    def multiply(self, factor: float) -> None:
        """Scale everything that is held back."""
        for flat in self._flats.values():
            flat.now.mul_(factor)
        for value in self._saved.values():
            value.mul_(factor)

    def numel(self) -> int:
        """Elements that have a residual."""
        return sum(value.numel() for value in self._values().values())

    def norm(self) -> float:
        """The L2 norm of everything that is held back."""
        return sum(float(value.double().square().sum()) for value in self._values().values()) ** 0.5

    def _values(self) -> dict[int, torch.Tensor]:
        return self._saved | {place: flat.now[part] for place, (flat, part) in self._home.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the residual of each parameter, flat, by its place."""
        return {str(place): value.detach().clone() for place, value in sorted(self._values().items())}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Forget everything and go on from `saved`."""
        self._flats, self._home = {}, {}
        self._saved = {int(place): positive_zeros(value) for place, value in saved.items()}

"""What error feedback holds back: one value per element of each parameter, whatever bucket it travels in.

DDP rebuilds its buckets after the first step; a residual that belonged to a bucket would then be added to other
parameters. Ours belong to parameters, known by their place in the first order in which they came.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _Flat:
    """The residuals of one bucket's parameters, side by side, and what they were before this step."""

    def __init__(self, places: list[int], now: torch.Tensor) -> None:
        self.places, self.sides, self.side, self.touched = places, [now, torch.zeros_like(now)], 0, False

    @property
    def now(self) -> torch.Tensor:
        return self.sides[self.side]


class Residuals:
    """float32 residuals per parameter: 8 bytes an element, because a step that fails has to be undone.

    `old, new = take(bucket)` gives two flat tensors in the order of the bucket's buffer: the residual as it is, and the
    place for the next one, which counts from then on. All elements of `new` must be written.
    """

    def __init__(self) -> None:
        self._place: dict[torch.Tensor, int] = {}
        self._flats: dict[int, _Flat] = {}  # by bucket index
        self._home: dict[int, tuple[_Flat, slice]] = {}  # by place
        self._saved: dict[int, torch.Tensor] = {}  # loaded, and not asked for yet

    def take(self, bucket: dist.GradBucket) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual of the bucket's parameters now, and where to write the next; shape (numel of the bucket,)."""
        flat = self._flat(bucket)
        old, flat.side, flat.touched = flat.now, 1 - flat.side, True
        return old, flat.now

    def _flat(self, bucket: dist.GradBucket) -> _Flat:
        params, index = bucket.parameters(), bucket.index()
        places = [self._place.setdefault(p, len(self._place)) for p in params]
        flat = self._flats.get(index)
        if flat is None or flat.places != places:
            parts = [self._value(place, p) for place, p in zip(places, params, strict=True)]
            flat = self._flats[index] = _Flat(places, torch.cat(parts).to(bucket.buffer().device))
            at = 0
            for place, p in zip(places, params, strict=True):
                self._home[place] = flat, slice(at, at := at + p.numel())
                self._saved.pop(place, None)
        return flat

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
        flat, part = self._home[place]
        for side in flat.sides if flat.touched else [flat.now]:
            side[part][start : start + values.numel()] += values

    def begin(self) -> None:
        """A new step: what was written so far stays."""
        for flat in self._flats.values():
            flat.touched = False

    def rollback(self) -> None:
        """Back to what was there when the step began."""
        for flat in self._flats.values():
            if flat.touched:
                flat.side, flat.touched = 1 - flat.side, False

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
        # Adding 0 turns -0.0 into 0.0: then no sum of a gradient and a residual is -0.0 (the 1-bit codec's sign).
        self._saved = {int(place): value.detach().clone().float() + 0.0 for place, value in saved.items()}

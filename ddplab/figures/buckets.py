"""The bucket view: which parameter travels in which bucket, in iteration 0 and from iteration 1 on."""

from __future__ import annotations

import html

from ddplab.figures.base import Figure, still_svg
from ddplab.figures.overlap import listed
from ddplab.figures.stepper import COLOURS
from ddplab.profile import Profile
from ddplab.steptimes import MIB
from ddplab.timeline import CAPS_MB, assign


class BucketFigure(Figure):
    """The buckets of torch's DDP for a `ddplab.Profile`: a strip a bucket, a piece a parameter, as wide as its bytes.

    The reader switches between iteration 0 (one bucket, in the order of the module) and the later ones (filled in the
    recorded order of readiness), and moves the cap.  bucket_cap_mb: MiB, or None for torch's default, 25 and 1 for the
    first bucket; iteration: 0 or 1: where it opens.  Claim C13. ValueError for other values.
    """

    module = "buckets.js"

    def __init__(
        self, profile: Profile, *, bucket_cap_mb: float | None = None, iteration: int = 1, caption: str = ""
    ) -> None:
        if iteration not in (0, 1):
            raise ValueError(f"iteration is 0 (the first) or 1 (all others), not {iteration!r}")
        self.profile, self.iteration = profile, iteration
        self.buckets = assign(profile, bucket_cap_mb, iteration)
        caps = sorted({*CAPS_MB, bucket_cap_mb, None}, key=lambda cap: 24.9 if cap is None else cap)
        super().__init__(
            caption,
            gradients=listed(profile),
            names=[g.name for g in profile.gradients],
            positions=[g.position for g in profile.gradients],
            backward=profile.backward_s,
            caps=caps,
            cap_at=caps.index(bucket_cap_mb),
            iteration=iteration,
        )

    def text(self) -> str:
        """The buckets in words."""
        sizes = ", ".join(f"{sum(g.nbytes for g in b) / MIB:.2f}" for b in self.buckets)
        when = "iteration 0" if self.iteration == 0 else "iteration 1 and later"
        n = len(self.buckets)
        return f"Buckets of torch's DDP, {when}: {n} bucket{'s' * (n > 1)} of {sizes} MiB, in the order they leave."

    def svg(self) -> str:
        """A strip for each bucket of the opening state."""
        sizes = [sum(g.nbytes for g in bucket) for bucket in self.buckets]
        last, scale, parts = max(1, len(self.profile.gradients) - 1), 540 / max(sizes), []
        for b, bucket in enumerate(self.buckets):
            x, y, colour = 170.0, 10 + 34 * b, COLOURS[b % 8]
            parts.append(f'<text x="10" y="{y + 18}">bucket {b}: {sizes[b] / MIB:.2f} MiB</text>')
            for g in bucket:
                wide, shade, name = g.nbytes * scale, 0.2 + 0.7 * g.position / last, html.escape(g.name)
                parts.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="26" fill="{colour}" '
                    f'fill-opacity="{shade:.2f}" stroke="#fff" stroke-width=".5"><title>{name}</title></rect>'
                )
                x += wide
        return still_svg(720, 20 + 34 * len(self.buckets), "".join(parts))

"""8-bit gradients: 255 steps between the largest magnitude of a chunk and its negative."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ddplab.hooks.base import comm_hook
from ddplab.hooks.codec import Int8Codec
from ddplab.hooks.compressed import CompressedState


class Int8(CompressedState):
    """Send gradients rounded to 8 bits, with a scale for each chunk of 16384, in two phases (`TwoPhase`).

    Paper: T. Dettmers, 8-Bit Approximations for Parallelism in Deep Learning (arXiv:1511.04561), for 8 bits; here the
        steps of a chunk are even, from its largest magnitude.
    Bytes: 1 an element and 4 a chunk, so a quarter of the float32 ring's.
    Bias: rounding to nearest loses what is under half a step, 1/254 of the chunk's largest magnitude; error feedback
        brings it in later steps.
    Memory: 8 bytes an element for the worker's residual (twice, so that a failed step can be undone), 8/N for the
        server's, and 1 for a bucket in flight.
    Loses when: the link is fast; one element of a chunk is far larger than the others, which then round to 0.
    """

    codec = Int8Codec


def int8(process_group: dist.ProcessGroup | None = None, **options: Any) -> tuple[Int8, Any]:
    """`ddp.register_comm_hook(*ddplab.int8())`. Options: those of `CompressedState`."""
    return Int8(process_group, **options), comm_hook


int8_hook = comm_hook

"""1-bit gradients: signs, a scale for each chunk, and error feedback that makes up for the rest in later steps."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ddplab.hooks.base import comm_hook
from ddplab.hooks.codec import SignCodec
from ddplab.hooks.compressed import CompressedState


class OneBit(CompressedState):
    """Send the sign of each gradient and the mean magnitude of each chunk of 65536, in two phases (`TwoPhase`).

    Paper: F. Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014), for bits with error feedback;
        H. Tang et al., 1-bit Adam (arXiv:2102.02888), for the two phases and the second residual.
    Bytes: 1/8 an element and 4 a chunk, so 1/32 of the float32 ring's: 3.1 %.
    Bias: every single step is biased, and coarse: each element of a chunk has the same magnitude. With error feedback
        the sum over steps is right up to the residual, which stays bounded. The more the gradients of all steps have in
        common, the longer it grows before it settles: until the mean magnitude of a chunk is that of its largest common
        element, which may take hundreds of steps. Without feedback small gradients are blown up and large ones cut for
        good.
    Memory: 8 bytes an element for the worker's residual (twice, so that a failed step can be undone), 8/N for the
        server's, and 1/8 for a bucket in flight.
    Loses when: the link is fast, since encoding and decoding cost more than two casts; the optimizer divides by the
        gradient's own magnitude (Adam: the noise of the residual goes into its variance; `OneBitAdam` is the answer);
        gradients are sparse or differ by orders of magnitude within a chunk.
    """

    codec = SignCodec


def onebit(process_group: dist.ProcessGroup | None = None, **options: Any) -> tuple[OneBit, Any]:
    """`ddp.register_comm_hook(*ddplab.onebit())`. Options: those of `CompressedState`."""
    return OneBit(process_group, **options), comm_hook


onebit_hook = comm_hook

"""Error feedback: what does not travel in this step is held back, and added to the gradient of the next."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddplab._arguments import flag
from ddplab.hooks.base import HookState


class FeedbackState(HookState):
    """A hook's state with error feedback, which can be switched off.

    Args:
        error_feedback: False drops what does not travel: less memory, and errors that add up. The same on all ranks.
        process_group, module, scaler: see `ddplab.hooks.base.HookState`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        error_feedback: bool = True,
        module: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.error_feedback = flag(error_feedback, "error_feedback")
        super().__init__(process_group, module=module, scaler=scaler)

    def options(self) -> dict[str, Any]:
        return super().options() | {"error_feedback": self.error_feedback}

    def corrected(self, bucket: dist.GradBucket) -> torch.Tensor:
        """Gradient plus what was held back, float32, in the place of what will be held back next."""
        if not self.error_feedback:
            return bucket.buffer().float()
        old, new = self.residuals.take(bucket)
        return torch.add(old, bucket.buffer(), out=new)

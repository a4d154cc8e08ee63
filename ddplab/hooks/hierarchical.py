"""DDP over a two-level all-reduce: fp32 all the way, but only one copy of the gradients leaves each host.

It is registered like all hooks:

    state = ddplab.Hierarchical()           # asks the ranks which of them share a host
    ddp.register_comm_hook(state, ddplab.hierarchical_hook)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ddplab.hierarchy import Hierarchy
from ddplab.hooks.base import HookState, comm_hook
from ddplab.hooks.finite import all_finite
from ddplab.twolevel import reduce_in_place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Hierarchical(HookState):
    """Reduce-scatter inside each host, all-reduce across hosts, all-gather inside: see `ddplab.twolevel`.

    Paper: Cho et al., BlueConnect: Decomposing All-Reduce for Deep Learning, MLSys 2019.
    Bytes: S inside and across are those of the gradients; 2 (hosts - 1) / hosts S leave a host, not 2 (n - 1) / n S.
    Bias: none; another order of addition than a flat all-reduce.
    Memory: parts of about 4 MiB; nothing stays.
    Loses when: there is one host, one rank a host, or no difference between the links; NCCL inside already does it.

    Args:
        hosts: which ranks share a host, as `ddplab.Hierarchy` takes them: lists of ranks, a mesh with the dimensions
            "inter" and "intra", or None to ask the ranks. Its groups are the state's own, a mesh's are left alone.
        process_group, module, scaler: see `ddplab.hooks.base.HookState`.

    Attributes:
        hierarchy: the `ddplab.Hierarchy`.
        across_bytes: the part of `wire_bytes` that this rank sent to other hosts.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]] | DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        module: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.hierarchy, self.across_bytes = Hierarchy(hosts, process_group), 0
        super().__init__(process_group, module=module, scaler=scaler)

    def encode(self, bucket: dist.GradBucket) -> tuple[dist.GradBucket, int]:
        return bucket, self.alarm(bucket)

    def exchange(self, work: tuple[dist.GradBucket, int]) -> torch.Tensor:
        bucket, alarm = work
        mean = bucket.buffer()
        sent = reduce_in_place(mean, self.hierarchy, "mean")
        self.wire.bytes += sum(sent)
        self.across_bytes += sent.across
        if not all_finite(mean):  # every rank sees it, so every rank asks whose it is
            self.hear(alarm, bucket)
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "across_bytes": self.across_bytes}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.across_bytes = int(saved["across_bytes"])

    def close(self) -> None:
        super().close()
        self.hierarchy.close()


hierarchical_hook = comm_hook

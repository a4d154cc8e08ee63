"""A process group of one's own and collectives that count their bytes.

Counted is payload: what this rank sends to others. The kernel's count is a little higher, by TCP's headers.
"""

from __future__ import annotations

from collections import Counter
from types import NoneType

import torch
import torch.distributed as dist

from ddplab._arguments import instance

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed after torch 2.9


class Wire:
    """Blocking collectives on a new group of the same ranks as `process_group` (default: all); all of them make it.

    Its own group, because two users of one group mix their collectives in an order that differs between ranks: DDP
    itself starts some during backward. On gloo, CUDA tensors go through host memory. On NCCL "blocking" means what it
    means there: the current stream waits, not the caller.

    Attributes:
        bytes: payload bytes that this rank has sent so far.
        rank, size: this rank's place in the group, and the number of ranks.
        ranks: the global ranks of the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("communication hooks need torch.distributed: use ddplab.launch or torchrun")
        parent = member_of(process_group, "the hook's state")
        self.rank, self.size, self.bytes = dist.get_rank(parent), dist.get_world_size(parent), 0
        self.ranks = dist.get_process_group_ranks(parent)
        backend = dist.get_backend_config(parent)
        self._backends = dict(part.split(":") for part in backend.split(","))
        self._group: dist.ProcessGroup | None = None
        if self.size > 1:
            everybody = self.size == dist.get_world_size()
            made = dist.new_group(self.ranks, backend=backend) if everybody else among(self.ranks, backend)
            self._group = connected(made, backend)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; RuntimeError after `close()`, for torch would take None for the group of all ranks."""
        if self._group is None:
            raise RuntimeError("these connections are closed: make a new state")
        return self._group

    def threaded(self, device: torch.device) -> bool:
        """Whether collectives on `device` block their caller (gloo), so that a thread has to make them."""
        if device.type not in self._backends:
            raise TypeError(f"a bucket on {device.type}, but the group's backends serve {', '.join(self._backends)}")
        return self._backends[device.type] != "nccl"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place. Counted as a ring's: 2 (N - 1) / N of the tensor."""
        self.bytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        if tensor.numel() == 0 or self.size == 1:
            return tensor
        staged = self._stage(tensor)
        dist.all_reduce(staged, group=self.group)
        return tensor if staged is tensor else tensor.copy_(staged)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's `tensor`, of the same shape everywhere, stacked in rank order: shape (N, *shape)."""
        self.bytes += (self.size - 1) * tensor.nbytes
        staged = self._stage(tensor.contiguous())
        rows = staged.new_empty((self.size, *staged.shape))
        if tensor.numel() == 0 or self.size == 1:
            return rows.copy_(staged).to(tensor.device)
        _gather(rows.view(-1), staged.view(-1), group=self.group)
        return rows.to(tensor.device)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Row d of `rows`, shape (N, ...), goes to rank d; what comes back has row s from rank s."""
        self.bytes += rows.nbytes * (self.size - 1) // self.size
        staged = self._stage(rows.contiguous())
        received = torch.empty_like(staged)
        if rows.numel() == 0 or self.size == 1:
            return received.copy_(staged).to(rows.device)
        dist.all_to_all_single(received.view(-1), staged.view(-1), group=self.group)
        return received.to(rows.device)

    def close(self) -> None:
        """Give the group's connections back. All ranks are through with it; nothing can be sent afterwards."""
        give_back(self._group)
        self._group = None

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu() if tensor.is_cuda and self.threaded(tensor.device) else tensor


def member_of(process_group: dist.ProcessGroup | None, whom: str) -> dist.ProcessGroup:
    """The group given to `whom`, None being that of all ranks. TypeError for something else, RuntimeError on a rank
    that is not in it."""
    outside = f"rank {dist.get_rank()} is not in the process group given to {whom}"
    if isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError(outside)
    instance(process_group, (dist.ProcessGroup, NoneType), "process_group is a torch.distributed.ProcessGroup or None")
    parent = dist.group.WORLD if process_group is None else process_group
    if dist.get_rank(parent) < 0:
        raise RuntimeError(outside)
    return parent


def connected(group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    """`group`, a new one, once all its members have connected.

    With gloo one rank can be through while another still connects. If it gave the group back at once, the other would
    fail: "Connection closed by peer". NCCL connects with its first collective.
    """
    if dist.get_world_size(group) > 1 and "cpu:gloo" in backend.split(","):
        dist.all_reduce(torch.zeros(1), group=group)
    return group


def give_back(group: dist.ProcessGroup | None) -> None:
    """Destroy a group that we made, unless it is gone already, by itself or with all others."""
    if group is not None and dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


_made: Counter = Counter()  # groups of ours, by their ranks


def among(ranks: list[int], backend: str) -> dist.ProcessGroup:
    """A new group that only its members make.

    torch names groups by a counter. Making this one moves the counter on for members only, so the next group of all
    ranks would have two names, and both sides would wait for each other: the counter goes back to where it was.
    """
    world, key = dist.distributed_c10d._world, tuple(ranks)
    before = world.group_count
    _made[key] += 1
    world.group_count = before + (_made[key] << 32)  # a name of its own all the same
    try:
        return dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    finally:
        world.group_count = before

"""Two-level all-reduce: reduce-scatter inside each host, all-reduce across hosts, all-gather inside.

The link between hosts is slow and the ranks of a host share it. So each host first adds up what it has: of `g` ranks
each ends with one block of the sum. Then rank l of every host all-reduces block l with rank l of the other hosts, all
`g` of them at once, each on 1/g of the data. Last, the ranks of a host tell each other. With `k` hosts, 2 (k - 1) / k
of the buffer leaves a host, however many ranks are in it; a flat ring sends 2 (n - 1) / n.

The buffer goes through in parts: while one part is between the hosts, the next is being added up inside.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("inter", "intra"))
    hierarchical_all_reduce(tensor, mesh, op="mean")
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ddplab import execute
from ddplab._arguments import choice, flag
from ddplab._p2p import run_batched, run_posted, segment_elements
from ddplab._plan import rank_plan
from ddplab.hierarchy import Hierarchy
from ddplab.schedule import Schedule, ring

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PART_BYTES = 4 << 20
"""A part is about this large. On two emulated hosts of 4 ranks, 25.6 MB in parts of 1 or 2 MiB took as long, whole 4%
longer: smaller parts hide more of what happens inside a host, and cost more messages."""

_IN_FLIGHT = 2  # parts between the hosts: one travels, one is ready to
_NOT_ACROSS = (torch.int16, torch.complex32)
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed after torch 2.9
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Sent(NamedTuple):
    """Payload bytes that this rank sent: inside its host, and across hosts."""

    inside: int
    across: int


def hierarchical_all_reduce(
    tensor: torch.Tensor, hierarchy: Hierarchy | DeviceMesh, op: str = "sum", check: bool = True
) -> torch.Tensor:
    """Sum or mean of `tensor` over all ranks of the hierarchy, in place; every one of them calls it.

    Afterwards the tensor holds the same bytes on every rank. Its last bits may differ from those of a flat all-reduce:
    the order of addition is another one.

    Args:
        tensor: as in `ddplab.all_reduce`: any shape, strides and size, on the CPU or on CUDA.
        hierarchy: a `Hierarchy`, or a mesh with the dimensions "inter" and "intra" as torch's `init_device_mesh`
            makes it; then the mesh's own groups are used.
        op: "sum" or "mean". A mean divides once, by the number of all ranks and before the sum. (The mean of the
            hosts' means is wrong as soon as two hosts differ in their number of ranks.)
        check: first compare shape, dtype, op and hosts between the ranks, as `ddplab.all_reduce` does.

    Returns:
        The tensor.

    Raises:
        TypeError: a tensor that cannot be summed, or a mean of integers; before any communication.
        ValueError: an unknown op, a mesh of other dimensions, or, with `check`, ranks that disagree.
    """
    levels = hierarchy if isinstance(hierarchy, Hierarchy) else Hierarchy.of(hierarchy)
    choice(op, "hierarchical_all_reduce's op", ("sum", "mean"))
    flag(check, "check")
    execute.require_reducible(tensor, op)
    if tensor.dtype in _NOT_ACROSS:
        raise TypeError(f"hierarchical_all_reduce does not take {tensor.dtype}: the groups' all_reduce does not.")
    if check:
        own = execute.transport(tensor.device, levels.intra) is run_batched
        levels.require_agreement(tensor, op, tensor.device if own else "cpu")
    reduce_in_place(tensor, levels, op)
    return tensor


def reduce_in_place(tensor: torch.Tensor, levels: Hierarchy, op: str) -> Sent:
    """What `hierarchical_all_reduce` does once its arguments are known to be right; what this rank sent for it."""
    levels.require_open()
    if tensor.numel() == 0 or levels.ranks == 1:
        return Sent(0, 0)
    run = execute.transport(tensor.device, levels.intra)
    with torch.no_grad():
        flat = execute.flatten(tensor, host=run is run_posted)
        if op == "mean":
            flat.mul_(1.0 / levels.ranks)
        native = run is run_batched and levels.rails == levels.size
        sent = _in_parts(flat, levels, _Native(levels) if native else _Messages(levels, run))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
    return sent


def _in_parts(flat: torch.Tensor, levels: Hierarchy, inside: _Messages | _Native) -> Sent:
    unit = inside.unit
    whole = -(-flat.numel() // unit) * unit
    padded = flat if whole == flat.numel() else torch.cat([flat, flat.new_zeros(whole - flat.numel())])
    parts = max(1, round(whole * flat.element_size() / PART_BYTES))
    bounds = [whole // unit * i // parts * unit for i in range(parts + 1)]
    flying: deque[tuple[torch.Tensor, torch.Tensor, dist.Work | None]] = deque()
    hosts, sent_across = len(levels.hosts), 0

    def land() -> None:
        part, block, work = flying.popleft()
        if work is not None:
            work.wait()
        inside.gather(part, block)

    for lo, hi in zip(bounds, bounds[1:], strict=False):
        part = padded[lo:hi]
        block, work = inside.scatter(part), None
        if hosts > 1 and block.numel():
            work = dist.all_reduce(block, group=levels.inter, async_op=True)
            sent_across += 2 * (hosts - 1) * block.nbytes // hosts
        flying.append((part, block, work))
        if len(flying) == _IN_FLIGHT:
            land()
    while flying:
        land()
    if padded is not flat:
        flat.copy_(padded[: flat.numel()])
    return Sent(inside.sent, sent_across)


class _Messages:
    """The two halves inside a host by send and receive: for any length, for uneven hosts, and for gloo, which has no
    reduce-scatter: its `reduce_scatter_tensor` all-reduces the whole input."""

    unit = 1  # a part may have any number of elements

    def __init__(self, levels: Hierarchy, run: Callable) -> None:
        self.levels, self.run, self.sent = levels, run, 0

    def scatter(self, part: torch.Tensor) -> torch.Tensor:
        """Add up `part` inside the host, in place; this rank's block of it, empty for a rank that owns none."""
        levels = self.levels
        self._along(half_ring(levels.size, levels.rails, gather=False), part)
        if levels.inter is None:
            return part[:0]
        lo, hi = (part.numel() * (levels.local + i) // levels.rails for i in (0, 1))
        return part[lo:hi]

    def gather(self, part: torch.Tensor, block: torch.Tensor) -> None:
        """Every rank of the host gets every block."""
        self._along(half_ring(self.levels.size, self.levels.rails, gather=True), part)

    def _along(self, schedule: Schedule, part: torch.Tensor) -> None:
        local, numel = self.levels.local, part.numel()
        segment = segment_elements(-(-numel // schedule.chunks), part.element_size())
        self.run(part, rank_plan(schedule, local, numel, segment), torch.Tensor.add_, self.levels.intra)
        leaving = np.diff(schedule.bounds(numel))[schedule.chunk[schedule.src == local]]
        self.sent += int(leaving.sum()) * part.element_size()


class _Native:
    """NCCL's own collectives, which want parts that the ranks of a host divide."""

    def __init__(self, levels: Hierarchy) -> None:
        self.levels, self.unit, self.sent = levels, levels.size, 0

    def scatter(self, part: torch.Tensor) -> torch.Tensor:
        block = part.new_empty(part.numel() // self.unit)
        _reduce_scatter(block, part, group=self.levels.intra)
        self.sent += part.nbytes - block.nbytes
        return block

    def gather(self, part: torch.Tensor, block: torch.Tensor) -> None:
        _all_gather(part, block, group=self.levels.intra)
        self.sent += part.nbytes - block.nbytes


@lru_cache(maxsize=32)
def half_ring(ranks: int, blocks: int, gather: bool) -> Schedule:
    """Reduce-scatter of `blocks` blocks over the ranks of a host, or their all-gather; rank b owns block b in between.

    One half of NCCL's ring, without the chunks from `blocks` on: where hosts are uneven, only as many ranks of each own
    a block as the smallest host has.
    """
    whole = ring(ranks)
    rows = (whole.reduce != gather) & (whole.chunk < blocks)
    columns = (getattr(whole, name)[rows] for name in ("step", "src", "dst", "chunk", "reduce"))
    return Schedule("all-gather" if gather else "reduce-scatter", ranks, blocks, *columns)

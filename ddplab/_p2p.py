"""The two ways to put one rank's plan on the wire, one for gloo and one for NCCL.

Both take the flat tensor, the rank's steps and how to combine. Both move bytes, so the transport need not know the
dtype, and both match messages by order alone. A step begins when the sends and receives of the one before are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from ddplab._plan import Receive, Round, Send, Step

SEGMENT_BYTES = (1 << 20, 8 << 20)
"""Least and most bytes of a message, where the chunk has as many. A message wakes a thread at both ends, so small ones
cost: over loopback, 8 MiB instead of 4 MiB takes 9% less CPU. But the sum of a chunk's last segment hides behind
nothing, so a chunk is cut at least in two: 1% faster on eight 1 Gbit/s links."""

_ROUNDS_AHEAD = 2
_MOST_KEPT_BYTES = 64 << 20
_kept: list[torch.Tensor] = []  # at most one block of memory; whoever takes it out owns it, so threads do not share it

Combine = Callable[[torch.Tensor, torch.Tensor], object]


def run_posted(flat: torch.Tensor, steps: Sequence[Step], combine: Combine, group: dist.ProcessGroup) -> None:
    """gloo: all sends of a step at once, receives posted two rounds ahead of their use.

    A gloo send waits until its receive is posted, so posting ahead saves a round trip for each message.
    """
    wire, size = flat.view(torch.uint8), flat.element_size()
    expected = deque(r for step in steps for round_ in step.rounds for r in round_.receives)
    posted: deque[tuple[dist.Work, torch.Tensor | None]] = deque()

    def post(now: int, free: list[torch.Tensor]) -> None:
        while expected and expected[0].earliest <= now and (free or not expected[0].reduce):
            receive = expected.popleft()
            scratch = free.pop() if receive.reduce else None
            posted.append(
                (dist.irecv(_into(receive, wire, scratch, size), group=group, group_src=receive.peer), scratch)
            )

    with _scratch(flat, steps) as free:
        for step in steps:
            leaving = [_piece(send, wire, size) for round_ in step.rounds for send in round_.sends]
            post(step.number, free)
            sending = [dist.isend(piece, group=group, group_dst=peer) for peer, piece in leaving]
            for receive in (r for round_ in step.rounds for r in round_.receives):
                work, scratch = posted.popleft()
                work.wait()
                if scratch is not None:
                    combine(flat[receive.lo : receive.hi], scratch[: receive.hi - receive.lo])
                    free.append(scratch)
                    post(step.number, free)
            for work in sending:
                work.wait()


def run_batched(flat: torch.Tensor, steps: Sequence[Step], combine: Combine, group: dist.ProcessGroup) -> None:
    """NCCL: one `batch_isend_irecv` a round; round k is reduced while round k + 1 travels.

    All messages of a batch progress together, so no order of sends and receives can deadlock. On CUDA `wait` makes
    the current stream wait, not the host.
    """
    wire, size = flat.view(torch.uint8), flat.element_size()

    def issue(round_: Round, free: list[torch.Tensor]) -> tuple[list[dist.Work], list[tuple[Receive, torch.Tensor]]]:
        leaving = [_piece(send, wire, size) for send in round_.sends]
        ops = [dist.P2POp(dist.isend, piece, group=group, group_peer=peer) for peer, piece in leaving]
        arriving = []
        for receive in round_.receives:
            buffer = free.pop() if receive.reduce else None
            ops.append(dist.P2POp(dist.irecv, _into(receive, wire, buffer, size), group=group, group_peer=receive.peer))
            if buffer is not None:
                arriving.append((receive, buffer))
        return dist.batch_isend_irecv(ops), arriving

    def finish(free: list[torch.Tensor], works: list[dist.Work], arriving: list[tuple[Receive, torch.Tensor]]) -> None:
        for work in works:
            work.wait()
        for receive, buffer in arriving:
            combine(flat[receive.lo : receive.hi], buffer[: receive.hi - receive.lo])
            free.append(buffer)

    with _scratch(flat, steps) as free:
        for step in steps:
            flying: deque = deque()
            for round_ in step.rounds:
                flying.append(issue(round_, free))
                if len(flying) == _ROUNDS_AHEAD:
                    finish(free, *flying.popleft())
            while flying:
                finish(free, *flying.popleft())


def segment_elements(chunk: int, itemsize: int) -> int:
    """Elements in one message, for chunks of `chunk` elements; the same on every rank."""
    least, most = (max(1, nbytes // itemsize) for nbytes in SEGMENT_BYTES)
    return min(most, max(least, -(-chunk // 2)))


@contextmanager
def _scratch(flat: torch.Tensor, steps: Sequence[Step]) -> Iterator[list[torch.Tensor]]:
    """Landing places for what will be reduced, as many as two full rounds need.

    On the CPU the block they are cut from is kept for the next call: the kernel hands out fresh pages by the fault, and
    those cost as much as sending the messages. (CUDA's allocator keeps its own.) A call that fails keeps nothing, for a
    late message may still land there.
    """
    counts = [sum(r.reduce for r in round_.receives) for step in steps for round_ in step.rounds]
    widths = [r.hi - r.lo for step in steps for round_ in step.rounds for r in round_.receives if r.reduce]
    shape = min(sum(counts), _ROUNDS_AHEAD * max(counts, default=0)), max(widths, default=0)
    nbytes = shape[0] * shape[1] * flat.element_size()
    block = None
    if not flat.is_cuda:
        with suppress(IndexError):
            block = _kept.pop()
    if block is None or block.numel() < nbytes:
        block = flat.new_empty(nbytes, dtype=torch.uint8)
    yield list(block[:nbytes].view(flat.dtype).view(shape))
    if not flat.is_cuda and not _kept and block.numel() <= _MOST_KEPT_BYTES:
        _kept.append(block)


def _piece(send: Send, wire: torch.Tensor, size: int) -> tuple[int, torch.Tensor]:
    piece = wire[send.lo * size : send.hi * size]
    return send.peer, piece.clone() if send.snapshot else piece


def _into(receive: Receive, wire: torch.Tensor, scratch: torch.Tensor | None, size: int) -> torch.Tensor:
    if scratch is None:
        return wire[receive.lo * size : receive.hi * size]
    return scratch.view(torch.uint8)[: (receive.hi - receive.lo) * size]

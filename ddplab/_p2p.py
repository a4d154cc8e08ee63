"""The two ways to put one rank's plan on the wire, one for gloo and one for NCCL.

Both take the flat tensor, the rank's steps and how to combine. Both move bytes, so the transport need not know the
dtype, and both match messages by order alone. A step begins when the sends and receives of the one before are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddplab._plan import Receive, Round, Send, Step

SEGMENT_BYTES = 4 << 20
"""Longest message. One size serves loopback and links: half as much costs 3% on loopback (102 MB, four ranks on two
cores), because each message wakes a thread."""

_ROUNDS_AHEAD = 2

Combine = Callable[[torch.Tensor, torch.Tensor], object]


def run_posted(flat: torch.Tensor, steps: Sequence[Step], combine: Combine, group: dist.ProcessGroup) -> None:
    """gloo: all sends of a step at once, receives posted two rounds ahead of their use.

    A gloo send waits until its receive is posted, so posting ahead saves a round trip for each message.
    """
    wire, size = flat.view(torch.uint8), flat.element_size()
    expected = deque(r for step in steps for round_ in step.rounds for r in round_.receives)
    posted: deque[tuple[dist.Work, torch.Tensor | None]] = deque()
    free = _scratch(flat, steps)

    def post(now: int) -> None:
        while expected and expected[0].earliest <= now and (free or not expected[0].reduce):
            receive = expected.popleft()
            scratch = free.pop() if receive.reduce else None
            posted.append(
                (dist.irecv(_into(receive, wire, scratch, size), group=group, group_src=receive.peer), scratch)
            )

    for step in steps:
        leaving = [_piece(send, wire, size) for round_ in step.rounds for send in round_.sends]
        post(step.number)
        sending = [dist.isend(piece, group=group, group_dst=peer) for peer, piece in leaving]
        for receive in (r for round_ in step.rounds for r in round_.receives):
            work, scratch = posted.popleft()
            work.wait()
            if scratch is not None:
                combine(flat[receive.lo : receive.hi], scratch[: receive.hi - receive.lo])
                free.append(scratch)
                post(step.number)
        for work in sending:
            work.wait()


def run_batched(flat: torch.Tensor, steps: Sequence[Step], combine: Combine, group: dist.ProcessGroup) -> None:
    """NCCL: one `batch_isend_irecv` a round; round k is reduced while round k + 1 travels.

    All messages of a batch progress together, so no order of sends and receives can deadlock. On CUDA `wait` makes
    the current stream wait, not the host.
    """
    wire, size = flat.view(torch.uint8), flat.element_size()
    scratch = _scratch(flat, steps)

    def issue(round_: Round) -> tuple[list[dist.Work], list[tuple[Receive, torch.Tensor]]]:
        leaving = [_piece(send, wire, size) for send in round_.sends]
        ops = [dist.P2POp(dist.isend, piece, group=group, group_peer=peer) for peer, piece in leaving]
        arriving = []
        for receive in round_.receives:
            buffer = scratch.pop() if receive.reduce else None
            ops.append(dist.P2POp(dist.irecv, _into(receive, wire, buffer, size), group=group, group_peer=receive.peer))
            if buffer is not None:
                arriving.append((receive, buffer))
        return dist.batch_isend_irecv(ops), arriving

    def finish(works: list[dist.Work], arriving: list[tuple[Receive, torch.Tensor]]) -> None:
        for work in works:
            work.wait()
        for receive, buffer in arriving:
            combine(flat[receive.lo : receive.hi], buffer[: receive.hi - receive.lo])
            scratch.append(buffer)

    for step in steps:
        flying: deque = deque()
        for round_ in step.rounds:
            flying.append(issue(round_))
            if len(flying) == _ROUNDS_AHEAD:
                finish(*flying.popleft())
        while flying:
            finish(*flying.popleft())


def _scratch(flat: torch.Tensor, steps: Sequence[Step]) -> list[torch.Tensor]:
    """Landing places for what will be reduced: as many as two full rounds need."""
    counts = [sum(r.reduce for r in round_.receives) for step in steps for round_ in step.rounds]
    widths = [r.hi - r.lo for step in steps for round_ in step.rounds for r in round_.receives if r.reduce]
    many = min(sum(counts), _ROUNDS_AHEAD * max(counts, default=0))
    return [flat.new_empty(max(widths, default=0)) for _ in range(many)]


def _piece(send: Send, wire: torch.Tensor, size: int) -> tuple[int, torch.Tensor]:
    piece = wire[send.lo * size : send.hi * size]
    return send.peer, piece.clone() if send.snapshot else piece


def _into(receive: Receive, wire: torch.Tensor, scratch: torch.Tensor | None, size: int) -> torch.Tensor:
    if scratch is None:
        return wire[receive.lo * size : receive.hi * size]
    return scratch.view(torch.uint8)[: (receive.hi - receive.lo) * size]

"""Before ranks communicate they meet: whatever is wrong on one of them becomes a sentence on all, not a hang.

One small all-gather of integers. Each rank says which step it is in, which tensors it has, whether they are finite, and
check sums of its options and its values. What the ranks then do follows from the same table everywhere.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from ddplab._exchange import gather_ints

_WORD = 62  # bits of an int64 that carry flags
_FINE, _NOT_FINITE, _SPARSE, _LOADED = range(4)  # what is wrong here; and, added to it, a checkpoint was loaded
_FINISHED = -1


@dataclass(frozen=True)
class Meeting:
    """What a meeting found out; the same on every rank."""

    used: list[bool]  # for each tensor: does any rank have it?
    alike: bool  # do the ranks' tensors have the same sums, and not only zeros? `identical` tells for sure
    loaded: list[bool]  # for each rank: has it loaded a checkpoint since the last meeting?


class Lockstep:
    """The meetings of one model's ranks. `names` say what a tensor is called in a message; `wire_bytes` is the cost."""

    def __init__(self, names: Sequence[str], group: dist.ProcessGroup):
        self.names, self.group, self.wire_bytes = list(names), group, 0
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def meet(
        self,
        step: int,
        tensors: Sequence[torch.Tensor | None],
        what: str,
        options: object = (),
        loaded: bool = False,
    ) -> Meeting:
        """Every rank calls this in step `step` with its `tensors` (None where it has none), one for each name.

        loaded: has this rank loaded a checkpoint since the last meeting? If any has, `require_shared` is to follow.

        Raises on every rank: RuntimeError for ranks in different steps, TypeError for a sparse tensor, ValueError for
        NaN or infinity and for options that differ; the text names rank, step and parameter.
        """
        sums = _sums(tensors)
        state, where, count = self._state(tensors, sums)
        digest = zlib.crc32(struct.pack(f"{len(sums)}d", *sums)) if any(sums) else -1
        flags = [sum((t is not None) << i for i, t in enumerate(tensors[k : k + _WORD])) for k in self._words()]
        state += _LOADED * loaded
        table = self._gather([step, zlib.crc32(repr(options).encode()), digest, state, where, count, *flags])
        came = self._same_step(table)
        self._same_options([row[1] for row in table], options)
        for rank, (_, _, _, state, where, count, *_) in enumerate(table):
            state %= _LOADED
            if state == _SPARSE:
                raise TypeError(
                    f"sparse gradients not supported: {self.names[where]} on rank {rank}; build it with sparse=False"
                )
            if state == _NOT_FINITE:
                raise ValueError(
                    f"rank {rank}, step {step}: the {what} of {self.names[where]} holds NaN or infinity in {count} "
                    "elements; nothing was averaged"
                )
        words = [[row[6 + k] for row in table] for k in range(len(flags))]
        used = [any(word >> (i % _WORD) & 1 for word in words[i // _WORD]) for i in range(len(tensors))]
        digests = {row[2] for row in table}
        return Meeting(used, self._ranks > 1 and len(digests) == 1 and digests != {-1}, came)

    def require_shared(self, loaded: Sequence[bool], shared: dict[str, Sequence[torch.Tensor | None]]) -> None:
        """After a checkpoint: ValueError on every rank unless all ranks hold the same `shared` tensors, to the bit.

        loaded: which ranks have loaded one, as the meeting found. Every rank calls it.
        """
        counted = self.wire_bytes
        for what, tensors in shared.items():
            if not self.identical(tensors):
                raise ValueError(f"the ranks' {what} differ, {_advice(loaded)}")
        self.wire_bytes = counted  # a resumed run counts what an uninterrupted one does

    def identical(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Do all ranks hold the same `tensors`, to the bit? Every rank reads all its bytes for it."""
        checksum = 0
        for t in tensors:
            raw = b"none" if t is None else _real(t).reshape(-1).view(torch.uint8).cpu().numpy()
            checksum = zlib.crc32(raw, checksum)
        return len({tuple(row) for row in self._gather([checksum])}) == 1

    def finish(self, step: int, agreed: int) -> None:
        """This rank has taken its last step, number `step`, and agreed with the others after step `agreed`.

        RuntimeError on every rank if another goes on, or has other numbers: then not all of them would agree once more.
        """
        table = self._gather([_FINISHED, step, agreed] + [0] * (3 + len(self._words())))
        self._same_step(table)
        last = [row[1] for row in table]
        if len(set(last)) > 1:
            raise RuntimeError(f"the ranks took different numbers of steps: {_by_rank(last)}")
        if len(set(agreed := [row[2] for row in table])) > 1:
            raise RuntimeError(f"the ranks last agreed after different numbers of steps: {_by_rank(agreed)}")

    def _words(self) -> range:
        return range(0, len(self.names), _WORD)

    def _gather(self, row: list[int]) -> list[list[int]]:
        self.wire_bytes += 8 * len(row) * (self._ranks - 1)
        return gather_ints(row, self.group)

    def _state(self, tensors: Sequence[torch.Tensor | None], sums: Sequence[float]) -> tuple[int, int, int]:
        """What is wrong here: a code, the first tensor it holds for, and how many of its elements."""
        for i, t in enumerate(tensors):
            if t is not None and t.layout != torch.strided:
                return _SPARSE, i, 0
        for i, (t, s) in enumerate(zip(tensors, sums, strict=True)):
            if not math.isfinite(s) and (bad := int((~t.isfinite()).sum())):  # a sum may overflow by itself
                return _NOT_FINITE, i, bad
        return _FINE, 0, 0

    def _same_step(self, table: list[list[int]]) -> list[bool]:
        """RuntimeError unless all ranks are in the same step; which of them have loaded a checkpoint."""
        steps, loaded = [row[0] for row in table], [row[3] >= _LOADED for row in table]
        if len(set(steps)) == 1:
            return loaded
        where = ["has finished" if s == _FINISHED else f"is in step {s}" for s in steps]
        said = ", ".join(f"rank {r} {text}" for r, text in enumerate(where))
        advice = f"; {_advice(loaded)}" if any(loaded) else ""
        raise RuntimeError(f"the ranks are out of step: {said}. Every rank must take the same number of steps{advice}")

    def _same_options(self, checksums: list[int], options: object) -> None:
        if len(set(checksums)) == 1:
            return
        every: list = [None] * self._ranks
        dist.all_gather_object(every, repr(options), group=self.group)
        other = next(r for r, text in enumerate(every) if text != every[0])
        raise ValueError(f"the ranks' options differ: rank 0 has {every[0]}, rank {other} has {every[other]}")


def check_same_parameters(names: Sequence[str], params: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """ValueError on every rank unless all ranks have parameters of the same names, shapes and dtypes, in this order."""
    every: list = [None] * dist.get_world_size(group)
    mine = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in zip(names, params, strict=True)]
    dist.all_gather_object(every, mine, group=group)
    for rank, theirs in enumerate(every):
        pairs = zip_longest(every[0], theirs, fillvalue="no more")
        for here, there in ((a, b) for a, b in pairs if a != b):
            raise ValueError(f"the ranks' parameters differ: rank 0 has {here}, rank {rank} has {there}")


def digest(tensors: Sequence[torch.Tensor]) -> int:
    """A check sum of all bits, itself 32 bits: equal tensors have the same one, on any device and in any layout."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [_real(t).reshape(-1).view(whole[_real(t).element_size()]).sum(dtype=torch.int64) for t in tensors]
    return zlib.crc32(struct.pack(f"{len(bits)}q", *torch.stack(bits).tolist())) if bits else 0


def _sums(tensors: Sequence[torch.Tensor | None]) -> list[float]:
    """The sum of each tensor, 0.0 where there is none. NaN or infinity in a tensor shows in its sum."""
    dense = [t for t in tensors if t is not None and t.layout == torch.strided]
    if not dense:
        return [0.0] * len(tensors)
    wide = [_real(t).sum(dtype=torch.promote_types(_real(t).dtype, torch.float32)).double() for t in dense]
    found = iter(torch.stack(wide).tolist())
    return [next(found) if t is not None and t.layout == torch.strided else 0.0 for t in tensors]


@torch.no_grad()
def mean_(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> int:
    """Overwrite the tensors with their means over the group: one all-reduce for each dtype and device.

    Divides before the sum, as DistributedDataParallel does: a sum may overflow, a mean does not. The result is the
    same to the bit on all ranks. Returns the payload bytes that this rank puts on the wire if the backend runs a ring.
    """
    n, sent = dist.get_world_size(group), 0
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for t in tensors:
        if t.numel():
            kinds.setdefault((t.dtype, t.device), []).append(_real(t))
    for same in kinds.values():
        flat = torch.cat([t.reshape(-1) for t in same]).div_(n)
        dist.all_reduce(flat, group=group)
        for t, piece in zip(same, flat.split([t.numel() for t in same]), strict=True):
            t.copy_(piece.view(t.shape))
        sent += 2 * (n - 1) * flat.numel() * flat.element_size() // n
    return sent


def _real(t: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as real numbers, outside autograd."""
    return torch.view_as_real(t.detach()) if t.is_complex() else t.detach()


def _advice(loaded: Sequence[bool]) -> str:
    """What to do where ranks do not go on from the same place."""
    ranks = ", ".join(str(rank) for rank, has in enumerate(loaded) if has)
    return (
        f"and a checkpoint was loaded on rank {ranks} of {len(loaded)}: let every rank load what it saved itself, all "
        "at the same step"
    )


def _by_rank(values: Sequence[int]) -> str:
    return ", ".join(f"rank {r}: {v}" for r, v in enumerate(values))

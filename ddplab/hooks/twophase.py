"""A mean over ranks of things that do not add up, such as sign bits: reduce-scatter by hand, then all-gather.

A ring adds up on the way, and the sum of two bits is none. So each rank owns one shard of the tensor:

    phase 1    every rank encodes each shard and sends it straight to its owner           (N - 1) / N of the bytes
    server     the owner decodes N encodings of its shard, averages, encodes the average
    phase 2    every owner sends that to everybody                                        (N - 1) / N of the bytes

In all the ring's 2 (N - 1) / N, of *encoded* bytes. All-gathering the encodings instead costs N - 1 times their size:
at 64 ranks 1-bit gradients would send as much as float32 in a ring (claim C64).

Source: H. Tang et al., 1-bit Adam (arXiv:2102.02888), section 7 and figure 3: compressed_allreduce.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ddplab._arguments import instance, shown
from ddplab.hooks.codec import Codec
from ddplab.hooks.wire import Wire
from ddplab.transfers import count

_FLAG_BYTES = 8


class TwoPhase:
    """The mean of flat tensors over `group` in the encoding of `codec`; `wire_bytes` counts what this rank sent.

    `mean` is the whole of it, blocking. A hook calls `encode` beside backward and `exchange` in its lane.
    """

    def __init__(self, codec: Codec, group: dist.ProcessGroup | Wire | None = None) -> None:
        instance(codec, Codec, "codec is a ddplab codec, such as ddplab.SignCodec()")
        self.codec, self.wire = codec, group if isinstance(group, Wire) else Wire(group)

    def close(self) -> None:
        """Give back the group that was made for this exchange; every rank calls it, after its last one."""
        self.wire.close()

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that this rank has sent."""
        return self.wire.bytes

    def shard(self, n: int, rank: int | None = None) -> slice:
        """The elements, of n, that `rank` (default: this one) owns. All shards but the last have the same multiple of
        8 elements; there may be empty ones."""
        n = count(n, "n, the number of elements,", least=0, error=ValueError)
        rank = self.wire.rank if rank is None else count(rank, "rank", least=0, error=ValueError)
        if rank >= self.wire.size:
            raise ValueError(f"rank is 0 to {self.wire.size - 1}, not {rank}")
        size = self._shard_size(n)
        at = min(n, size * rank)
        return slice(at, min(n, at + size))

    def mean(
        self,
        flat: torch.Tensor,
        worker_residual: torch.Tensor | None = None,
        server_residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Overwrite `flat` (one-dimensional, floating) with the mean over the ranks, the same bits on all, return it.

        worker_residual, shape (n,), and server_residual, of the size of `shard(n)`, float32, are what error feedback
        holds back: added before, renewed afterwards, in place. None: no error feedback there.

        Raises ValueError on every rank, all tensors untouched, if a rank's values are NaN or infinite; TypeError and
        ValueError, before anything is sent, for tensors of another kind or size.
        """
        if not isinstance(flat, torch.Tensor) or not flat.is_floating_point() or flat.dim() != 1:
            raise TypeError(f"what is averaged is a one-dimensional floating tensor, not {shown(flat)}")
        part = self.shard(flat.numel())
        for name, residual, size in (
            ("worker_residual", worker_residual, flat.numel()),
            ("server_residual", server_residual, part.stop - part.start),
        ):
            if residual is None:
                continue
            if not isinstance(residual, torch.Tensor) or residual.dtype != torch.float32 or residual.shape != (size,):
                raise ValueError(f"{name} is a float32 tensor of shape ({size},) or None, not {shown(residual)}")
        if self.wire.size == 1:
            return flat
        worker = torch.empty_like(worker_residual) if worker_residual is not None else None
        server = torch.empty_like(server_residual) if server_residual is not None else None
        rows, finite = self.encode(flat, worker_residual, worker)
        self.flag(rows, -1 if finite else 0)
        mean = self.exchange(rows, flat, server_residual, server, self._complain)
        for residual, new in ((worker_residual, worker), (server_residual, server)):
            if residual is not None:
                residual.copy_(new)
        return mean

    def encode(
        self, flat: torch.Tensor, old: torch.Tensor | None = None, new: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, bool]:
        """What this rank sends in phase 1: row d, for rank d, is a flag (int64) and the encoding of d's shard. And
        whether all values are finite (True on CUDA, unlooked). `old` and `new` as in `Codec.encode`."""
        n, finite = flat.numel(), True
        rows = flat.new_empty((self.wire.size, _FLAG_BYTES + self._shard_bytes(n)), dtype=torch.uint8)
        for d, row in enumerate(rows):
            part = self.shard(n, d)
            mine, theirs = (None if t is None else t[part] for t in (old, new))
            finite = self.codec.encode(flat[part], row[_FLAG_BYTES:], mine, theirs) and finite
        self.flag(rows, -1)
        return rows, finite

    def flag(self, rows: torch.Tensor, flag: int | torch.Tensor) -> None:
        """Tell all ranks, along with the shards: -1, or the place of a value that is not finite."""
        rows[:, :_FLAG_BYTES].view(torch.int64)[:] = flag

    def exchange(
        self,
        rows: torch.Tensor,
        out: torch.Tensor,
        old: torch.Tensor | None = None,
        new: torch.Tensor | None = None,
        check: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Both phases; the mean goes into `out`. `old` and `new` are the server's residual before and after.

        `check` gets every rank's flag, shape (N,), between the phases: if it raises, it raises on every rank.
        """
        n = out.numel()
        received = self.wire.all_to_all(rows)
        if check is not None:
            check(received[:, :_FLAG_BYTES].contiguous().view(torch.int64).view(-1))
        part = self.shard(n)
        mean = torch.empty(part.stop - part.start, device=out.device)
        self.codec.mean(received[:, _FLAG_BYTES:], mean)
        mine = rows.new_empty(self._shard_bytes(n))
        self.codec.encode(mean, mine, old, new)
        direct = out if out.dtype == torch.float32 and out.is_contiguous() else torch.empty(n, device=out.device)
        for d, row in enumerate(self.wire.all_gather(mine)):
            self.codec.decode(row, direct[self.shard(n, d)])
        return out if direct is out else out.copy_(direct)

    def _shard_size(self, n: int) -> int:
        return -(-n // (8 * self.wire.size)) * 8

    def _shard_bytes(self, n: int) -> int:
        return -(-self.codec.nbytes(self._shard_size(n)) // 8) * 8  # every row starts where an int64 may

    def _complain(self, flags: torch.Tensor) -> None:
        for rank, flag in enumerate(flags.tolist()):
            if flag >= 0:
                raise ValueError(f"NaN or infinity in the values of rank {self.wire.ranks[rank]}: nothing was changed")

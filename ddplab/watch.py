"""Watch a rank's point-to-point messages, with a tensor that remembers who contributed to it.

A *ledger* tensor has one chunk per rank, and each chunk has one element for every pair (rank, chunk). Rank r starts
with a single 1 in each chunk, at (r, that chunk). Addition adds the counts, a copy copies them, so whatever a message
or a result holds can be read back as "A1+B1": letter = rank, digit = chunk from 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Content = dict[tuple[int, int], int] | int  # {(rank, chunk): times}; a plain int is the size of something unreadable


class Stuck(RuntimeError):
    """A send or receive that did not finish: its peer never answered, or is gone."""


@dataclass
class Report:
    """What one rank did while it was watched; plain data, so it travels to the parent."""

    rank: int
    sent: list[tuple[int, Content]] = field(default_factory=list)  # (peer, content) in order of posting
    received: list[int] = field(default_factory=list)  # peers, in order of posting
    dropped: str | None = None  # "send" or "receive": posted, and its handle thrown away before it was waited for
    stuck: str | None = None  # the operation that never finished
    error: str | None = None  # the reader's own exception, with its line
    blank: bool = False  # the error is that of an exercise nobody wrote yet
    final: list[Content] = field(default_factory=list)  # content of each chunk at the end
    scaled: bool = False  # True if the final values are sums divided by the number of ranks


def ledger(rank: int, ranks: int, device: str = "cpu") -> torch.Tensor:
    """The start tensor of `rank`: float32, `ranks` chunks of ranks * ranks elements each."""
    chunks = torch.zeros(ranks, ranks, ranks)  # [which chunk, contributing rank, its chunk]
    for chunk in range(ranks):
        chunks[chunk, rank, chunk] = 1
    return chunks.flatten().to(device)


def read(chunk: torch.Tensor, ranks: int) -> tuple[Content, bool]:
    """(content, scaled) of one chunk; `scaled` when its counts come divided by `ranks`. A plain size if unreadable."""
    values = chunk.detach().double().flatten().cpu()
    if values.numel() != ranks * ranks:
        return values.numel(), False
    for scale in (1, ranks):
        counts = (values * scale).round()
        if torch.allclose(values * scale, counts, atol=1e-3) and counts.min() >= 0:
            where = counts.nonzero().flatten().tolist()
            return {(i // ranks, i % ranks): int(counts[i]) for i in where}, scale > 1
    return values.numel(), False


class Watch:
    """Within `with Watch(ranks, timeout) as report:` every message of this process is recorded and limited in time."""

    def __init__(self, ranks: int, timeout: float):
        self.ranks, self.limit = ranks, timedelta(seconds=timeout)
        self.report, self.open = Report(dist.get_rank()), []  # open: kinds of the handles not yet waited for
        self.over = False  # from the first trouble on, handles are dropped with good reason

    def isend(self, tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
        self.report.sent.append((dst if group_dst is None else group_dst, read(tensor, self.ranks)[0]))
        return self._tracked("send", self.real["isend"], tensor, dst=dst, group=group, tag=tag, group_dst=group_dst)

    def irecv(self, tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
        self.report.received.append(src if group_src is None else group_src)
        return self._tracked("receive", self.real["irecv"], tensor, src=src, group=group, tag=tag, group_src=group_src)

    def send(self, *args: Any, **kwargs: Any) -> None:
        self.isend(*args, **kwargs).wait()

    def recv(self, *args: Any, **kwargs: Any) -> int:
        self.irecv(*args, **kwargs).wait()
        return self.report.received[-1]

    def _tracked(self, kind: str, op: Any, tensor: Any, **kwargs: Any) -> Any:
        work = op(tensor, **kwargs)
        if work is None:  # inside a coalesced batch: the batch hands out the handle
            return None
        self.open.append(kind)
        return _Work(work, kind, self)

    def __enter__(self) -> Report:
        names = ("isend", "irecv", "send", "recv")
        self.real = {name: getattr(c10d, name) for name in names}
        for name in names:
            watched = getattr(self, name)  # the same object in both homes: batch_isend_irecv compares by identity
            setattr(c10d, name, watched)
            setattr(dist, name, watched)
        return self.report

    def __exit__(self, error: object, *rest: object) -> None:
        if self.open and not error and not self.over:
            self.report.dropped = self.open[0]
        self.over = True
        for name, real in self.real.items():
            setattr(c10d, name, real)
            setattr(dist, name, real)


class _Work:
    """A work handle whose `wait` gives up after the watch's limit and says on what."""

    def __init__(self, work: Any, kind: str, watch: Watch):
        self.work, self.kind, self.watch, self.done = work, kind, watch, False

    def wait(self, timeout: Any = None) -> bool:
        try:
            self.work.wait(self.watch.limit)
        except RuntimeError as error:
            self.watch.report.stuck, self.watch.over = self.watch.report.stuck or self.kind, True
            raise Stuck(str(error)) from None
        self._close()
        return True

    def is_completed(self) -> bool:
        done = self.work.is_completed()
        if done:
            self._close()
        return done

    def _close(self) -> None:
        if not self.done:
            self.done = True
            self.watch.open.remove(self.kind)

    def __del__(self) -> None:
        if not self.done and not self.watch.over:
            self.watch.report.dropped = self.watch.report.dropped or self.kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

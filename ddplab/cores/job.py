"""What a core runs on, and what it reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ddplab._links import read_counters
from ddplab.launch import launch

LIMIT_S = 300.0


class Row(NamedTuple):
    """One line of a core's table; `right` is None for what is shown and cannot be right or wrong."""

    what: str
    found: str
    expected: str = "-"
    right: bool | None = None


def equal(what: str, found: Any, expected: Any) -> Row:
    """A row that is right where both are equal."""
    return Row(what, str(found), str(expected), found == expected)


def at_most(what: str, found: float, limit: float, unit: str = "") -> Row:
    """A row that is right where `found` is a number no larger than `limit`."""
    return Row(what, f"{found:.3g}{unit}", f"<= {limit:.3g}{unit}", found <= limit)


def at_least(what: str, found: float, limit: float, unit: str = "") -> Row:
    """A row that is right where `found` is no smaller than `limit`."""
    return Row(what, f"{found:.3g}{unit}", f">= {limit:.3g}{unit}", found >= limit)


def largest(values: Iterable[float]) -> float:
    """The largest; NaN where there is one, which Python's `max` may pass over."""
    return float(np.max(list(values)))


@dataclass(frozen=True)
class Job:
    """The ranks that all cores share.

    hosts: the global ranks of each machine.  backend, device: what every rank uses.  options: for `launch`.
    """

    hosts: tuple[tuple[int, ...], ...]
    backend: str
    device: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def join(cls, ranks: int | None = None, device: str = "auto") -> Job:
        """Ask the ranks where they are. ranks: how many to start; under torchrun the job has decided.

        ValueError where there is only one.
        """
        options = {"ranks": ranks, "device": device, "timeout": LIMIT_S}
        seen = launch(_where, **options)
        if len(seen) < 2:
            raise ValueError("the cores are about what ranks say to each other: start 2 or more")
        places: dict[str, list[int]] = {}
        for rank, (place, _, _) in enumerate(seen):
            places.setdefault(place, []).append(rank)
        return cls(tuple(map(tuple, places.values())), *seen[0][1:], tuple(options.items()))

    @property
    def ranks(self) -> int:
        """How many there are."""
        return sum(map(len, self.hosts))

    @property
    def counted(self) -> bool:
        """Does the kernel see every byte that leaves a machine? Not with NCCL: shared memory and RDMA pass it by."""
        return self.backend == "gloo" and os.path.exists("/proc/self/net/dev")

    def launch(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`fn(*args)` on every rank; all results, in rank order, on every process."""
        return launch(fn, *args, **dict(self.options))

    def first(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)` on rank 0 alone, while the others wait; its result, on every process."""
        return self.launch(_on_first, fn, args)[0]


def _where() -> tuple[str, str, str]:
    import torch.distributed as dist

    from ddplab.hierarchy import where_am_i

    return where_am_i(), dist.get_backend(), str(here().type)


def _on_first(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch.distributed as dist

    return fn(*args) if dist.get_rank() == 0 else None


def here() -> Any:
    """This rank's torch device."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")


def leaving_bytes(work: Callable[[], Any], loopback: bool, runs: int = 3) -> int:
    """Inside a rank: bytes that the kernel counted on this machine's busiest device while all ranks did `work`.

    loopback: count `lo`, the wire between ranks of one machine, instead of the devices that lead out.
    Of several runs the least: other programs send, too, and TCP sends some bytes twice.
    """
    import torch.distributed as dist

    counts = []
    for _ in range(runs):
        dist.barrier()
        before = read_counters()
        dist.barrier()
        work()
        dist.barrier()
        after = read_counters()
        moved = {name: sent - before.get(name, (sent, 0))[0] for name, (sent, _) in after.items()}
        counts.append(max((n for name, n in moved.items() if (name == "lo") == loopback), default=0))
    return min(counts)

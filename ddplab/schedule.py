"""Collectives as data: a `Schedule` is a list of transfers, and a builder writes one down.

A transfer says: in this step, this rank sends this chunk to that rank, who adds it to its own (reduce) or replaces its
own (copy). Everything else in ddplab follows from the list: `verify` proves it, `figure` draws it, `predict` prices it,
`all_reduce` runs it. Every builder takes one rank too: a schedule without transfers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from ddplab.symbolic import ScheduleError, label
from ddplab.transfers import Schedule, Transfer, count

__all__ = [
    "Schedule",
    "ScheduleError",
    "Transfer",
    "chain",
    "direct",
    "halving_doubling",
    "hierarchical",
    "label",
    "ring",
    "star",
    "tree",
]

_MAX_TRANSFERS = 1 << 25  # 17 bytes each: half a gigabyte
_MAX_CHAIN_CHUNKS = 1024


def _ranks(name: str, n: int, transfers: Callable[[int], int]) -> int:
    """Check a builder's number of ranks, before anything of the size of its `transfers(n)` rows is allocated."""
    n = count(n, f"{name}'s number of ranks")
    if transfers(n) > _MAX_TRANSFERS:
        raise ScheduleError(
            f"{name} on {n:,} ranks would be {transfers(n):,} transfers, more than {_MAX_TRANSFERS:,}; "
            "price it by its closed form, such as ddplab.ring_seconds."
        )
    return n


def _grids(name: str, ranks: int, chunks: int, *blocks: tuple) -> Schedule:
    """A schedule from blocks of (step, src, dst, chunk, reduce), each broadcast to one shape, rows in C order."""
    flat = [[column.ravel() for column in np.broadcast_arrays(*block)] for block in blocks]
    columns = [np.concatenate(parts) for parts in zip(*flat, strict=True)] if flat else [()] * 5
    return Schedule(name, ranks, chunks, *columns)


def ring(n: int, first_chunk: int = -1, direction: int = +1) -> Schedule:
    """Ring all-reduce: n - 1 steps reduce (reduce-scatter), n - 1 steps copy (all-gather); n chunks.

    At step s rank r sends chunk (r + first_chunk - direction * s) mod n to rank r + direction. In every step each rank
    sends one chunk to one neighbour and receives one from the other, 2 (n - 1) / n of the buffer in all.
    Four known rings, as (first_chunk, direction): NCCL (-1, +1), textbook (0, +1), the article's (+1, +1), gloo
    (+1, -1). Sources: NCCL src/device/all_reduce.h, gloo/allreduce.cc; Patarasuk and Yuan, JPDC 69 (2009) 117-124.
    """
    n = _ranks("ring", n, lambda n: 2 * n * (n - 1))
    if direction not in (1, -1):
        raise ScheduleError(f"ring's direction must be +1 (to rank r + 1) or -1 (to rank r - 1), not {direction!r}.")
    try:
        first_chunk = operator.index(first_chunk) % n
    except TypeError:
        raise ScheduleError(f"ring's first_chunk must be a whole number, not {first_chunk!r}.") from None
    step = np.arange(2 * (n - 1), dtype=np.int32)[:, None]
    rank = np.arange(n, dtype=np.int32)[None, :]
    chunk = (rank + (first_chunk - direction * step) % n) % n
    return _grids("ring", n, n, (step, rank, (rank + direction) % n, chunk, step < n - 1))


def star(n: int) -> Schedule:
    """Gather and broadcast through rank 0: everybody sends it the whole buffer, it sends everybody the sum; one chunk.

    How the article pictures `nn.DataParallel`. Rank 0's link carries n - 1 buffers each way.
    """
    n = _ranks("star", n, lambda n: 2 * (n - 1))
    others = np.arange(1, n)
    return _grids("star", n, 1, (0, others, 0, 0, True), (1, 0, others, 0, False))


def chain(n: int, chunks: int | None = None) -> Schedule:
    """Pipelined reduce along the chain n - 1, ..., 1, 0, then pipelined broadcast back along 0, 1, ..., n - 1.

    What `nn.DataParallel` does over NCCL: ncclReduce to device 0, ncclBroadcast from it. Each phase takes
    chunks + n - 2 steps of 1 / chunks of the buffer, so S bytes at B bytes a second cost 2 S/B (1 + (n - 2) / chunks).
    A full pipe costs 2 S/B, n / (n - 1) times the ring. The default is 12 chunks for each hop that has to be filled,
    12 (n - 2), at least 1 and at most 1024: filling adds 1/12, about 8%, up to 87 ranks. More chunks would add less and
    pay more latencies.
    """
    k = None if chunks is None else count(chunks, "chain's number of chunks")
    n = _ranks("chain", n, lambda n: 2 * (n - 1) * (k or _MAX_CHAIN_CHUNKS))
    k = k or min(max(12 * (n - 2), 1), _MAX_CHAIN_CHUNKS)
    hop, chunk = np.arange(n - 1)[None, :], np.arange(k)[:, None]
    step, last = chunk + hop, k + n - 2
    sender = n - 1 - hop
    return _grids("chain", n, k, (step, sender, sender - 1, chunk, True), (last + step, hop, hop + 1, chunk, False))


def direct(n: int) -> Schedule:
    """All-to-all, then all-gather: two steps. Everybody sends rank c its chunk c; rank c sends everybody the sum.

    As many bytes as the ring, two latencies instead of 2 (n - 1), n - 1 messages at once; what 1-bit compression needs,
    since each contribution is compressed once and the sum once.
    """
    n = _ranks("direct", n, lambda n: 2 * n * (n - 1))
    rank, k = np.arange(n)[:, None], np.arange(1, n)[None, :]
    peer = (rank + k) % n  # rotated, so that nobody's link is everybody's first target
    return _grids("direct", n, n, (0, rank, peer, peer, True), (1, rank, peer, rank, False))


def tree(n: int) -> Schedule:
    """Binomial tree: reduce to rank 0 in ceil(log2 n) steps, broadcast in as many; one chunk, the whole buffer each."""
    n = _ranks("tree", n, lambda n: 2 * (n - 1))
    depth = (n - 1).bit_length()
    up, down = [], []
    for level in range(depth):
        parent = np.arange(0, n - (1 << level), 2 << level)
        child = parent + (1 << level)
        up.append((level, child, parent, 0, True))
        down.append((2 * depth - 1 - level, parent, child, 0, False))
    return _grids("tree", n, 1, *up, *reversed(down))


def halving_doubling(n: int) -> Schedule:
    """Recursive halving (reduce-scatter), recursive doubling (all-gather): 2 log2 n steps, n a power of two.

    As many bytes as the ring in fewer steps. Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005) 49-66.
    """
    n = _ranks("halving_doubling", n, lambda n: 2 * n * (n - 1))
    if n & (n - 1):
        raise ScheduleError(f"halving_doubling needs a power of two ranks (2, 4, 8, ...), not {n}; ring takes any.")
    rank, levels = np.arange(n)[:, None], n.bit_length() - 1
    blocks = []
    for level in reversed(range(levels)):  # give away the half of my block that the partner keeps
        half = 1 << level
        chunk = ((rank ^ half) & -half) + np.arange(half)[None, :]
        blocks.append((levels - 1 - level, rank, rank ^ half, chunk, True))
    for level in range(levels):  # hand on the block that I have
        half = 1 << level
        chunk = (rank & -half) + np.arange(half)[None, :]
        blocks.append((levels + level, rank, rank ^ half, chunk, False))
    return _grids("halving_doubling", n, n, *blocks)


def hierarchical(hosts: int, ranks_per_host: int) -> Schedule:
    """Two-level ring: reduce-scatter inside each host, ring across hosts, all-gather inside; rank = host * g + local.

    hosts * g chunks. Local rank l owns block l (chunks l * hosts to l * hosts + hosts - 1) inside its host, and the g
    rings across hosts run at once, each on its block. A host's link carries 2 (hosts - 1) / hosts of the buffer.
    """
    k, g = count(hosts, "hierarchical's hosts"), count(ranks_per_host, "hierarchical's ranks_per_host")
    _ranks("hierarchical", k * g, lambda n: 2 * n * (k * (g - 1) + k - 1))
    host, local = np.arange(k)[None, :, None, None], np.arange(g)[None, None, :, None]
    part = np.arange(k)[None, None, None, :]  # the hosts' parts of a block, sent together inside a host
    rank, inside, across = host * g + local, host * g + (local + 1) % g, (host + 1) % k * g + local
    t, u = np.arange(g - 1)[:, None, None, None], np.arange(k - 1)[:, None, None, None]
    first, second, third = g - 1, g - 1 + k - 1, g - 1 + 2 * (k - 1)
    return _grids(
        "hierarchical",
        k * g,
        k * g,
        (t, rank, inside, (local - 1 - t) % g * k + part, True),
        (first + u, rank, across, local * k + (host - 1 - u) % k, True),
        (second + u, rank, across, local * k + (host - u) % k, False),
        (third + t, rank, inside, (local - t) % g * k + part, False),
    )

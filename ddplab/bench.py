"""A benchmark of collectives in the manner of nccl-tests: same columns, same bandwidths, real ranks, checked results.

The conventions are those of https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: algbw = size / time,
busbw = algbw * 2 (n - 1) / n for an all-reduce, which can be held against the speed of the links whatever n is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ddplab import schedule as builders
from ddplab._sizes import Sizes, parse_sizes
from ddplab._table import frame_of, table
from ddplab.launch import launch
from ddplab.schedule import Schedule

if TYPE_CHECKING:
    import pandas as pd

    from ddplab.hosts import Hosts

BACKEND = "backend"
OPS = ("sum", "mean", "max", "min", "product")
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}
_BUILDERS = ("ring", "star", "chain", "direct", "tree", "halving_doubling")
Algorithm = str | Schedule | Callable[[int], Schedule]


def bench(
    collective: str = "all_reduce",
    algorithms: Sequence[Algorithm] | Algorithm = ("ring", "star", BACKEND),
    ranks: int | None = None,
    sizes: Sizes = "1K:128M",
    op: str = "sum",
    dtype: str = "float32",
    hosts: Hosts | None = None,
    iters: int = 7,
    warmup: int = 1,
    device: str = "auto",
    check: bool = True,
    timeout: float = 600.0,
    show: bool = True,
    realtime: bool = False,
) -> pd.DataFrame:
    """Time all-reduce algorithms on real ranks; print the table of nccl-tests and return it as a DataFrame.

    A time is that of the slowest rank (nccl-tests `-a 3`), each rank timing its own call between two barriers; the
    table gives the median over `iters` runs, which take turns between the algorithms. Measured, not modelled.

    Args:
        collective: "all_reduce".
        algorithms: names ("ring", "star", "chain", "direct", "tree", "halving_doubling", "hierarchical", or "backend"
            for the backend's own), schedules, or functions that build one for n ranks.
        ranks: processes; 4, or as many as `hosts` has, or the size of the torchrun job that this process belongs to.
        sizes: bytes, as in nccl-tests "1K:128M" (times 2), "1K:128M:4" (times 4), a list "1K,1M", or numbers. K, M, G
            and KiB, MiB, GiB are powers of 1024, KB, MB, GB of 1000. Cut down to whole elements.
        op: "sum", "mean", "max", "min" or "product".   dtype: "float32", "bfloat16", "int64" ...
        hosts: emulated hosts to run on; then the kernel counts the bytes, and busbw is set against the link.
        iters, warmup: timed runs of each algorithm at each size, and untimed ones before them.
        device, timeout, realtime: as in `launch`.   show: print the table.
        check: compare every result with the backend's own all-reduce of the same input.

    Returns:
        One row a size and algorithm: size_B, count, type, redop, algorithm, time_us, algbw_GBps, busbw_GBps, errors
        (elements that differ from the backend's result, all ranks and runs; <NA> unchecked), then time_min_us,
        time_p25_us, time_p75_us, time_max_us, sent_B (bytes the kernel counted on the busiest host's link in one run,
        median; <NA> without hosts), busbw_pct (of a link's payload rate; NaN without hosts). `.attrs` says on what.

    Raises:
        ValueError, TypeError: arguments that make no sense, before any rank starts. RankError: see `launch`.
    """
    if collective != "all_reduce":
        raise ValueError(f'bench measures "all_reduce", not {collective!r}.')
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, not {op!r}.")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(ITEM_BYTES)}, not {dtype!r}.")
    if op == "mean" and "int" in dtype:
        raise TypeError(f'op "mean" does not take {dtype}; it takes floating-point types.')
    for name, value, least in (("iters", iters, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    n = _ranks(ranks, hosts)
    named = _resolve(algorithms, n, hosts)
    counts = [nbytes // ITEM_BYTES[dtype] for nbytes in parse_sizes(sizes)]
    if 0 in counts:
        raise ValueError(f"A size is less than one {dtype} element, {ITEM_BYTES[dtype]} bytes.")
    from ddplab._measure import measure  # torch, which bad arguments need not wait for

    order = (counts, [schedule for _, schedule in named], op, dtype, iters, warmup, check)
    seen = launch(measure, *order, ranks=n, hosts=hosts, timeout=timeout, device=device, realtime=realtime)
    frame = frame_of(seen, [name for name, _ in named], counts, op, dtype, hosts)
    if show and os.environ.get("RANK", "0") == "0":
        print(table(frame))
    return frame


def _ranks(ranks: int | None, hosts: Hosts | None) -> int:
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:  # torchrun has decided
        return int(os.environ["WORLD_SIZE"])
    if ranks is None:
        return hosts.ranks if hosts is not None else 4
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be a whole number of at least 1, not {ranks!r}.")
    return ranks


def _resolve(
    algorithms: Sequence[Algorithm] | Algorithm, n: int, hosts: Hosts | None
) -> list[tuple[str, Schedule | None]]:
    """(name, schedule) pairs; None stands for the backend's own all-reduce."""
    if isinstance(algorithms, (str, Schedule)) or not isinstance(algorithms, Iterable):
        algorithms = [algorithms]
    named: list[tuple[str, Schedule | None]] = []
    for algorithm in algorithms:
        name = algorithm.replace("-", "_") if isinstance(algorithm, str) else None
        if name == BACKEND:
            named.append((BACKEND, None))
            continue
        if name == "hierarchical":
            inner = hosts.ranks_per_host if hosts is not None else int(os.environ.get("LOCAL_WORLD_SIZE", n))
            algorithm = builders.hierarchical(n // inner, inner)
        elif name in _BUILDERS:
            algorithm = getattr(builders, name)(n)
        elif name is not None:
            raise ValueError(
                f"No algorithm is called {algorithm!r}: take {', '.join(_BUILDERS)}, hierarchical or {BACKEND}, "
                "or pass a schedule or a function that builds one."
            )
        if not isinstance(algorithm, Schedule) and not callable(algorithm):
            raise TypeError(f"An algorithm is a name, a schedule or a function that builds one, not {algorithm!r}.")
        schedule = algorithm if isinstance(algorithm, Schedule) else algorithm(n)
        if not isinstance(schedule, Schedule):
            raise TypeError(f"The builder {algorithm!r} gave a {type(schedule).__name__}, not a Schedule.")
        if schedule.ranks != n:
            raise ValueError(f"Schedule {schedule.name} is for {schedule.ranks} ranks, but the benchmark has {n}.")
        named.append((schedule.name, schedule))
    if not named:
        raise ValueError("bench needs at least one algorithm.")
    return [(f"{name}-{k}" if (k := _earlier(named, i)) else name, s) for i, (name, s) in enumerate(named)]


def _earlier(named: list[tuple[str, Schedule | None]], i: int) -> int:
    """How many entries before the i-th have its name: two rings stay apart in the table, as ring and ring-1."""
    return sum(name == named[i][0] for name, _ in named[:i])

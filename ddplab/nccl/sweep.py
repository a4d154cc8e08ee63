"""Sweep a knob: measure each of its values in turn, many times over, and say whether it helps, hurts or does nothing.

An environment variable is read when a communicator starts, so each of its measurements is a launch of its own. The
options of DDP and the algorithm of an all-reduce can change within one launch, which is much faster. Either way every
round measures every value once, in random order; the verdict is that of `judge.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddplab._sizes import parse_sizes
from ddplab.nccl.judge import judge, least_rounds

if TYPE_CHECKING:
    import pandas as pd

    from ddplab.hosts import Hosts

DDP_OPTIONS = (
    "bucket_cap_mb",
    "gradient_as_bucket_view",
    "static_graph",
    "find_unused_parameters",
    "broadcast_buffers",
)
ALGORITHMS = ("backend", "ring", "star", "chain", "direct", "tree", "halving_doubling")


@dataclass
class Sweep:
    """What a sweep found. `table`: one row a value, see `judge`. `observations`: round, turn, value, seconds.

    about: knob, workload, ranks, backend, size_B, confidence, and how it was measured, as text.
    """

    table: pd.DataFrame
    observations: pd.DataFrame
    about: dict[str, Any]

    def __str__(self) -> str:
        about = self.about
        size = "" if about["size_B"] is None else f", {about['size_B']} B"
        lines = [
            f"# {about['knob']} on {about['workload']}{size}: {about['ranks']} ranks, {about['backend']}",
            f"# measured: {about['how']}",
            f"# limits of the change: {about['confidence']:.0%} for the whole table",
            f"{'value':>24} {'time_ms':>9} {'change':>8} {'from':>8} {'to':>8}  verdict",
        ]
        for row in self.table.itertuples(index=False):
            changes = " ".join(f"{x:>+7.1f}%" for x in (row.change_pct, row.low_pct, row.high_pct))
            if row.verdict == "baseline":
                changes = " ".join(["       -"] * 3)
            lines.append(f"{row.value!s:>24} {row.time_ms:>9.3f} {changes}  {row.verdict}")
        others = self.table[self.table["verdict"] == "no effect"]
        if len(others):
            widest = max(others["high_pct"].max(), -others["low_pct"].min())
            lines.append(
                f"# no effect: it could still hide a change of up to {widest:.1f}%; more rounds would narrow that"
            )
        return "\n".join(lines)


def sweep(
    knob: str,
    values: Sequence[Any],
    *,
    workload: str | Callable[[], None] | None = None,
    size: int | str = "4M",
    ranks: int | None = None,
    rounds: int = 24,
    iters: int = 5,
    warmup: int = 2,
    confidence: float = 0.99,
    least_effect: float = 0.01,
    env: dict[str, str] | None = None,
    hosts: Hosts | None = None,
    device: str = "auto",
    seed: int = 0,
    timeout: float = 120.0,
    show: bool = True,
) -> Sweep:
    """Measure `knob` at `values`; the first is the baseline that the others are compared with.

    knob: an environment variable ("NCCL_PROTO", "GLOO_SOCKET_IFNAME"), an option of DistributedDataParallel
        ("bucket_cap_mb", "gradient_as_bucket_view" ...), or "algorithm" for the schedules of ddplab and "backend".
    values: text for a variable; None leaves it unset, or the option at its default. The same value twice is an A/A
        sweep, which must say "no effect": run one first.
    workload: "all_reduce" of `size` bytes, "ddp" (a step of eight layers with `size` bytes of gradients), or a function
        that does one step on each rank. Default: "ddp" for its options, else "all_reduce".
    rounds: each measures every value once.   iters: steps a measurement, of which the median counts; a step takes as
        long as on its slowest rank.   env: other variables, the same for all values.
    confidence, least_effect: see `judge`.   seed: of the random order.   ranks, hosts, device, timeout: see `launch`.

    Returns a `Sweep`; show=True prints it.
    Raises ValueError, TypeError for arguments that make no sense, before anything starts; RankError: see `launch`.
    """
    from ddplab.launch import resolve_backend

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ValueError("a sweep starts its own ranks, so it cannot run under torchrun")
    variable = knob.isupper()
    workload = workload or ("ddp" if knob in DDP_OPTIONS else "all_reduce")
    labels, nbytes = _check(knob, values, workload, size, rounds, iters, warmup, confidence), parse_sizes(size)[0]
    ranks = ranks or (hosts.ranks if hosts is not None else 4)
    draw, order = random.Random(seed), []
    for _ in range(rounds):
        turn = list(range(len(values)))
        draw.shuffle(turn)
        order.append(turn)
    common = {"ranks": ranks, "hosts": hosts, "timeout": timeout, "device": device}
    task = (workload, nbytes, iters, warmup)
    if variable:
        times = _launch_each(knob, values, order, task, common, env or {})
        how = f"{rounds} rounds of {len(values)} launches in random order, {iters} steps each"
    else:
        times = _launch_once(knob, values, order, task, common, env or {})
        how = f"{rounds} rounds in random order within one launch, {iters} steps each"
    about = {
        "knob": knob,
        "workload": workload if isinstance(workload, str) else getattr(workload, "__name__", "a function"),
        "ranks": ranks,
        "backend": "gloo" if hosts else resolve_backend(ranks, device)[0],
        "size_B": None if callable(workload) else nbytes,
        "confidence": confidence,
        "how": how,
    }
    found = _finish(labels, order, times, confidence, least_effect, about)
    if show:
        print(found)
    return found


def _finish(
    labels: list[str],
    order: list[list[int]],
    times: list[list[float]],
    confidence: float,
    least_effect: float,
    about: dict[str, Any],
) -> Sweep:
    import pandas as pd

    observations = pd.DataFrame(
        {"round": r, "turn": t, "value": labels[i], "seconds": times[r][t]}
        for r, turn in enumerate(order)
        for t, i in enumerate(turn)
    )
    table = judge(observations, labels[0], confidence, least_effect).set_index("value").loc[labels].reset_index()
    return Sweep(table, observations, about)


def _check(
    knob: str, values: Sequence[Any], workload: Any, size: Any, rounds: int, iters: int, warmup: int, confidence: float
) -> list[str]:
    """A name for each value, unique; ValueError or TypeError for what cannot be swept."""
    if not isinstance(knob, str) or not (knob.isupper() or knob in DDP_OPTIONS or knob == "algorithm"):
        known = ", ".join(("algorithm", *DDP_OPTIONS))
        raise ValueError(f"a knob is an environment variable in capitals, or one of {known}; not {knob!r}")
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) < 2:
        raise ValueError(f"values is a list of at least two, the first of them the baseline; not {values!r}")
    for value in values:
        if knob.isupper() and not (value is None or isinstance(value, str)):
            raise TypeError(f"{knob} takes text or None (unset), not {value!r}")
        if knob == "algorithm" and value not in (None, *ALGORITHMS):
            raise ValueError(f"no algorithm is called {value!r}: take {', '.join(ALGORITHMS)}")
    if not callable(workload) and workload not in ("all_reduce", "ddp"):
        raise ValueError(f'workload is "all_reduce", "ddp" or a function, not {workload!r}')
    if (knob in DDP_OPTIONS) != (workload == "ddp") and not knob.isupper():
        raise ValueError(f"{knob} does not act on the workload {workload!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence lies between 0 and 1, not {confidence!r}")
    least = least_rounds(confidence, len(values) - 1)
    for name, value, lowest in (("rounds", rounds, least), ("iters", iters, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            why = f" for {len(values)} values at {confidence:.0%}" if name == "rounds" else ""
            raise ValueError(f"{name} must be a whole number of at least {lowest}{why}, not {value!r}")
    if len(parse_sizes(size)) != 1:
        raise ValueError(f"a sweep has one size, not {size!r}")
    names = [
        "unset" if value is None and knob.isupper() else "default" if value is None else str(value) for value in values
    ]
    return [name if names[:i].count(name) == 0 else f"{name} (again)" + "'" * (names[:i].count(name) - 1)
            for i, name in enumerate(names)]  # fmt: skip


def _launch_each(knob, values, order, task, common, env) -> list[list[float]]:
    from ddplab.launch import launch
    from ddplab.nccl._sweep_rank import measure

    times = []
    for turn in order:
        row = []
        for i in turn:
            with _without(knob):
                setting = {} if values[i] is None else {knob: values[i]}
                seen = launch(measure, knob, [[None]], *task, env={**env, **setting}, show=False, **common)
            row.append(seen[0][0][0])
        times.append(row)
    return times


def _launch_once(knob, values, order, task, common, env) -> list[list[float]]:
    from ddplab.launch import launch
    from ddplab.nccl._sweep_rank import measure

    return launch(measure, knob, [[values[i] for i in turn] for turn in order], *task, env=env, show=False, **common)[0]


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """This process's environment without `name`: the ranks inherit it."""
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before

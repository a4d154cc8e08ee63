"""What a sum of N gradients loses in fp16, bf16 or fp32, and how that depends on who adds what first.

Each addition rounds once. A ring hands a sum around: it grows by one rank at a time, so the first contribution goes
through N - 1 roundings. A tree adds equals to equals, and nothing goes through more than log2 N. Nothing is sent here:
the additions are made in the order of the schedule, on all ranks' numbers in this process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ddplab._arguments import choice, instance, several, shown
from ddplab.schedule import Schedule, ScheduleError, chain, direct, halving_doubling, ring, star, tree
from ddplab.transfers import count, number

if TYPE_CHECKING:
    import pandas as pd

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    builder.__name__: builder for builder in (ring, star, chain, direct, tree, halving_doubling)
}
# Mean of (rounding error / sum)^2 over one addition, in units of u^2: the error is uniform within half a spacing (1/3),
# and a sum's place between two powers of two is spread as the mantissas of measured numbers are (3/8 / ln 2).
_MEAN_SQUARE = 3 / 8 / math.log(2) / 3


class Additions(NamedTuple):
    """The additions behind one sum. depth: most that one contribution goes through; ranks: of each, in its sum."""

    depth: int
    ranks: list[int]


def unit_roundoff(dtype: torch.dtype) -> float:
    """u, the largest relative error of one rounding: 2^-11 for fp16, 2^-8 for bf16, 2^-24 for fp32."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"a rounding takes a floating dtype, such as torch.float16, not {shown(dtype)}")
    return torch.finfo(dtype).eps / 2


def additions(schedule: Schedule) -> Additions:
    """How a schedule adds up chunk 0, in the sum that rank 0 ends with."""
    instance(schedule, Schedule, "additions are those of a ddplab.Schedule, such as ddplab.ring(4)")
    held = [Additions(0, [1])] * schedule.ranks  # of a sum's additions, the last is the sum itself
    for step in _steps(schedule):
        sent = [(dst, reduce, held[src]) for src, dst, chunk, reduce in step if chunk == 0]
        for dst, reduce, theirs in sent:
            ours = held[dst]
            held[dst] = (
                Additions(
                    1 + max(ours.depth, theirs.depth), [*ours.ranks, *theirs.ranks, ours.ranks[-1] + theirs.ranks[-1]]
                )
                if reduce
                else theirs
            )
    return Additions(held[0].depth, [n for n in held[0].ranks if n > 1])


def rounded_sum(schedule: Schedule, values: torch.Tensor) -> torch.Tensor:
    """What `ddplab.all_reduce(..., schedule)` leaves on each rank, bit for bit, computed in this process.

    values: (ranks, n), rank r's tensor in row r, in the dtype in which the sums are made. Returns the same shape.
    Several sums into one chunk in one step are made in the order of the schedule's rows.
    """
    instance(schedule, Schedule, "rounded_sum adds along a ddplab.Schedule, such as ddplab.ring(4)")
    instance(values, torch.Tensor, "values are a tensor, one row a rank")
    if values.is_complex() or values.layout != torch.strided:
        raise TypeError(f"values are a dense tensor of real numbers, not {values.layout}, {values.dtype}")
    if values.dim() != 2 or len(values) != schedule.ranks:
        raise ScheduleError(
            f"{schedule.name} runs on {schedule.ranks} ranks: values must have shape ({schedule.ranks}, n), "
            f"not {tuple(values.shape)}."
        )
    lengths = torch.tensor(schedule.bounds(values.shape[1])).diff()
    real = torch.arange(int(lengths.max())) < lengths[:, None]  # chunks padded to one length
    held = values.new_zeros(schedule.ranks, *real.shape)
    held[:, real] = values
    for step in _steps(schedule):
        src, dst, chunk, reduce = torch.tensor(step).unbind(1)
        sent = held[src, chunk]  # a copy: within a step everybody sends what it held when the step began
        for turn in _turns(step):
            adds, copies = turn[reduce[turn] == 1], turn[reduce[turn] == 0]
            held[dst[adds], chunk[adds]] += sent[adds]
            held[dst[copies], chunk[copies]] = sent[copies]
    return held[:, real]


def rounding_error(
    ranks: Sequence[int] = (2, 4, 8, 16, 32, 64),
    dtypes: Sequence[str] = ("fp16", "bf16", "fp32"),
    schedules: Sequence[str] = ("ring", "tree"),
    elements: int = 4096,
    signal: float = 0.0,
    seed: int = 0,
) -> pd.DataFrame:
    """The rounding error of a sum over N ranks, simulated in the schedule's own order, with its closed forms beside it.

    Every rank's element is `signal`, the same on all, plus noise of its own, standard normal: gradients of noisy
    batches have signal 0, of huge batches a large one. They are rounded to the dtype *first*; what is measured is what
    the additions lose, against the float64 sum of the same numbers. The same noise serves every dtype and schedule.

    ranks: numbers of ranks.  dtypes: of "fp16", "bf16", "fp32".  schedules: of "ring", "star", "chain", "direct",
    "tree", "halving_doubling" (powers of two only).  elements: numbers per rank; at least 1.

    Returns a DataFrame with a row per schedule, dtype and number of ranks:
        schedule, dtype, ranks
        additions   d, the most additions that one contribution goes through: N - 1 for a ring, ceil(log2 N) for a tree
        error       ||computed - exact|| / ||exact||, Euclidean norms over all elements
        expected    u sqrt(0.18 sum of n_i / N), over the additions of n_i ranks' worth each: roundings that are
                    independent and as large as they are on average, of a sum of noise. A model, low by up to a
                    tenth, not a bound: about 0.3 u sqrt(N) for a ring, 0.42 u sqrt(log2 N) for a tree. NaN with a
                    signal.
        worst       the largest |computed - exact| / sum of |x_i| of any element
        bound       what `worst` cannot pass: d u / (1 - d u) (Higham, SIAM J. Sci. Comput. 14 (1993) 783-799); inf
                    where d u is 1 or more, for bf16 from 256 additions on
        overflows   elements whose sum the dtype could not hold; `error` and `worst` leave them out

    Raises ValueError for a dtype, schedule or size that is not there, ScheduleError for one that does not fit N.
    """
    import pandas as pd

    ranks = several(ranks, "ranks are a list of numbers of ranks, such as [2, 4, 8]")
    ranks = [count(n, "each of the ranks", error=ValueError) for n in ranks]
    dtypes, schedules = _names(dtypes, DTYPES, "dtypes"), _names(schedules, SCHEDULES, "schedules")
    elements = count(elements, "elements", error=ValueError)
    seed = count(seed, "seed", least=0, error=ValueError)
    signal = number(signal, "signal", least=-math.inf)
    rows = []
    for name in schedules:
        for n in ranks:
            schedule = SCHEDULES[name](n)
            adds = additions(schedule)
            noise = torch.randn(n, elements, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for dtype in dtypes:
                x = (signal + noise).to(DTYPES[dtype])
                rows.append({"schedule": name, "dtype": dtype, "ranks": n, "additions": adds.depth})
                rows[-1].update(_compare(schedule, x), **_closed_forms(adds, n, unit_roundoff(x.dtype), signal))
    columns = ["schedule", "dtype", "ranks", "additions", "error", "expected", "worst", "bound", "overflows"]
    return pd.DataFrame(rows, columns=columns)


def _names(names: Sequence[str], known: Iterable[str], what: str) -> list[str]:
    listed = several(names, f"{what} is a list of {', '.join(known)}")
    for name in listed:
        choice(name, f"each of {what}", known)
    return listed


def _compare(schedule: Schedule, x: torch.Tensor) -> dict[str, float]:
    computed, exact, size = rounded_sum(schedule, x)[0].double(), x.double().sum(0), x.double().abs().sum(0)
    fits = computed.isfinite()
    lost, exact, size = (computed - exact)[fits], exact[fits], size[fits]
    return {
        "error": float(lost.norm() / exact.norm()),
        "worst": float((lost.abs() / size).max()) if len(size) else math.nan,
        "overflows": int((~fits).sum()),
    }


def _closed_forms(adds: Additions, n: int, u: float, signal: float) -> dict[str, float]:
    steps = adds.depth * u
    return {
        "expected": u * math.sqrt(_MEAN_SQUARE * sum(adds.ranks) / n) if signal == 0 else math.nan,
        "bound": steps / (1 - steps) if steps < 1 else math.inf,
    }


def _steps(schedule: Schedule) -> list[list[tuple[int, int, int, int]]]:
    """The rows (src, dst, chunk, reduce) of each step."""
    steps: list[list[tuple[int, int, int, int]]] = [[] for _ in range(schedule.steps)]
    columns = (schedule.step, schedule.src, schedule.dst, schedule.chunk, schedule.reduce)
    for step, src, dst, chunk, reduce in zip(*(column.tolist() for column in columns), strict=True):
        steps[step].append((src, dst, chunk, int(reduce)))
    return steps


def _turns(step: list[tuple[int, int, int, int]]) -> list[torch.Tensor]:
    """The numbers of a step's rows, in groups that write each chunk of a rank once; the groups take turns."""
    turns: list[list[int]] = []
    seen: Counter = Counter()
    for row, (_, dst, chunk, _) in enumerate(step):
        if (turn := seen[dst, chunk]) == len(turns):
            turns.append([])
        turns[turn].append(row)
        seen[dst, chunk] += 1
    return [torch.tensor(rows) for rows in turns]

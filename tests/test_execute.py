"""all_reduce against torch's own all_reduce, exact integer sums and closed forms, on real ranks.

Starting ranks costs more than the checks, so each launch does many and returns what went wrong, as text.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from ddplab import _p2p, execute
from ddplab._plan import Receive, Send, chunk_bounds, rank_plan
from ddplab.execute import all_reduce
from ddplab.launch import launch
from ddplab.schedule import Schedule, chain, direct, halving_doubling, hierarchical, ring, star, tree

OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
GLOO_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64)


def exchange(n: int) -> Schedule:
    """Recursive doubling: partners swap the same chunk in the same step, so what they send must be a snapshot."""
    rows = [(s, r, r ^ (1 << s), 0, True) for s in range(n.bit_length() - 1) for r in range(n)]
    return Schedule.from_rows("exchange", n, 1, rows)


def schedules(n: int) -> list[Schedule]:
    made = [ring(n, first, direction) for first, direction in ((-1, 1), (0, 1), (1, 1), (1, -1))]
    made += [star(n), chain(n), chain(n, 3), direct(n), tree(n)]
    if n & (n - 1) == 0:
        made += [halving_doubling(n), exchange(n)]
    if n % 2 == 0:
        made += [hierarchical(n // 2, 2), hierarchical(2, n // 2)]
    return made


def small_integers(shape, dtype, rank: int, case: int) -> torch.Tensor:
    """Different on each rank, and small enough that any order of summing gives the same value in any dtype."""
    generator = torch.Generator().manual_seed(1000 * case + rank)
    values = torch.randint(0, 3, shape, generator=generator)
    return (values + 1j * (values + 1) if dtype.is_complex else values).to(dtype)


def reference(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The result by torch's arithmetic alone, rank after rank, without any communication."""
    combine = {"max": torch.maximum, "min": torch.minimum, "product": torch.mul}.get(op, torch.add)
    result = inputs[0].clone()
    for other in inputs[1:]:
        result = combine(result, other)
    return result / len(inputs) if op == "mean" else result


def sweep(cases: int, batched: bool) -> list[str]:
    """Random (schedule, dtype, op, shape, segment size); the same cases on every rank. Returns what went wrong."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if batched:
        execute._transport = lambda device, group: _p2p.run_batched
    choose, wrong = random.Random(n), []
    for case in range(cases):
        schedule = choose.choice(schedules(n))
        op = choose.choice(list(OPS))
        dtype = choose.choice([d for d in execute._DTYPES[op] if d != torch.complex32])
        shape = choose.choice([(), (0,), (1,), (2,), (5,), (7, 3), (2, 0, 3), (1000,), (4, 1, 33)])
        execute.SEGMENT_BYTES = choose.choice([64, 1000, 4 << 20])
        factor = n if op == "mean" else 1  # a mean of multiples of n is an integer, exact in any dtype
        inputs = [(small_integers(shape, dtype, r, case) * factor).to(dtype) for r in range(n)]
        ours, theirs, expected = inputs[rank].clone(), inputs[rank].clone(), reference(inputs, op)
        returned = all_reduce(ours, schedule, op, check=bool(case % 2))
        label = f"{schedule.name} {op} {dtype} {shape} segment {execute.SEGMENT_BYTES}"
        if returned is not ours or ours.shape != shape or ours.dtype != dtype:
            wrong.append(f"{label}: not in place")
        if not torch.equal(ours, expected):
            wrong.append(f"{label}: {ours.flatten()[:5]}, not {expected.flatten()[:5]}")
        if dtype in GLOO_DTYPES:
            dist.all_reduce(theirs, OPS[op])
            if not torch.equal(ours, theirs):
                wrong.append(f"{label}: {ours.flatten()[:5]}, but the backend says {theirs.flatten()[:5]}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_random_cases(ranks):
    assert launch(sweep, 60, False, ranks=ranks) == [[]] * ranks


def test_random_cases_on_the_path_that_nccl_takes():
    assert launch(sweep, 60, True, ranks=4) == [[]] * 4


def test_sixteen_ranks():
    assert launch(sweep, 16, False, ranks=16) == [[]] * 16

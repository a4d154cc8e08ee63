"""all_reduce against torch's own all_reduce, exact integer sums and closed forms, on real ranks.

Starting ranks costs more than the checks, so each launch does many and returns what went wrong, as text.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from ddplab import _p2p, execute
from ddplab._plan import rank_plan
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
        execute.transport = lambda device, group: _p2p.run_batched
    choose, wrong = random.Random(n), []
    for case in range(cases):
        schedule = choose.choice(schedules(n))
        op = choose.choice(list(OPS))
        dtype = choose.choice([d for d in execute._DTYPES[op] if d != torch.complex32])
        shape = choose.choice([(), (0,), (1,), (2,), (5,), (7, 3), (2, 0, 3), (1000,), (4, 1, 33)])
        _p2p.SEGMENT_BYTES = choose.choice([(16, 64), (64, 1000), (1 << 20, 8 << 20)])
        factor = n if op == "mean" else 1  # a mean of multiples of n is an integer, exact in any dtype
        inputs = [(small_integers(shape, dtype, r, case) * factor).to(dtype) for r in range(n)]
        ours, theirs, expected = inputs[rank].clone(), inputs[rank].clone(), reference(inputs, op)
        returned = all_reduce(ours, schedule, op, check=bool(case % 2))
        label = f"{schedule.name} {op} {dtype} {shape} segment {_p2p.SEGMENT_BYTES}"
        if returned is not ours or ours.shape != shape or ours.dtype != dtype:
            wrong.append(f"{label}: not in place")
        if not torch.equal(ours, expected):
            wrong.append(f"{label}: {ours.flatten()[:5]}, not {expected.flatten()[:5]}")
        if dtype in GLOO_DTYPES:
            dist.all_reduce(theirs, OPS[op])
            if not torch.equal(ours, theirs):
                wrong.append(f"{label}: {ours.flatten()[:5]}, but the backend says {theirs.flatten()[:5]}")
    return wrong


@pytest.mark.parametrize(("ranks", "cases"), [(1, 20), (2, 40), (3, 40), (4, 30), (8, 12), (16, 6)])
def test_random_cases(ranks, cases):
    assert launch(sweep, cases, False, ranks=ranks) == [[]] * ranks


def test_random_cases_on_the_path_that_nccl_takes():
    assert launch(sweep, 30, True, ranks=4) == [[]] * 4


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_messages_between_two_ranks_match_by_order_and_fill_each_chunk_once(n):
    for schedule in schedules(n):
        for numel, segment in ((0, 4), (1, 4), (5, 1), (1000, 7), (1001, 10**6)):
            plans = [rank_plan(schedule, r, numel, segment) for r in range(n)]
            out, into = {}, {}
            for rank, plan in enumerate(plans):
                for step in plan:
                    for k, round_ in enumerate(step.rounds):
                        for s in round_.sends:
                            out.setdefault((rank, s.peer), []).append((step.number, k, s.lo, s.hi))
                        for r in round_.receives:
                            into.setdefault((r.peer, rank), []).append((step.number, k, r.lo, r.hi))
                            assert not r.reduce or r.hi - r.lo <= segment
            assert out == into, (schedule, numel, segment)
            bounds = schedule.bounds(numel)
            carried = sum(hi - lo for messages in out.values() for *_, lo, hi in messages)
            assert carried == sum(bounds[c + 1] - bounds[c] for c in schedule.chunk)


def test_a_copy_is_not_received_while_its_elements_are_still_leaving():
    # Rank 1 sends chunk 0 in step 1; rank 0 could send its copy before that is over.
    rows = [(0, 1, 0, 0, True), (0, 2, 0, 0, True), (1, 1, 2, 0, True), (2, 0, 1, 0, False), (2, 0, 2, 0, False)]
    plan = rank_plan(Schedule.from_rows("eager", 3, 1, rows), 1, 10, 10)
    (receive,) = plan[-1].rounds[0].receives
    assert receive.earliest == 2
    # In a ring, a chunk is received into once its own partial sum has left: from the next step on.
    for step in rank_plan(ring(4), 2, 100, 100):
        for receive in (r for round_ in step.rounds for r in round_.receives):
            assert receive.earliest <= step.number


def test_what_is_swapped_within_a_step_is_copied_aside():
    sends = [s for step in rank_plan(exchange(4), 0, 10, 3) for round_ in step.rounds for s in round_.sends]
    assert sends and all(s.snapshot for s in sends)
    sends = [s for step in rank_plan(ring(4), 0, 10, 3) for round_ in step.rounds for s in round_.sends]
    assert sends and not any(s.snapshot for s in sends)


def awkward_tensors() -> dict:
    rank, got = dist.get_rank(), {}
    base = torch.tensor([[0.0, 1.0], [2.0, 3.0]]) + 10 * rank
    all_reduce(base[:, 0])
    got["column"] = base.flatten().tolist()
    t = torch.arange(6.0).view(2, 3).t()
    all_reduce(t, op="mean")
    got["transposed"] = t.tolist()
    z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64) * (rank + 1)
    conj = z.conj()  # a lazy view: its memory holds z
    all_reduce(conj)
    got["conj"] = conj.tolist(), z.tolist()
    got["complex"] = all_reduce(torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)).tolist()
    got["bf16"] = all_reduce(torch.tensor([rank + 1, 256 + rank], dtype=torch.bfloat16)).tolist()
    got["uint8"] = all_reduce(torch.tensor([1 + rank, 200], dtype=torch.uint8)).tolist()
    got["int32"] = all_reduce(torch.tensor([1 + rank, 200], dtype=torch.int32)).tolist()
    flags = torch.tensor([False, True, rank == 1])
    got["bool"] = [all_reduce(flags.clone(), op=op).tolist() for op in ("sum", "max", "product", "min")]
    got["fp16 mean"] = all_reduce(torch.tensor([60000.0], dtype=torch.float16), op="mean").tolist()
    half = torch.tensor([1 + 1j], dtype=torch.complex32)
    got["complex32"] = all_reduce(half).to(torch.complex64).tolist()
    leaf = torch.full((3,), 1.0 + rank, requires_grad=True)
    all_reduce(leaf, op=dist.ReduceOp.PRODUCT)
    got["leaf"] = leaf.tolist(), leaf.requires_grad, leaf.is_leaf, leaf.grad_fn
    parameter = torch.nn.Linear(2, 1).weight
    got["parameter"] = all_reduce(parameter) is parameter
    return got


def test_awkward_tensors():
    first, second = launch(awkward_tensors, ranks=2)
    assert first["column"] == [10, 1, 14, 3] and second["column"] == [10, 11, 14, 13]  # neighbours stay
    for got in (first, second):
        assert got["transposed"] == [[0, 3], [1, 4], [2, 5]]
        assert got["conj"] == ([3 - 6j, 9 + 3j], [3 + 6j, 9 - 3j])
        assert got["complex"] == [3 + 6j, 9 - 3j]
        assert got["bf16"] == [3, 512]  # 256 + 257 needs nine bits of mantissa
        assert got["uint8"] == [3, 144] and got["int32"] == [3, 400]
        assert got["bool"] == [[False, True, True]] * 2 + [[False, True, False]] * 2
        assert got["fp16 mean"] == [60000]  # the sum alone would be inf
        assert got["complex32"] == [2 + 2j]
        assert got["leaf"] == ([2, 2, 2], True, True, None)
        assert got["parameter"]


def refusals() -> dict:
    rank = dist.get_rank()
    ours = torch.ones(2)

    def refused(*args, **kwargs) -> str:
        try:
            all_reduce(*args, **kwargs)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    got = {}
    if rank == 0:  # alone: these come before any communication
        got |= {
            "mean of int32": refused(torch.ones(2, dtype=torch.int32), op="mean"),
            "mean of bool": refused(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG),
            "fp8": refused(torch.ones(2).to(torch.float8_e4m3fn)),
            "max of complex": refused(torch.ones(2, dtype=torch.complex64), op="max"),
            "uint16": refused(torch.ones(2, dtype=torch.uint16)),
            "op": refused(ours, op="median"),
            "bitwise": refused(ours, op=dist.ReduceOp.BAND),
            "list": refused([1.0, 2.0]),
            "sparse": refused(torch.eye(2).to_sparse()),
            "meta": refused(torch.ones(2, device="meta")),
            "expanded": refused(torch.ones(1).expand(4)),
            "schedule's ranks": refused(ours, ring(3)),
            "schedule's type": refused(ours, "ring"),
        }
    got["shape"] = refused(torch.ones(2 + rank))
    got["dtype"] = refused(torch.ones(2, dtype=torch.int32 if rank else torch.float32))
    got["op differs"] = refused(torch.ones(2), op="max" if rank else "sum")
    got["schedule differs"] = refused(torch.ones(2), ring(2, direction=-1 if rank else 1) if rank else star(2))
    got["shape, one empty"] = refused(torch.ones(rank, 3))
    got["afterwards"] = all_reduce(ours.clone()).tolist()
    return got


def test_refusals():
    first, second = launch(refusals, ranks=2, timeout=30)
    for name, parts in {
        "mean of int32": ("TypeError", '"mean"', "int32", "float32"),
        "mean of bool": ("TypeError", '"mean"', "bool"),
        "fp8": ("TypeError", "float8_e4m3fn", "float16, bfloat16, float32"),
        "max of complex": ("TypeError", '"max"', "complex64"),
        "uint16": ("TypeError", "uint16", "uint8, int8"),
        "op": ("ValueError", "median", "sum, mean, max, min, product"),
        "bitwise": ("ValueError", "sum, mean, max, min, product"),
        "list": ("TypeError", "list"),
        "sparse": ("TypeError", "sparse_coo"),
        "meta": ("TypeError", "meta"),
        "expanded": ("ValueError", "share memory"),
        "schedule's ranks": ("ValueError", "ring is for 3 ranks", "has 2"),
        "schedule's type": ("TypeError", "Schedule", "str"),
    }.items():
        assert all(part in first[name] for part in parts), first[name]
    for got in (first, second):
        assert "ValueError" in got["shape"] and "rank 0: (2,) float32; rank 1: (3,) float32" in got["shape"]
        assert "rank 0: (2,) float32; rank 1: (2,) int32" in got["dtype"]
        assert "rank 0: (2,) float32, op sum; rank 1: (2,) float32, op max" in got["op differs"]
        assert "rank 0: (2,) float32, schedule star" in got["schedule differs"]
        assert "rank 1: (2,) float32, schedule ring" in got["schedule differs"]
        assert "rank 0: (0, 3) float32; rank 1: (1, 3) float32" in got["shape, one empty"]
        assert got["afterwards"] == [2, 2]


def odd_sizes_and_groups() -> dict:
    rank, got = dist.get_rank(), {}
    for size in (5, 2, 1, 0):
        got[size] = all_reduce(rank + torch.arange(float(size))).tolist()
    got["scalar"] = all_reduce(torch.tensor(rank))
    got["empty"] = tuple(all_reduce(torch.ones(2, 0, 3)).shape)
    odd, pair = dist.new_group([1, 3]), dist.new_group([2, 0])
    group = odd if rank % 2 else pair
    got["group"] = all_reduce(torch.tensor([10.0**rank, 1.0]), star(2), group=group).tolist()
    try:
        all_reduce(torch.ones(rank), group=group)
    except ValueError as error:
        got["in group"] = str(error)
    try:
        all_reduce(torch.ones(2), group=pair if rank % 2 else odd)
    except ValueError as error:
        got["outside"] = str(error)
    for size in (1, 10, 1000, 10**6):
        for direction in (1, -1):
            x = torch.full((size,), float(rank))
            all_reduce(x, ring(4, direction=direction), check=False)
            got[f"{size} {direction}"] = x.unique().tolist()
    torch.manual_seed(rank)
    x = torch.randn(1000)
    gathered = [torch.empty_like(x) for _ in range(4)]
    dist.all_gather(gathered, x)
    exact, bound = sum(g.double() for g in gathered), 4 * 2**-24 * sum(g.double().abs() for g in gathered)
    got["noise"] = bool(((all_reduce(x).double() - exact).abs() <= bound).all())
    dist.all_gather(gathered, x)
    got["same bytes"] = all(torch.equal(g, x) for g in gathered)
    got["cancels"] = all_reduce(torch.full((4,), [1.0, 1e20, -1e20, 0.0][rank]), ring(4)).tolist()
    return got


def test_odd_sizes_sub_groups_and_noise():
    for rank, got in enumerate(launch(odd_sizes_and_groups, ranks=4, timeout=30)):
        assert got[5] == [6, 10, 14, 18, 22] and got[2] == [6, 10] and got[1] == [6] and got[0] == []
        assert got["scalar"].shape == () and got["scalar"] == 6 and got["empty"] == (2, 0, 3)
        assert got["group"] == ([1010, 2] if rank % 2 else [101, 2])
        who = "rank 1: (1,) float32; rank 3: (3,) float32" if rank % 2 else "rank 0: (0,) float32; rank 2: (2,) float32"
        assert who in got["in group"]
        assert f"Rank {rank} is not in this group" in got["outside"]
        assert all(got[f"{size} {direction}"] == [6] for size in (1, 10, 1000, 10**6) for direction in (1, -1))
        assert got["noise"] and got["same bytes"]
        # Chunk c is added up on ranks c + 1, c + 2, c + 3, c: only for chunk 0 has 1e20 gone again when the 1 comes.
        assert got["cancels"] == [1.0, 0.0, 0.0, 0.0]


def test_outside_of_ranks_it_says_where_it_belongs():
    with pytest.raises(RuntimeError, match="inside ranks"):
        all_reduce(torch.ones(2))

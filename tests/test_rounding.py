"""rounding: the simulated sums are those of the ranks, bit for bit, and stay within the closed forms."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ddplab as dl
from ddplab.rounding import SCHEDULES, additions, rounded_sum, rounding_error, unit_roundoff

HALVES = [torch.float16, torch.bfloat16]


def values(ranks, n, dtype, seed=0):
    """Rank r's numbers are r times as large as rank 1's: the order of the additions shows."""
    noise = torch.randn(ranks, n, generator=torch.Generator().manual_seed(seed))
    return (noise * torch.arange(1, ranks + 1)[:, None]).to(dtype)


def test_the_simulation_is_what_the_ranks_compute_bit_for_bit():
    schedules = [dl.ring(4), dl.ring(4, +1, -1), dl.tree(4), dl.direct(4), dl.star(4), dl.chain(4, 3)]
    schedules += [dl.halving_doubling(4), dl.hierarchical(2, 2)]

    def sums():
        rank = torch.distributed.get_rank()
        return [dl.all_reduce(values(4, 1003, d)[rank].clone(), s) for s in schedules for d in HALVES]

    ranks = dl.launch(sums, ranks=4, show=False)
    simulated = [rounded_sum(s, values(4, 1003, d)) for s in schedules for d in HALVES]
    for rank, seen in enumerate(ranks):
        for ours, theirs in zip(simulated, seen, strict=True):
            assert torch.equal(ours[rank], theirs)
    assert len({tuple(s[0].tolist()) for s in simulated}) > len(schedules)  # orders differ, so do the sums


def test_orders_of_addition_written_out():
    a, b, c, d = values(4, 50, torch.bfloat16)
    x = torch.stack([a, b, c, d])
    assert torch.equal(rounded_sum(dl.star(4), x)[0], ((a + b) + c) + d)
    assert torch.equal(rounded_sum(dl.tree(4), x)[2], (a + b) + (c + d))
    assert torch.equal(rounded_sum(dl.chain(4, 2), x)[1], ((d + c) + b) + a)
    first = slice(0, 12)  # NCCL's ring: chunk 0 starts at rank 1
    assert torch.equal(rounded_sum(dl.ring(4), x)[0, first], (((b + c) + d) + a)[first])


def test_padding_and_empty_tensors():
    for n in (0, 1, 2, 5):
        assert torch.equal(rounded_sum(dl.ring(3), torch.ones(3, n)), torch.full((3, n), 3.0))
    assert torch.equal(rounded_sum(dl.ring(1), torch.ones(1, 4)), torch.ones(1, 4))


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 16, 33])
def test_additions_have_their_closed_forms(n):
    for name in ("ring", "star", "chain", "direct"):
        assert additions(SCHEDULES[name](n)) == (n - 1, list(range(2, n + 1)))
    depth, sizes = additions(dl.tree(n))
    assert depth == math.ceil(math.log2(n)) and len(sizes) == n - 1
    if n & (n - 1) == 0:
        assert additions(dl.halving_doubling(n)).depth == math.log2(n)
        assert sorted(sizes) == sorted(2**k for k in range(1, depth + 1) for _ in range(n >> k))
    assert additions(dl.hierarchical(n, 4)).depth == 3 + n - 1


def test_unit_roundoffs_are_those_of_the_formats():
    for dtype, u in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24)):
        assert unit_roundoff(dtype) == u
        one = torch.ones((), dtype=dtype)
        assert one + one * u == 1  # a tie, to even
        assert one + one * (u * (1 + u)).__float__() * 2 > 1


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from([2, 4, 8]),
    st.lists(st.floats(-1000, 1000, width=16), min_size=8, max_size=8),
    st.sampled_from(HALVES),
)
def test_no_input_passes_the_bound(name, ranks, numbers, dtype):
    schedule = SCHEDULES[name](ranks)
    x = torch.tensor(numbers[:ranks]).to(dtype)[:, None].repeat(1, ranks)
    exact = [Fraction(v) for v in x[:, 0].tolist()]
    bound = Fraction(additions(schedule).depth) * Fraction(unit_roundoff(dtype))
    bound /= 1 - bound
    for computed in rounded_sum(schedule, x)[0].tolist():
        # Additions are exact below the smallest normal number, so the bound has no term for underflow.
        assert abs(Fraction(computed) - sum(exact)) <= bound * sum(map(abs, exact))


def test_the_table():
    frame = rounding_error(ranks=(4, 16, 64), schedules=("ring", "tree"), elements=4096)
    assert len(frame) == 2 * 3 * 3 and frame.columns[0] == "schedule"
    assert (frame.worst <= frame.bound).all() and (frame.overflows == 0).all()
    assert (frame.error / frame.expected - 1).abs().max() < 0.15  # the model promises a tenth, 4096 samples add noise
    error = frame.set_index(["schedule", "dtype", "ranks"]).error
    for dtype in ("fp16", "bf16", "fp32"):
        assert error["tree", dtype, 64] < 0.6 * error["ring", dtype, 64]
        assert error["ring", dtype, 64] > 3 * error["ring", dtype, 4]  # sqrt(16) in the limit
    assert error["ring", "bf16", 16] / error["ring", "fp16", 16] == pytest.approx(8, rel=0.15)  # 2^-8 / 2^-11


def test_bf16_stagnates_and_fp16_overflows():
    """256 ones are as far as bf16 can count by ones: 256 + 1 rounds back to 256. fp16 ends at 65504."""
    ones = torch.ones(300, 1, dtype=torch.bfloat16)
    assert rounded_sum(dl.star(300), ones)[0].item() == 256
    big = rounding_error(ranks=(4,), dtypes=("fp16", "bf16"), schedules=("ring",), elements=64, signal=2e4)
    assert big.overflows.tolist() == [64, 0]
    assert math.isnan(big.worst[0]) and big.worst[1] <= big.bound[1] and big.expected.isna().all()
    wide = rounding_error(ranks=(300,), dtypes=("bf16",), schedules=("star",), elements=8)
    assert wide.bound[0] == math.inf


def test_one_rank_loses_nothing():
    row = rounding_error(ranks=(1,), schedules=("ring", "tree"), elements=16)
    assert (row[["error", "expected", "worst", "bound", "additions"]] == 0).all().all()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtypes": ("fp8",)}, """each of dtypes is "fp16", "bf16" or "fp32", not 'fp8'"""),
        ({"schedules": ("torus",)}, 'each of schedules is "ring", "star"'),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ({"elements": 0}, "elements must be a whole number of at least 1, not 0"),
        ({"signal": math.nan}, "signal is a number"),
        ({"ranks": (6,), "schedules": ("halving_doubling",)}, "needs a power of two ranks"),
        ({"ranks": (0,)}, "each of the ranks must be a whole number of at least 1, not 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rounding_error(**options)


def test_values_of_another_shape_are_refused():
    with pytest.raises(dl.ScheduleError, match=r"must have shape \(3, n\), not \(2, 5\)"):
        rounded_sum(dl.ring(3), torch.zeros(2, 5))

"""Ranks that share processors: against sums, pipelines worked out by hand, and lanes with processors of their own."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from ddplab.lanes import Parcel, run_lanes
from ddplab.processors import Job, run_ranks, slice_s


def gradients(*ready: float, nbytes: int = 1) -> list:
    return [(SimpleNamespace(nbytes=nbytes), at) for at in ready]


def each(grads: list, encode: float, work: tuple[float, ...], transfer: tuple[float, ...]) -> list[Job]:
    """A bucket for each gradient."""
    return [Job([g], g.nbytes, encode, work, transfer) for g, _ in grads]


def test_one_bucket_is_the_sum_of_its_stages() -> None:
    grads = gradients(3.0, nbytes=16)
    for ranks in (1, 2, 5):
        lane, done = run_ranks(grads, 4.0, each(grads, 0.5, (1.0, 2.0, 4.0), (8.0, 16.0)), 1 / 64, ranks=ranks)
        assert lane.ready == [3.25] and lane.start == [3.75]
        assert lane.end[0] == pytest.approx(3.75 + 1 + 8 + 2 + 16 + 4)  # slices of 0.1 s are no binary numbers
        assert lane.compute_end == 4.75  # copy and encoding are the compute thread's
        assert done == lane.end[0] + 0.25  # and the copy back


def test_two_buckets_by_hand() -> None:
    """Ready at 1 and 3.5 (encoding 0.5 before it); each is 1 + 2 + 1 + 2 + 1 in the lane, the second waits for it."""
    grads = gradients(1.0, 3.0)
    lane, done = run_ranks(grads, 5.0, each(grads, 0.5, (1.0, 1.0, 1.0), (2.0, 2.0)), slice_s=8.0)
    assert (lane.ready, lane.start, lane.end) == ([1.0, 3.5], [1.5, 8.5], [8.5, 15.5])
    assert (lane.compute_end, done) == (6.0, 15.5)
    lane, _ = run_ranks(grads, 20.0, each(grads, 0.0, (0.25, 0.5), (0.25,)), slice_s=8.0)  # the lane is idle in between
    assert (lane.start, lane.end) == ([1.0, 3.0], [2.0, 4.0])


def test_with_processors_enough_it_is_the_lanes_of_one_transfer() -> None:
    draw = random.Random(3)
    for _ in range(150):
        grads, now = [], 0.0
        for _ in range(draw.randint(1, 12)):
            now += draw.choice([0.0, draw.random()])
            grads.append((SimpleNamespace(nbytes=draw.randint(1, 99)), now))
        cuts = sorted(draw.sample(range(1, len(grads)), draw.randint(0, len(grads) - 1)))
        parcels, jobs = [], []
        for a, b in zip([0, *cuts], [*cuts, len(grads)], strict=True):
            members = [g for g, _ in grads[a:b]]
            nbytes, (encode, transfer, decode) = sum(g.nbytes for g in members), (draw.random() for _ in range(3))
            parcels.append(Parcel(members, nbytes, encode, transfer, decode))
            jobs.append(Job(members, nbytes, encode, (0.0, decode), (transfer,)))
        copy, backward = draw.choice([0.0, 1e-3]), now + draw.random()
        old = run_lanes(grads, backward, parcels, copy)
        new, done = run_ranks(grads, backward, jobs, copy, ranks=draw.randint(1, 4), slice_s=draw.choice([0.01, 1]))
        for field in ("ready", "start", "end", "compute_end"):
            assert getattr(new, field) == pytest.approx(getattr(old, field)), field
        after = old.compute_end
        for parcel, end in zip(parcels, old.end, strict=True):
            after = max(after, end) + copy * parcel.nbytes
        assert done == pytest.approx(after)


@pytest.mark.parametrize(("processors", "rounds"), [(1, 4), (2, 2), (3, 2), (4, 1), (8, 1)])
def test_ranks_take_turns(processors: int, rounds: int) -> None:
    """Four lanes with 1 s of work before a transfer that waits for the last of them, and 1 s after it."""
    grads = gradients(0.0)
    lane, _ = run_ranks(grads, 0.0, each(grads, 0.0, (1.0, 1.0), (5.0,)), processors=processors, slice_s=10)
    assert lane.end == [pytest.approx(2 * rounds + 5)]


def test_who_wakes_up_waits_for_his_turn() -> None:
    """One processor. The lane works from 1 s on, for 10 s; the second gradient is due at 2 s, but the slice lasts 4 s:
    the compute thread comes at 5 s, encodes for 1 s, and the lane goes on with what is left."""
    grads = gradients(1.0, 2.0)
    jobs = [Job([grads[0][0]], 1, 0.0, (10.0,), ()), Job([grads[1][0]], 1, 1.0, (0.0,), ())]
    lane, done = run_ranks(grads, 2.0, jobs, ranks=1, processors=1, slice_s=4.0)
    assert lane.ready == [1.0, 2.0]  # without a copy it needs no processor to be ready
    assert (lane.compute_end, lane.end[0], done) == (6.0, 12.0, 12.0)
    lane, _ = run_ranks(grads, 2.0, jobs, ranks=1, processors=1, slice_s=100.0)
    assert (lane.compute_end, lane.end) == (12.0, [11.0, 12.0])
    lane, _ = run_ranks(grads, 2.0, jobs, ranks=1, processors=2, slice_s=4.0)
    assert (lane.compute_end, lane.end) == (3.0, [11.0, 11.0])


def test_no_step_beats_its_processors_or_its_longest_chain() -> None:
    draw = random.Random(5)
    for _ in range(200):
        ranks, processors, slice_ = draw.randint(1, 6), draw.randint(1, 6), 10 ** draw.uniform(-2, 1)
        grads = gradients(*sorted(draw.random() for _ in range(draw.randint(1, 6))), nbytes=5)
        jobs = each(grads, draw.random(), tuple(draw.random() for _ in range(3)), (draw.random(), draw.random()))
        lane, done = run_ranks(grads, 1.0, jobs, 0.01, ranks=ranks, processors=processors, slice_s=slice_)
        free, best = run_ranks(grads, 1.0, jobs, 0.01, ranks=ranks)
        work = ranks * sum(job.encode_s + sum(job.work_s) + 2 * 0.01 * job.nbytes for job in jobs)
        assert done >= max(best, work / processors) - 1e-9
        assert all(a <= b + 1e-9 for a, b in zip(free.end, lane.end, strict=True))


def test_the_kernels_slice() -> None:
    assert 0 < slice_s(realtime=False) < slice_s(realtime=True) <= 1

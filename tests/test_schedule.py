"""Schedules: what they do to real numbers, who owns what, and what `verify` says of broken ones."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from ddplab.schedule import (
    Schedule,
    ScheduleError,
    Transfer,
    chain,
    direct,
    halving_doubling,
    hierarchical,
    label,
    ring,
    star,
    tree,
)

ANY_N = (1, 2, 3, 4, 5, 7, 8, 13)
RINGS = [(-1, 1), (0, 1), (1, 1), (1, -1), (0, -1), (5, 1)]  # NCCL, textbook, article, gloo, two more
SCHEDULES = [
    *(builder(n) for builder in (star, chain, direct, tree) for n in ANY_N),
    *(ring(n, first, way) for n in ANY_N for first, way in RINGS),
    *(chain(n, chunks=k) for n in (2, 5) for k in (1, 3)),
    *(halving_doubling(n) for n in (1, 2, 4, 8, 16)),
    *(hierarchical(k, g) for k in (1, 2, 3, 4) for g in (1, 2, 3)),
]


def simulate(schedule: Schedule, buffers: list[np.ndarray]) -> list[np.ndarray]:
    """Run a schedule on one array a rank, row by row: an executor that shares no code with the package."""
    buffers = [b.copy() for b in buffers]
    numel, chunks = len(buffers[0]), schedule.chunks
    for _, rows in itertools.groupby(schedule.transfers, key=lambda t: t.step):
        before = [b.copy() for b in buffers]
        for _, src, dst, chunk, reduce in rows:
            part = slice(numel * chunk // chunks, numel * (chunk + 1) // chunks)
            buffers[dst][part] = before[src][part] + (buffers[dst][part] if reduce else 0)
    return buffers


def broken(schedule: Schedule, change) -> Schedule:
    """A copy of a schedule whose list of rows went through `change`."""
    return Schedule.from_rows(schedule.name, schedule.ranks, schedule.chunks, change(list(schedule.transfers)))


# ---- what schedules do


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 5, 103])
def test_every_builder_sums_exactly(schedule, numel):
    rng = np.random.default_rng(schedule.ranks)
    buffers = [rng.integers(-(2**40), 2**40, numel) for _ in range(schedule.ranks)]
    for result in simulate(schedule, buffers):
        np.testing.assert_array_equal(result, np.sum(buffers, axis=0))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_verify_agrees_and_counts_steps(schedule):
    assert len(schedule.verify()) == schedule.ranks
    assert schedule.reduce_steps <= schedule.steps == len(set(schedule.step.tolist()))
    assert schedule.reduce[schedule.step >= schedule.reduce_steps].sum() == 0
    # a rank reduces n - 1 foreign contributions into each chunk of which it owns the sum, wherever that is
    assert schedule.reduce.sum() == (schedule.ranks - 1) * schedule.chunks


@pytest.mark.parametrize("n", ANY_N)
def test_steps_in_closed_form(n):
    log = math.ceil(math.log2(n))
    assert (ring(n).steps, ring(n).reduce_steps) == (2 * (n - 1), n - 1)
    assert (tree(n).steps, tree(n).reduce_steps) == (2 * log, log)
    for schedule in (star(n), direct(n)):
        assert (schedule.steps, schedule.reduce_steps) == ((2, 1) if n > 1 else (0, 0))
    assert chain(n, chunks=6).steps == (2 * (6 + n - 2) if n > 1 else 0)
    assert chain(n).chunks == max(1, 12 * (n - 2))


def test_steps_of_power_of_two_and_two_level_schedules():
    assert [halving_doubling(n).steps for n in (1, 2, 4, 8, 64)] == [0, 2, 4, 6, 12]
    assert hierarchical(3, 4).steps == 2 * (4 - 1) + 2 * (3 - 1)
    assert hierarchical(1, 4).verify() == hierarchical(4, 1).verify() == [0, 1, 2, 3]
    inside = hierarchical(3, 4)
    crossing = inside.src // 4 != inside.dst // 4
    assert set(inside.step[crossing].tolist()) == {3, 4, 5, 6}  # rank = host * 4 + local; hosts talk in the middle


# ---- claims C15 to C26: the article's ring


def test_the_four_rings_own_what_the_table_says():
    assert ring(4, first_chunk=+1).verify() == [2, 3, 0, 1]
    assert ring(4, first_chunk=0).verify() == [1, 2, 3, 0]
    assert ring(4).verify() == ring(4, first_chunk=-1).verify() == [0, 1, 2, 3]
    assert ring(4, first_chunk=+1, direction=-1).verify() == [0, 1, 2, 3]
    firsts = [next(t for t in ring(4, f, d).transfers if t.src == 0) for f, d in RINGS[:4]]
    assert [(label(0, t.chunk), t.dst) for t in firsts] == [("A4", 1), ("A1", 1), ("A2", 1), ("A2", 3)]


def test_other_owners_after_the_reduce_phase():
    assert direct(4).verify() == halving_doubling(4).verify() == [0, 1, 2, 3]
    assert star(4).verify() == tree(4).verify() == [0, None, None, None]
    assert chain(3, chunks=2).verify() == [(0, 1), None, None]
    assert hierarchical(2, 3).verify() == [0, 2, 4, 1, 3, 5]
    assert ring(1).verify() == [0]


def test_the_article_s_first_hop_and_last_state():
    states = ring(4, first_chunk=+1).states()
    names = [[["+".join(label(r, c) for r in held) for c, held in enumerate(row)] for row in s] for s in states]
    assert names[0][0] == ["A1", "A2", "A3", "A4"]
    assert names[1] == [
        ["A1+D1", "A2", "A3", "A4"],
        ["B1", "A2+B2", "B3", "B4"],
        ["C1", "C2", "B3+C3", "C4"],
        ["D1", "D2", "D3", "C4+D4"],
    ]
    assert names[3][0] == ["A1+D1", "A2", "A3+B3+C3+D3", "A4+C4+D4"]  # claim C22: partial sums, not blanks
    assert all(held == (0, 1, 2, 3) for row in states[6] for held in row)


def test_the_article_s_end_state_is_refused_by_name():
    with pytest.raises(ScheduleError) as error:
        ring(4, first_chunk=+1).verify(owners=[0, 1, 2, 3])
    message = str(error.value)
    assert "GPU0, chunk 1: B1 and C1 are missing; it holds A1+D1" in message
    assert "count from 1" in message and "3 steps" in message
    assert ring(4, first_chunk=+1).verify(owners=[2, 3, 0, 1]) == [2, 3, 0, 1]


def test_no_continuation_of_the_article_s_first_hop_completes_chunk_1_on_gpu0():
    """Claim C21: 4 ranks choose 1 of 4 chunks in each of 2 steps, 65,536 ways, double counting allowed."""
    n = 4
    first = [[{r} for _ in range(n)] for r in range(n)]
    for r in range(n):
        first[(r + 1) % n][(r + 1) % n] = {r, (r + 1) % n}  # rank r sends chunk r + 1 to rank r + 1

    def hop(state, choice):
        after = [list(row) for row in state]
        for r, chunk in enumerate(choice):
            after[(r + 1) % n][chunk] = state[(r + 1) % n][chunk] | state[r][chunk]
        return after

    choices = list(itertools.product(range(n), repeat=n))
    seconds = [hop(first, choice) for choice in choices]
    # GPU0's chunk 1 in the last hop depends on what GPU3 sends alone, but all 256 choices are walked
    most = [len(hop(second, choice)[0][0]) for second in seconds for choice in choices]
    assert len(most) == 65_536
    assert max(most) == 3


def test_a_random_continuation_says_so_through_verify():
    rng = random.Random(21)
    start = [row for row in ring(4, first_chunk=+1).transfers if row.step == 0]
    for _ in range(200):
        rest = [(step, r, (r + 1) % 4, rng.randrange(4), True) for step in (1, 2) for r in range(4)]
        with pytest.raises(ScheduleError, match="GPU0, chunk 1: "):
            Schedule.from_rows("continued", 4, 4, [*start, *rest]).verify(owners=[0, 1, 2, 3])


# ---- what verify says of broken schedules


def test_a_lost_transfer_is_named():
    lossy = broken(star(3), lambda rows: [t for t in rows if t[:3] != (0, 2, 0)])
    with pytest.raises(ScheduleError) as error:
        lossy.verify()
    assert str(error.value).startswith(
        "star, after all 2 steps: GPU0, chunk 1: C1 is missing (in step 2 the copy from GPU0 to GPU2 overwrote C1); "
        "it holds A1+B1 ("
    )
    assert str(error.value).endswith("2 more (rank, chunk) pairs are wrong.")


def test_a_doubled_contribution_is_named_with_the_step_that_doubled_it():
    rows = [(0, 1, 0, 0, True), (1, 1, 0, 0, True), (2, 0, 1, 0, False)]
    with pytest.raises(ScheduleError) as error:
        Schedule.from_rows("twice", 2, 1, rows).verify()
    assert "GPU0, chunk 1: B1 is counted more than once (first in step 2, when GPU1 sent to GPU0)" in str(error.value)
    assert Schedule.from_rows("twice", 2, 1, rows).states()[2][0][0] == (0, 1, 1)


def test_missing_and_doubled_together():
    rows = [(0, 1, 0, 0, True), (1, 1, 0, 0, True)]
    with pytest.raises(ScheduleError, match="C1 is missing and B1 is counted more than once"):
        Schedule.from_rows("both", 3, 1, rows).verify()


def test_a_doubling_that_is_overwritten_in_time_is_no_fault():
    rows = [(0, 1, 0, 0, True), (1, 0, 1, 0, True), (2, 0, 1, 0, False)]
    assert Schedule.from_rows("detour", 2, 1, rows).verify() == [0, None]


def test_a_copy_over_a_fuller_sum_is_named():
    rows = [(0, 1, 0, 0, True), (1, 1, 0, 0, False)]
    with pytest.raises(ScheduleError) as error:
        Schedule.from_rows("lossy", 2, 1, rows).verify()
    assert "GPU0, chunk 1: A1 is missing (in step 2 the copy from GPU1 to GPU0 overwrote A1)" in str(error.value)


def test_two_writes_of_which_one_copies_are_named():
    rows = [(0, 1, 0, 1, True), (0, 2, 0, 1, False)]
    with pytest.raises(
        ScheduleError, match="race, step 1: 2 transfers write chunk 2 of GPU0 and at least one is a copy"
    ):
        Schedule.from_rows("race", 3, 2, rows).verify()


def test_a_wrong_owner_claim_is_refused_either_way():
    with pytest.raises(ScheduleError, match=r"GPU1 also holds chunk 2 complete, which owners\[1\] does not say"):
        ring(3).verify(owners=[0, None, 2])
    with pytest.raises(ScheduleError, match="one entry for each of 3 ranks"):
        ring(3).verify(owners=[0, 1])
    with pytest.raises(ScheduleError, match="one entry for each of 3 ranks"):
        ring(3).verify(owners=3)
    with pytest.raises(ScheduleError, match=r"owners\[2\] names chunk 7; chunks here are 0 to 2"):
        ring(3).verify(owners=[0, 1, 7])
    assert chain(3, chunks=2).verify(owners=[(0, 1), None, ()]) == [(0, 1), None, None]


def test_beyond_26_ranks_contributions_have_numbers():
    assert (label(0, 0), label(25, 9), label(27, 0, ranks=30)) == ("A1", "Z10", "r27c1")
    rows = [t for t in star(30).transfers if t[:3] not in ((0, 27, 0), (0, 28, 0))]
    with pytest.raises(
        ScheduleError, match="GPU0, chunk 1: r27c1 and r28c1 are missing; it holds r0c1.*and 20|20 more"
    ):
        Schedule.from_rows("star", 30, 1, rows).verify()


@pytest.mark.parametrize("n", [63, 64, 65, 130])
def test_contributions_beyond_one_machine_word(n):
    assert ring(n, first_chunk=+1).verify() == [(r + 2) % n for r in range(n)]
    with pytest.raises(ScheduleError, match=f"GPU0, chunk 1: r{n - 1}c1 is missing"):
        broken(star(n), lambda rows: [t for t in rows if t[:3] != (0, n - 1, 0)]).verify()


def test_verify_is_right_about_random_damage():
    """A damaged schedule without a race passes exactly where counting contributions in integers says it is right."""
    rng = random.Random(7)
    originals = [ring(4, 1), ring(3, 1, -1), star(4), direct(3), tree(5), halving_doubling(4), hierarchical(2, 2)]
    verdicts = Counter()
    for _ in range(700):
        original = rng.choice(originals)
        rows = list(original.transfers)
        at = rng.randrange(len(rows))
        row = rows[at]
        kind = rng.choice(["drop", "repeat", "chunk", "flip", "late", "swap"])
        if kind == "drop":
            del rows[at]
        elif kind == "repeat":
            rows.append(row._replace(step=row.step + rng.choice([0, 1])))
        elif kind == "chunk":
            rows[at] = row._replace(chunk=rng.randrange(original.chunks))
        elif kind == "flip":
            rows[at] = row._replace(reduce=not row.reduce)
        elif kind == "late":
            rows[at] = row._replace(step=row.step + 1)
        else:
            rows[at] = row._replace(src=row.dst, dst=row.src)
        schedule = Schedule.from_rows(original.name, original.ranks, original.chunks, rows)
        n, chunks = schedule.ranks, schedule.chunks
        # one element for each (contribution, chunk), so that the sum counts each contribution apart
        counts = [np.zeros((chunks, n), dtype=int) for _ in range(n)]
        for r in range(n):
            counts[r][:, r] = 1
        right = all((end == 1).all() for end in simulate(schedule, [c.ravel() for c in counts]))
        try:
            schedule.verify()
            verdict = "passed"
        except ScheduleError as error:
            verdict = "race" if "arrives last" in str(error) else "refused"
        verdicts[verdict, right] += 1
        assert verdict == "race" or (verdict == "passed") == right, f"{original}, {kind} at {row}: {verdict}"
    assert min(verdicts["passed", True], verdicts["refused", False]) > 100, verdicts


# ---- malformed input


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((0, 0, 4, 0, True), r"transfer 0 \(step 0\): dst 4 is out of range: it must be 0 to 3"),
        ((0, -1, 1, 0, True), r"src -1 is out of range"),
        ((2, 0, 1, 4, True), r"transfer 0 \(step 2\): chunk 4 is out of range"),
        ((-1, 0, 1, 0, True), r"step -1 is out of range"),
        ((0, 2, 2, 0, True), r"rank 2 sends to itself"),
        ((0, 0, 1, 0, 2), r"reduce 2 is out of range"),
        ((0, 0, 1, 0), r"transfer 0: needs \(step, src, dst, chunk, reduce\)"),
        (7, r"transfer 0: needs"),
        ((0, 0.5, 1, 0, True), r"Column src must hold integers, not float64"),
        ((0, "A", 1, 0, True), r"Column src must hold integers"),
    ],
)
def test_a_malformed_row_is_refused(row, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_rows("bad", 4, 4, [row])


def test_malformed_columns_and_sizes_are_refused():
    with pytest.raises(ScheduleError, match=r"equally long: step \(2,\), src \(1,\)"):
        Schedule("bad", 4, 4, [0, 1], [0], [1], [0], [True])
    with pytest.raises(ScheduleError, match="ranks must be a whole number of at least 1, not 0"):
        Schedule("bad", 0, 4, *[()] * 5)
    with pytest.raises(ScheduleError, match="chunks must be a whole number"):
        Schedule("bad", 4, "4", *[()] * 5)


@pytest.mark.parametrize("builder", [ring, star, chain, direct, tree, halving_doubling])
@pytest.mark.parametrize("n", [0, -3, 2.5, "4", None, True, float("nan")])
def test_builders_refuse_impossible_ranks_in_one_sentence(builder, n):
    with pytest.raises(ScheduleError) as error:
        builder(n)
    assert str(error.value) == (
        f"{builder.__name__}'s number of ranks must be a whole number of at least 1, not {n!r}."
    )


def test_builders_refuse_their_other_arguments():
    for call, message in (
        (lambda: halving_doubling(6), "power of two ranks"),
        (lambda: ring(4, direction=0), "direction must be"),
        (lambda: ring(4, direction=2), "direction must be"),
        (lambda: ring(4, first_chunk=0.5), "first_chunk must be a whole number"),
        (lambda: chain(4, chunks=0), "number of chunks must be"),
        (lambda: hierarchical(0, 4), "hierarchical's hosts"),
        (lambda: hierarchical(4, "2"), "hierarchical's ranks_per_host"),
        (lambda: ring(100_000), "closed form"),
        (lambda: star(10**12), "closed form"),
    ):
        with pytest.raises(ScheduleError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
    with pytest.raises(ScheduleError, match="verify a smaller one"):
        Schedule("wide", 4096, 4096, *[()] * 5).verify()


# ---- the object


def test_columns_are_ordered_and_cannot_be_changed():
    rows = [(1, 0, 1, 0, False), (0, 1, 0, 0, True)]
    schedule = Schedule.from_rows("pair", 2, 1, rows)
    assert schedule.transfers == (Transfer(0, 1, 0, 0, True), Transfer(1, 0, 1, 0, False))
    assert schedule.verify() == [0, None]
    with pytest.raises(ValueError, match="read-only"):
        schedule.src[0] = 1


def test_equal_content_is_equal_and_hashes_alike():
    assert ring(4) == ring(4, first_chunk=3) and hash(ring(4)) == hash(ring(4, first_chunk=3))
    assert ring(4) != ring(4, first_chunk=0) and ring(4) != "ring"
    assert "ring: 4 ranks, 4 chunks, 6 steps of which 3 reduce, 24 transfers" in repr(ring(4))


def test_a_schedule_leaves_the_caller_s_arrays_alone():
    column = np.array([0, 1], dtype=np.int32)
    Schedule("pair", 2, 1, column, [1, 0], [0, 1], [0, 0], np.array([True, False]))
    column[0] = 0  # still writable


def test_bounds_split_any_size():
    assert ring(4).bounds(10) == [0, 2, 5, 7, 10]
    assert ring(4).bounds(2) == [0, 0, 1, 1, 2]
    assert ring(4).bounds(0) == [0] * 5
    assert ring(3).bounds(10**18) == [0, 10**18 // 3, 2 * 10**18 // 3, 10**18]


def test_schedules_and_costs_do_not_load_torch():
    code = "import sys, ddplab.schedule, ddplab.cost; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"

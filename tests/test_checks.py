"""Checkers against the right solution and against the wrong ones that people write."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import ddplab as dl
from ddplab.checks import CheckError, check_all_gather, check_reduce_scatter, check_ring

SOON = 2.0  # seconds until the watch calls a message lost, in the tests where one is


def exchange(out, to, into, source):
    """One step: send `out` and receive `into` at the same time."""
    ops = [dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def reduce_scatter(chunks, rank, ranks):
    for step in range(ranks - 1):
        give, take = (rank - 1 - step) % ranks, (rank - 2 - step) % ranks
        buffer = torch.empty_like(chunks[take])
        exchange(chunks[give], (rank + 1) % ranks, buffer, (rank - 1) % ranks)
        chunks[take] += buffer


def all_gather(chunks, rank, ranks):
    for step in range(ranks - 1):
        exchange(
            chunks[(rank - step) % ranks], (rank + 1) % ranks, chunks[(rank - 1 - step) % ranks], (rank - 1) % ranks
        )


def ring_mean(tensor):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = list(torch.tensor_split(tensor, ranks))
    tensor /= ranks
    reduce_scatter(chunks, rank, ranks)
    all_gather(chunks, rank, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_right_ring_passes(ranks, capsys):
    check_ring(ring_mean, ranks=ranks)
    assert f"{ranks} ranks, {2 * (ranks - 1)} steps" in capsys.readouterr().out


def test_each_half_passes_alone(capsys):
    check_reduce_scatter(reduce_scatter, ranks=4)
    check_all_gather(all_gather, ranks=4)
    assert capsys.readouterr().out.count("4 ranks, 3 steps") == 2


def test_dividing_after_the_sum_passes():
    def ring_then_divide(tensor):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        chunks = list(torch.tensor_split(tensor, ranks))
        reduce_scatter(chunks, rank, ranks)
        chunks[rank] /= ranks
        all_gather(chunks, rank, ranks)

    check_ring(ring_then_divide, ranks=4)


def test_isend_and_irecv_without_a_batch_pass():
    def with_handles(chunks, rank, ranks):
        for step in range(ranks - 1):
            give, take = (rank - 1 - step) % ranks, (rank - 2 - step) % ranks
            buffer = torch.empty_like(chunks[take])
            sending = dist.isend(chunks[give], (rank + 1) % ranks)
            dist.recv(buffer, (rank - 1) % ranks)
            sending.wait()
            chunks[take] += buffer

    check_reduce_scatter(with_handles, ranks=4)


def test_another_ring_can_be_asked_for():
    def gloo_ring(chunks, rank, ranks):
        for step in range(ranks - 1):
            give, take = (rank + 1 + step) % ranks, (rank + 2 + step) % ranks
            buffer = torch.empty_like(chunks[take])
            exchange(chunks[give], (rank - 1) % ranks, buffer, (rank + 1) % ranks)
            chunks[take] += buffer

    check_reduce_scatter(gloo_ring, ranks=4, schedule=dl.ring(4, first_chunk=+1, direction=-1))


def wrong(check, fn, ranks=4, timeout=20.0):
    with pytest.raises(CheckError) as error:
        check(fn, ranks=ranks, timeout=timeout)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_wrong_index_names_rank_step_and_both_chunks():
    def textbook_start(chunks, rank, ranks):
        for step in range(ranks - 1):
            give, take = (rank - step) % ranks, (rank - 1 - step) % ranks
            buffer = torch.empty_like(chunks[take])
            exchange(chunks[give], (rank + 1) % ranks, buffer, (rank - 1) % ranks)
            chunks[take] += buffer

    assert wrong(check_reduce_scatter, textbook_start) == (
        "rank 0, step 0: sent chunks[0] (A1); expected chunks[3] = A4."
    )


def test_wrong_direction_names_both_neighbours():
    def backwards(chunks, rank, ranks):
        for step in range(ranks - 1):
            give, take = (rank - 1 - step) % ranks, (rank - 2 - step) % ranks
            buffer = torch.empty_like(chunks[take])
            exchange(chunks[give], (rank - 1) % ranks, buffer, (rank + 1) % ranks)
            chunks[take] += buffer

    assert "rank 0, step 0: sent to rank 3; this ring runs rank 0 -> rank 1" in wrong(check_reduce_scatter, backwards)


def test_no_reduce_says_which_contribution_is_missing():
    def only_copies(chunks, rank, ranks):
        for step in range(ranks - 1):
            give, take = (rank - 1 - step) % ranks, (rank - 2 - step) % ranks
            exchange(chunks[give], (rank + 1) % ranks, chunks[take], (rank - 1) % ranks)

    message = wrong(check_reduce_scatter, only_copies)
    assert message.startswith("rank 0, step 1: sent chunks[2] = D3; expected chunks[2] = A3+D3: A3 missing.")
    assert "arrived in step 0" in message


def test_dropped_sum_says_which_contribution_is_missing():
    def adds_nothing(chunks, rank, ranks):
        for step in range(ranks - 1):
            give, take = (rank - 1 - step) % ranks, (rank - 2 - step) % ranks
            exchange(chunks[give], (rank + 1) % ranks, torch.empty_like(chunks[take]), (rank - 1) % ranks)

    assert wrong(check_reduce_scatter, adds_nothing).startswith(
        "rank 0, step 1: sent chunks[2] = A3; expected chunks[2] = A3+D3: D3 missing."
    )


def test_sum_into_the_wrong_chunk():
    def misplaced(chunks, rank, ranks):
        for step in range(ranks - 1):
            give = (rank - 1 - step) % ranks
            buffer = torch.empty_like(chunks[give])
            exchange(chunks[give], (rank + 1) % ranks, buffer, (rank - 1) % ranks)
            chunks[give] += buffer  # belongs into the chunk before

    assert wrong(check_reduce_scatter, misplaced).startswith("rank 0, step 1: sent chunks[2] = A3; expected")


def test_last_reduction_missing_is_seen_in_the_result():
    def forgets_the_last(chunks, rank, ranks):
        for step in range(ranks - 1):
            give, take = (rank - 1 - step) % ranks, (rank - 2 - step) % ranks
            buffer = torch.empty_like(chunks[take])
            exchange(chunks[give], (rank + 1) % ranks, buffer, (rank - 1) % ranks)
            if step < ranks - 2:
                chunks[take] += buffer

    assert wrong(check_reduce_scatter, forgets_the_last) == (
        "rank 0, chunks[0]: holds A1 at the end; expected A1+B1+C1+D1."
    )


def test_off_by_one_all_gather():
    def shifted(chunks, rank, ranks):
        for step in range(ranks - 1):
            exchange(
                chunks[(rank + 1 - step) % ranks], (rank + 1) % ranks, chunks[(rank - step) % ranks], (rank - 1) % ranks
            )

    message = wrong(check_all_gather, shifted)
    assert message.startswith("rank 0, step 0: sent chunks[1] (A2); expected chunks[0] = A1+B1+C1+D1")


def test_one_step_too_few():
    def short(chunks, rank, ranks):
        for step in range(ranks - 2):
            exchange(
                chunks[(rank - step) % ranks], (rank + 1) % ranks, chunks[(rank - 1 - step) % ranks], (rank - 1) % ranks
            )

    assert wrong(check_all_gather, short) == "rank 0: sent 2 messages; it takes 3 (N - 1 = 3 for each half)."


def test_forgot_to_divide():
    def ring_sum(tensor):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        chunks = list(torch.tensor_split(tensor, ranks))
        reduce_scatter(chunks, rank, ranks)
        all_gather(chunks, rank, ranks)

    assert wrong(check_ring, ring_sum).startswith("rank 0: holds the sum. DDP wants the mean")


def test_everybody_sends_first_is_a_deadlock_not_a_hang():
    def polite(chunks, rank, ranks):
        for step in range(ranks - 1):
            give, take = (rank - 1 - step) % ranks, (rank - 2 - step) % ranks
            buffer = torch.empty_like(chunks[take])
            dist.send(chunks[give], (rank + 1) % ranks)
            dist.recv(buffer, (rank - 1) % ranks)
            chunks[take] += buffer

    message = wrong(check_reduce_scatter, polite, timeout=SOON)
    assert message.startswith("step 0: all 4 ranks wait in a send and none receives, a deadlock (timeout)")
    assert "isend" in message


def test_reversed_roles():
    def receives_from_the_right(chunks, rank, ranks):
        for step in range(ranks - 1):
            give, take = (rank - 1 - step) % ranks, (rank - 2 - step) % ranks
            buffer = torch.empty_like(chunks[take])
            exchange(chunks[give], (rank + 1) % ranks, buffer, (rank + 1) % ranks)
            chunks[take] += buffer

    assert wrong(check_reduce_scatter, receives_from_the_right, timeout=SOON) == (
        "rank 0, step 0: receives from rank 1; on this ring rank 3 sends to rank 0."
    )


def test_one_silent_rank_is_named_by_its_neighbour():
    def rank_two_sleeps(chunks, rank, ranks):
        if rank != 2:
            reduce_scatter(chunks, rank, ranks)

    message = wrong(check_reduce_scatter, rank_two_sleeps, timeout=SOON)
    assert "rank 2" in message and "posted 0 sends and 0 receives" in message


def test_never_waited_for():
    def hasty(chunks, rank, ranks):
        for step in range(ranks - 1):
            give, take = (rank - 1 - step) % ranks, (rank - 2 - step) % ranks
            buffer = torch.empty_like(chunks[take])
            dist.isend(chunks[give].clone(), (rank + 1) % ranks)
            dist.recv(buffer, (rank - 1) % ranks)
            chunks[take] += buffer

    assert "posted a send and never waited for it" in wrong(check_reduce_scatter, hasty, timeout=SOON)


def test_own_exception_is_shown_with_its_line():
    def off_the_end(chunks, rank, ranks):
        chunks[rank + 1].add_(1)
        reduce_scatter(chunks, rank, ranks)

    message = wrong(check_reduce_scatter, off_the_end, timeout=SOON)
    assert "rank 3" in message and "line 2 of off_the_end: IndexError" in message


def test_the_empty_exercise_says_so():
    def untouched(tensor):
        raise NotImplementedError("untouched: write it, then run the cell below.")

    assert wrong(check_ring, untouched) == "untouched: write it, then run the cell below."


def test_a_collective_instead_of_messages_does_not_count():
    def shortcut(tensor):
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()

    assert wrong(check_ring, shortcut).startswith("rank 0: sent 0 messages; it takes 6")


def test_torch_chunk_fails_on_sizes_that_do_not_divide():
    def with_torch_chunk(tensor):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        tensor /= ranks
        chunks = list(tensor.chunk(ranks))
        reduce_scatter(chunks, rank, ranks)
        all_gather(chunks, rank, ranks)

    message = wrong(check_ring, with_torch_chunk, timeout=SOON)
    assert "3 elements on 4 ranks" in message and "torch.tensor_split" in message


def test_a_notebook_shows_the_message_alone():
    assert CheckError("rank 1, step 0: x")._render_traceback_() == ["Not yet: rank 1, step 0: x"]


def test_bad_arguments():
    with pytest.raises(ValueError, match="at least 2 ranks"):
        check_ring(ring_mean, ranks=1)
    with pytest.raises(ValueError, match="a schedule for as many"):
        check_ring(ring_mean, ranks=4, schedule=dl.ring(3))


def test_a_receive_buffer_too_small_is_not_a_crash_report():
    def too_small(chunks, rank, ranks):
        exchange(chunks[(rank - 1) % ranks], (rank + 1) % ranks, torch.empty(1), (rank - 1) % ranks)

    message = wrong(check_reduce_scatter, too_small)
    assert "died without a word" in message and "torch.empty_like(chunk)" in message


def test_an_endless_loop_ends():
    def forever(chunks, rank, ranks):
        while rank == 1:  # one is enough
            time.sleep(0.001)  # the cores are for other tests

    with pytest.raises(CheckError, match="forever did not come back on rank 1 within 6 s: an endless loop"):
        check_reduce_scatter(forever, ranks=2, timeout=0.1)

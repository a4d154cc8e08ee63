"""Traces of our own gloo jobs against another clock: a comm hook that notes when each bucket leaves and comes back.

Both clocks are read on one machine at the same events, so they must agree, however busy it is: an all-reduce of the
trace begins after the hook handed the bucket over, and is not over before the bucket is back. (gloo runs the callback
and then closes its annotation.) As root the ranks run before everything else, so that 50 ms stand out.
"""

from __future__ import annotations

import os

import pandas as pd
import pytest

import ddplab as dl

LATE_S = 0.05
STEPS, BUCKETS = 3, 4
SLACK_US = 200.0  # Kineto converts the processor's counter to wall time; the two differ by some microseconds


def job(folder, late_rank):
    """In a rank: record STEPS steps of BUCKETS buckets; the hook's notes of them."""
    import time

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    rank, log = dist.get_rank(), []
    layers = [nn.Linear(512, 512, bias=False) for _ in range(BUCKETS)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)

    def hook(_, bucket):
        note = {"bytes": bucket.buffer().nbytes, "left_ns": time.time_ns()}
        log.append(note)
        work = dist.all_reduce(bucket.buffer(), async_op=True)

        def arrived(future):
            note["back_ns"] = time.time_ns()
            return future.value()[0]

        return work.get_future().then(arrived)

    ddp.register_comm_hook(None, hook)
    with dl.capture(folder, steps=STEPS) as recorder:
        while not recorder.done:
            loss = ddp(torch.randn(32, 512)).square().mean()
            if rank == late_rank:
                time.sleep(LATE_S)
            loss.backward()
            ddp.zero_grad()
            recorder.step()
    return log[-STEPS * BUCKETS :]


@pytest.fixture(scope="module", params=[2, 4])
def run(request, tmp_path_factory):
    """(ranks, report, the hooks' notes as one table)."""
    folder = tmp_path_factory.mktemp("traces")
    first = os.geteuid() == 0
    logs = dl.launch(
        job,
        folder,
        request.param - 1,
        ranks=request.param,
        device="cpu",
        realtime=first,
    )
    notes = [pd.DataFrame(log).assign(rank=rank, number=range(len(log))) for rank, log in enumerate(logs)]
    return (
        request.param,
        dl.analyze_trace(folder),
        pd.concat(notes, ignore_index=True),
    )


def paired(report, notes):
    """Trace and notes of each all-reduce side by side, in the order in which a rank handed them over."""
    ops = report.operations.sort_values(["rank", "start_ns"]).assign(rank=lambda t: t["rank"].astype(int))
    ops["number"] = ops.groupby("rank").cumcount()
    return ops.merge(notes, on=["rank", "number"], validate="one_to_one")


def test_every_collective_is_there_with_its_size(run):
    ranks, report, notes = run
    assert report.ranks == list(range(ranks)) and not report.notes
    both = paired(report, notes)
    assert len(both) == len(report.operations) == ranks * STEPS * BUCKETS
    assert set(both.collective) == {"all_reduce"} and set(both.group_size) == {ranks}
    assert (both.message_bytes == both.bytes).all() and set(both.bytes) == {512 * 512 * 4}
    assert list(report.collectives["count"]) == [STEPS * BUCKETS]


def test_the_trace_and_the_hook_see_the_same_moments(run):
    _, report, notes = run
    both = paired(report, notes)
    for earlier, later in (
        ("left_ns", "start_ns"),
        ("start_ns", "back_ns"),
        ("back_ns", "end_ns"),
    ):
        assert ((both[later] - both[earlier]) / 1e3 > -SLACK_US).all(), f"{earlier} before {later}"


def test_buckets_are_ready_when_the_hook_was_called(run):
    ranks, report, notes = run
    table = report.buckets.assign(number=lambda t: t.iteration * BUCKETS + t.bucket)
    both = table.merge(notes, on=["rank", "number"], validate="one_to_one")
    assert len(both) == ranks * STEPS * BUCKETS
    ready_ns = both.begin_ns + both.ready_us * 1e3
    assert ((ready_ns - both.left_ns) / 1e3 > -SLACK_US).all() and (ready_ns < both.back_ns).all()
    assert (both.exposed_us <= both.end_us - both.start_us + 1e-3).all()  # their floats round


def test_the_straggler_is_found_in_every_step(run):
    """By the hooks' clocks the last rank hands its first bucket over 50 ms after the others; the trace must say so."""
    ranks, report, notes = run
    late = ranks - 1
    first = notes[notes.number % BUCKETS == 0].assign(step=lambda t: t.number // BUCKETS)
    left = first.pivot(index="step", columns="rank", values="left_ns")
    assert (left.idxmax(axis=1) == late).all()
    by_hook = (left.max(axis=1) - left.min(axis=1)) / 1e6
    assert (by_hook > 1e3 * LATE_S / 2).all()
    assert report.stragglers["rank"][0] == late
    worst = report.holdups.loc[report.holdups.groupby("step").late_us.idxmax()]
    assert list(worst.last_rank) == [late] * STEPS
    by_trace = worst.set_index(pd.RangeIndex(STEPS)).late_us / 1e3
    assert (by_trace - by_hook).abs().median() < 1e3 * LATE_S / 4  # nowhere near another story
    assert report.stragglers["cause"][0] == "host"  # it slept
    assert [piece.kind for piece in report.advice] == ["waiting"]
    assert report.advice[0].numbers["late"] == f"rank {late}"


def test_communication_is_what_the_hooks_saw(run):
    """The five parts sum to the span, and communication covers no more than buckets were under way."""
    _, report, notes = run
    both = paired(report, notes)
    for rank, mine in both.groupby("rank"):
        covered, until = 0, 0
        for left, end in sorted(zip(mine.left_ns, mine.end_ns, strict=True)):
            covered += max(0, end - max(left, until))
            until = max(until, end)
        row = report.breakdown.set_index("rank").loc[rank]
        comm = row.overlapped_ns + row.exposed_comm_ns
        assert comm == report.overlap.set_index("rank").comm_ns[rank]
        assert 0 < comm <= covered + SLACK_US * 1e3 * len(mine)
        parts = [
            "compute_only_ns",
            "overlapped_ns",
            "exposed_comm_ns",
            "memory_only_ns",
            "idle_ns",
        ]
        assert row[parts].sum() == row.span_ns

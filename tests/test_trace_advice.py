"""Each piece of advice fires on its planted fault, with the planted numbers, and on nothing else."""

from __future__ import annotations

import pytest
from ddp_traces import MIB, Bucket, Step, gpu_trace, healthy, write

from ddplab.trace import analyze_trace


def advice(tmp_path, steps, ranks=2, late=None):
    """Kinds and pieces for a job of `ranks` alike ranks; late[rank] gives one rank's steps instead."""
    traces = [gpu_trace(r, ranks, (late or {}).get(r, steps)) for r in range(ranks)]
    return {piece.kind: piece for piece in analyze_trace(write(tmp_path, traces)).advice}


def meeting(by, which=range(99)):
    """(steps of a rank that waits `by` us in its first broadcast, of the one that comes `by` us late to it)."""
    sides = []
    for early in (True, False):
        steps = []
        for i, s in enumerate(healthy(4)):
            wait = by if i in which else 0
            first = ("Broadcast", 20, wait + 30, 212480) if early else ("Broadcast", wait + 20, 30, 212480)
            steps.append(Step(s.buckets, s.backward, [first, ("Broadcast", wait + 60, 8, 424)], forward=wait + 1000))
        sides.append(steps)
    return sides


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_a_healthy_job_gets_none(tmp_path, ranks, steps):
    assert advice(tmp_path, healthy(steps), ranks) == {}


def test_a_small_model_in_one_bucket_is_healthy(tmp_path):
    """Less than a megabyte: there is nothing to gain."""
    step = Step([Bucket(MIB // 2, 900, 910, 1100)], 900.0)
    assert advice(tmp_path, [step] * 4) == {}


def test_a_link_that_is_the_bottleneck_is_no_fault_of_the_buckets(tmp_path):
    """Communication longer than backward: buckets leave early, and still most of it is exposed."""
    buckets, end = [], 2000
    for i in range(4):
        buckets.append(Bucket(25 * MIB, 2000 * (i + 1), max(end, 2000 * (i + 1)), end := end + 20_000))
    assert advice(tmp_path, [Step(buckets, 8000.0)] * 4) == {}


def test_many_small_buckets(tmp_path):
    buckets = [Bucket(100_000, 500 * (i + 1), 500 * (i + 1) + 10, 500 * (i + 1) + 110) for i in range(40)]
    found = advice(tmp_path, [Step(buckets, 20_000.0)] * 4)
    assert list(found) == ["small_buckets"]
    one = found["small_buckets"]
    assert one.numbers == {"buckets": 40, "median_bytes": 100_000, "each_us": 100.0, "moving_ms": 4.0}
    assert "40 buckets" in one.says and "98 KiB" in one.says and "bucket_cap_mb" in one.do


def test_all_in_one_bucket(tmp_path):
    found = advice(tmp_path, [Step([Bucket(97 * MIB, 24_000, 24_012, 40_000)], 24_000.0)] * 4)
    assert list(found) == ["one_bucket"]
    assert found["one_bucket"].numbers == {"bytes": 97 * MIB, "exposed_ms": 16.0, "backward_ms": 24.0}


def test_overlap_lost(tmp_path):
    """Several buckets, all handed over when backward is over: a compiled backward, for one."""
    buckets = [Bucket(25 * MIB, 24_000, 24_000 + 4000 * i + 10, 28_000 + 4000 * i) for i in range(4)]
    found = advice(tmp_path, [Step(buckets, 24_000.0)] * 3)
    assert list(found) == ["overlap_lost"]
    numbers = found["overlap_lost"].numbers
    assert numbers == {"buckets": 4, "first_ready_ms": 24.0, "backward_ms": 24.0, "exposed_ms": 16.0}


def test_the_first_iteration(tmp_path):
    whole = sum(b.nbytes for b in healthy(1)[0].buckets)
    first = Step([Bucket(whole, 24_000, 24_012, 34_000)], 24_000.0)
    found = advice(tmp_path, [first, *healthy(4)])
    assert list(found) == ["first_iteration"]
    assert found["first_iteration"].numbers == {"buckets_later": 4, "exposed_ms": 10.0}
    assert "61.0 MiB" in found["first_iteration"].says


def test_one_bucket_throughout_is_not_taken_for_the_first_iteration(tmp_path):
    found = advice(tmp_path, [Step([Bucket(97 * MIB, 24_000, 24_012, 40_000)], 24_000.0)])
    assert list(found) == ["one_bucket"]


def test_many_small_messages(tmp_path):
    steps = healthy(4)
    for step in steps:
        step.others = [("AllReduce", 20 + 45 * i, 40, 4) for i in range(20)]
    found = advice(tmp_path, steps)
    assert list(found) == ["small_messages"]
    numbers = found["small_messages"].numbers
    assert (numbers["messages"], numbers["each_us"], numbers["total_ms"]) == (20, 40.0, 0.8)


def test_an_unsynchronised_start(tmp_path):
    """Rank 1 comes 300 ms late to the first collective only; rank 0's kernel spins that long."""
    early, late = meeting(300_000, which=[0])
    found = advice(tmp_path, early, late={1: late})
    assert list(found) == ["unsynchronised_start"]
    one = found["unsynchronised_start"]
    assert one.numbers["late"] == "rank 1" and one.numbers["first_wait_ms"] == pytest.approx(300.0)


def test_waiting_for_a_straggler(tmp_path):
    """Rank 1 is 20 ms late in every step."""
    early, late = meeting(20_000)
    found = advice(tmp_path, early, late={1: late})
    assert list(found) == ["waiting"]
    numbers = found["waiting"].numbers
    assert numbers["late"] == "rank 1" and numbers["waiting_ms"] == pytest.approx(4 * 20 / 2, rel=0.01)
    assert numbers["transfer_ms"] == pytest.approx(4 * (0.038 + 0.288 + 3.988 + 4.088 + 1.488), rel=0.01)


def test_one_rank_alone_waits_for_nobody(tmp_path):
    assert advice(tmp_path, meeting(20_000)[0], ranks=1) == {}


def test_two_faults_the_dearer_first(tmp_path):
    buckets = [Bucket(25 * MIB, 24_000, 24_000 + 4000 * i + 10, 28_000 + 4000 * i) for i in range(4)]
    others = [("AllReduce", 20 + 65 * i, 60, 4) for i in range(20)]
    found = advice(tmp_path, [Step(buckets, 24_000.0, others, forward=2000)] * 3)
    assert list(found) == ["overlap_lost", "small_messages"]


def test_real_traces(root):
    """The DLRM job has a straggler, by everybody's measure; the two ResNets' buckets are as DDP makes them."""
    traces = root / "labs" / "data" / "traces"
    assert [a.kind for a in analyze_trace(traces / "dlrm_8xV100").advice] == ["waiting"]
    for name in ("ddp_2xA100_rank0", "resnet_8xMI300X_rank0"):
        assert analyze_trace(traces / name).advice == []


def test_advice_is_in_the_text_and_in_the_json(tmp_path):
    import json

    step = Step([Bucket(97 * MIB, 24_000, 24_012, 40_000)], 24_000.0)
    report = analyze_trace(write(tmp_path, [gpu_trace(0, 2, [step] * 3)]))
    assert "All gradients are in one bucket of 97.0 MiB" in str(report)
    assert json.loads(report.to_json())["advice"][0]["numbers"]["exposed_ms"] == 16.0

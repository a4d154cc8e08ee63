"""DDP's buckets in a trace: planted times come back, and real traces hold what the model's parameters say."""

from __future__ import annotations

import numpy as np
import pytest
from ddp_traces import MIB, Bucket, Step, gpu_trace, healthy, write
from hypothesis import given, settings
from hypothesis import strategies as st

import ddplab as dl
from ddplab.trace import analyze_trace
from ddplab.trace.buckets import COLUMNS, buckets, timeline
from ddplab.trace.read import read_trace

TIMES = ["ready_us", "start_us", "end_us", "wait_us", "exposed_us", "backward_us"]


def table_of(tmp_path, steps, **options):
    return buckets(read_trace(write(tmp_path, [gpu_trace(0, 2, steps, **options)]) / "rank0.pt.trace.json"))


def test_planted_times_come_back(tmp_path):
    table = table_of(tmp_path, healthy(3), first=7)
    assert list(table.columns) == list(COLUMNS)
    assert list(table.step) == [7] * 4 + [8] * 4 + [9] * 4 and list(table.iteration) == [0] * 4 + [1] * 4 + [2] * 4
    assert list(table.bucket) == [0, 1, 2, 3] * 3 and set(table.collective) == {"all_reduce"}
    assert list(table.message_bytes[:4]) == [MIB, 25 * MIB, 26 * MIB, 9 * MIB]
    last = table[table.bucket == 3].iloc[0]
    assert list(last[TIMES]) == [24000, 24012, 25500, 12, 1488, 24000]
    assert (table[table.bucket < 3].exposed_us == 0).all()
    assert np.diff(table.begin_ns.unique()).tolist() == [1000 * (1000 + 25500 + 500)] * 2


def test_only_hooks_make_buckets(tmp_path):
    """Broadcasts of buffers, a metric's all-reduce in forward: collectives, but no buckets."""
    step = Step([Bucket(4 * MIB, 100, 110, 300)], 500, others=[("AllReduce", 20, 5, 4), ("Broadcast", 30, 5, 424)])
    trace = gpu_trace(0, 2, [step, step])
    # batch norm across ranks: launched in backward, from its own node and not from a hook
    trace["traceEvents"] += [
        {"ph": "X", "cat": "cpu_op", "name": "autograd::engine::evaluate_function: SyncBatchNormBackward",
         "pid": 100, "tid": 2, "ts": 1105, "dur": 4, "args": {}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 100, "tid": 2, "ts": 1106, "dur": 1,
         "args": {"correlation": 999}},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "pid": 0, "tid": 20,
         "ts": 2050, "dur": 5, "args": {"correlation": 999}},
    ]  # fmt: skip
    path = write(tmp_path, [trace]) / "rank0.pt.trace.json"
    report = analyze_trace(path)
    assert report.collectives["count"].sum() == 2 * 3 + 1
    assert list(report.buckets.message_bytes) == [4 * MIB] * 2


def test_no_ddp_no_buckets(tmp_path):
    assert not len(table_of(tmp_path, [Step([], 500)]))
    with pytest.raises(ValueError, match="0 backward passes"):
        timeline(table_of(tmp_path, [Step([], 500)]))


planted = st.lists(
    st.tuples(st.integers(1, 2000), st.integers(0, 500), st.integers(1, 3000), st.integers(1, 10**6)),
    min_size=1,
    max_size=6,
)


@given(planted, st.integers(0, 5000))
@settings(max_examples=60, deadline=None)
def test_any_planted_timeline(tmp_path_factory, rows, tail):
    """Gaps between readiness, waits, transfers one after another: the table repeats them, and so does the Timeline."""
    made, ready, end = [], 0, 0
    for gap, wait, transfer, elements in rows:
        ready += gap
        start = max(ready + wait, end)
        end = start + transfer
        made.append(Bucket(4 * elements, ready, start, end))
    backward = ready + tail
    table = table_of(tmp_path_factory.mktemp("t"), [Step(made, backward)])
    assert list(table.message_bytes) == [b.nbytes for b in made]
    for name, values in {
        "ready_us": [b.ready for b in made],
        "start_us": [b.start for b in made],
        "end_us": [b.end for b in made],
        "exposed_us": [max(0, b.end - max(b.start, backward)) for b in made],
        "backward_us": [backward] * len(made),
    }.items():
        assert np.allclose(table[name].to_numpy(float), values, rtol=0, atol=2e-3), name  # the file has 1 ns steps
    drawn = timeline(table)
    assert drawn.exposed_s == pytest.approx(max(0, end - backward) / 1e6, abs=1e-8)
    assert drawn.communication_s == pytest.approx(sum(b.end - b.start for b in made) / 1e6, abs=1e-8)


def test_a_timeline_for_the_figure(tmp_path):
    table = table_of(tmp_path, healthy(3))
    drawn = timeline(table, 1)
    assert drawn.basis == "measured" and len(drawn.buckets) == 4
    assert drawn.exposed_s == pytest.approx(1.5e-3) and drawn.compute_end_s == pytest.approx(24e-3)
    assert "measured" in drawn.figure().text()
    with pytest.raises(ValueError, match="3 backward passes .* no iteration 3"):
        timeline(table, 3)
    both = write(tmp_path / "two", [gpu_trace(r, 2, healthy(2)) for r in (0, 1)])
    two = analyze_trace(both).buckets
    with pytest.raises(ValueError, match="ranks 0, 1: say which"):
        timeline(two)
    assert timeline(two, rank=1).exposed_s == pytest.approx(1.5e-3)


TRACES = {"ddp_2xA100_rank0": ("resnet50", 4), "resnet_8xMI300X_rank0": ("resnet18", 2)}


@pytest.mark.parametrize("name", TRACES)
def test_real_traces_hold_the_models_gradients(root, name):
    """Real jobs, NCCL and RCCL: the buckets of each step hold every parameter once."""
    model, element = TRACES[name]
    table = analyze_trace(root / "labs" / "data" / "traces" / name).buckets
    profile = dl.assumed_profile(model)
    elements = sum(g.elements for g in profile.gradients)
    each = table.groupby("iteration").message_bytes.sum()
    assert len(each) == 3 and (each == elements * element).all()
    assert (table.wait_us >= 0).all() and (table.ready_us <= table.backward_us).all()
    first = table[table.bucket == 0]
    assert (first.ready_us < first.backward_us / 5).all()  # it left long before backward ended


def test_torchs_buckets_in_a_real_trace_are_the_predicted_ones(root):
    table = analyze_trace(root / "labs" / "data" / "traces" / "ddp_2xA100_rank0").buckets
    predicted = [b.nbytes for b in dl.predict_step(dl.assumed_profile("resnet50"), iteration=1).buckets]
    for _, mine in table.groupby("iteration"):
        assert list(mine.message_bytes) == predicted

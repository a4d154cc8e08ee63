"""Faults planted in synthetic jobs: who was late, by how much, why, and who waited; and the report's outer forms."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

import ddplab as dl
from ddplab.trace import intervals as iv

RANKS, STEPS, TRANSFER_US, COMPUTE_US = 4, 3, 100.0, 400.0


def rank_trace(rank: int, late: dict[tuple[int, int], tuple[str, float]], clock_us: float = 0.0, ranks: int = RANKS):
    """A rank of a job of STEPS steps: compute, then an all-reduce that is over TRANSFER_US after the last rank came.

    late: (rank, step) -> (what was longer: "compute", "input" or "host", by how many us).
    """
    events, end = [], 1000.0
    for step in range(STEPS):
        arrive = {}
        for r in range(ranks):
            arrive[r] = end + 50 + COMPUTE_US + late.get((r, step), ("", 0.0))[1]
        why, more = late.get((rank, step), ("", 0.0))
        begin = end + 50 + (more if why != "compute" else 0)
        compute = COMPUTE_US + (more if why == "compute" else 0)
        done = max(arrive.values()) + TRANSFER_US
        start_cpu = end + clock_us
        if why == "input":
            name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            events.append(("user_annotation", name, 1, start_cpu + 5, more, {}))
        events.append(("cuda_runtime", "cudaLaunchKernel", 1, start_cpu + 10, 3, {"correlation": 2 * step + 1}))
        events.append(("cuda_runtime", "cudaLaunchKernel", 1, start_cpu + 15, 3, {"correlation": 2 * step + 2}))
        events.append(("kernel", "gemm", 7, begin + clock_us, compute, {"correlation": 2 * step + 1}))
        message = {
            "Collective name": "allreduce",
            "In msg nelems": 250_000,
            "Out msg nelems": 250_000,
            "dtype": "Float",
        }
        message |= {"Group size": ranks, "Process Group Name": "0", "correlation": 2 * step + 2}
        wait = done - arrive[rank]
        events.append(
            ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 20, arrive[rank] + clock_us, wait, message)
        )
        events.append(("user_annotation", f"ProfilerStep#{step}", 1, start_cpu, done - end, {}))
        end = done
    rows = [
        {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 0 if cat == "kernel" else 99,
            "tid": tid,
            "ts": ts,
            "dur": dur,
            "args": args,
        }
        for cat, name, tid, ts, dur, args in events
    ]
    return {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks}, "traceEvents": rows}


def job(folder, late, clocks=None, drop=()):
    for rank in range(RANKS):
        document = rank_trace(rank, late, (clocks or {}).get(rank, 0.0))
        if rank in drop:  # this rank's window begins later: its first all-reduce is not in the trace
            document["traceEvents"] = [e for e in document["traceEvents"] if e["ts"] > 1600 or e["name"] == "gemm"]
        (folder / f"rank{rank}.json").write_text(json.dumps(document))
    return dl.analyze_trace(folder)


@pytest.mark.parametrize("why", ["compute", "input", "host"])
def test_the_late_rank_its_step_its_lag_and_its_cause(tmp_path, why):
    report = job(tmp_path, {(2, 1): (why, 250.0)})
    worst = report.stragglers.iloc[0]
    assert (worst["rank"], worst["worst_step"], worst["cause"], worst["held_up"] >= 1) == (2, 1, why, True)
    assert worst["lag_us"] == worst["worst_us"] == pytest.approx(250.0, abs=1e-6)
    assert worst["caused_us"] == pytest.approx(3 * 250.0, abs=1e-6)  # three ranks waited
    assert report.stragglers["lag_us"].tolist()[1:] == [0.0, 0.0, 0.0]
    [held] = report.holdups[report.holdups["step"] == 1].to_dict("records")
    assert (held["collective"], held["message_bytes"], held["last_rank"], held["cause"]) == (
        "all_reduce",
        1_000_000,
        2,
        why,
    )
    assert (held["late_us"], held["waited_us"]) == (pytest.approx(250.0), pytest.approx(750.0))
    by_step = report.lateness.set_index(["step", "rank"])["lag_us"]
    assert by_step[1, 2] == pytest.approx(250.0) and by_step.drop((1, 2)).max() == 0
    assert (report.steps["input_ns"].to_numpy() > 0).sum() == (1 if why == "input" else 0)


def test_bandwidth_and_waiting_do_not_mix(tmp_path):
    report = job(tmp_path, {(0, 0): ("host", 900.0), (3, 2): ("host", 500.0)})
    [row] = report.collectives.to_dict("records")
    assert (row["count"], row["ranks"], row["group_size"], row["dtype"]) == (3, 4, 4, "float32")
    assert row["transfer_us"] == pytest.approx(TRANSFER_US)
    assert row["algbw_GBps"] == pytest.approx(1e6 / TRANSFER_US / 1e3)
    assert row["busbw_GBps"] == pytest.approx(1e6 / TRANSFER_US / 1e3 * 2 * 3 / 4)
    assert row["wait_us"] == pytest.approx(3 / 4 * (900 + 500))
    assert row["total_us"] == pytest.approx(3 * TRANSFER_US + row["wait_us"])
    waits = report.waits
    assert (waits["transfer_us"] + waits["wait_us"]).sum() / RANKS == pytest.approx(row["total_us"])
    assert waits[waits["last"]]["rank"].tolist().count(0) >= 1


def test_a_clock_that_is_ahead_makes_no_straggler(tmp_path):
    report = job(tmp_path, {(1, 1): ("host", 250.0)}, clocks={3: 7000.0})
    assert report.stragglers["rank"].iloc[0] == 1
    assert report.stragglers["lag_us"].max() == pytest.approx(250.0, abs=0.01)
    assert any("clocks differ" in note and "rank 3 +7.000 ms" in note for note in report.notes)


def test_windows_cut_differently_are_matched_by_their_ends(tmp_path):
    report = job(tmp_path, {(2, 1): ("host", 250.0)}, drop=(1,))
    assert any("different numbers of all_reduce" in note for note in report.notes)
    assert report.stragglers["rank"].iloc[0] == 2
    assert report.stragglers["lag_us"].iloc[0] == pytest.approx(250.0)
    peers = report.operations.groupby("number")["peers"].first()
    assert peers.tolist() == [3, 4, 4]


def test_gloos_two_threads_may_begin_in_another_order_on_another_rank(tmp_path):
    """Two steps with a large and a small bucket; on rank 1 the small one of the second step begins first."""
    begins = {0: [(0, 4000), (1, 1000), (100, 4000), (101, 1000)], 1: [(0, 4000), (1, 1000), (101, 4000), (100, 1000)]}
    for rank, calls in begins.items():
        events = [
            {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 0, "tid": 20 + n, "ts": ts,
             "dur": 50, "args": {"Input Dims": [[n]], "Input type": ["float"]}}
            for ts, n in calls
        ]  # fmt: skip
        document = {"distributedInfo": {"rank": rank, "world_size": 2, "backend": "gloo"}, "traceEvents": events}
        (tmp_path / f"r{rank}.json").write_text(json.dumps(document))
    report = dl.analyze_trace(tmp_path)
    found = report.collectives[["message_bytes", "count", "ranks"]].to_dict("records")
    assert sorted(found, key=lambda row: row["message_bytes"]) == [
        {"message_bytes": 4 * n, "count": 2, "ranks": 2} for n in (1000, 4000)
    ]
    assert report.operations["peers"].tolist() == [2] * 8


def test_point_to_point_has_no_common_end(tmp_path):
    for rank in range(2):
        kernel = {
            "ph": "X",
            "cat": "kernel",
            "pid": 0,
            "tid": 20,
            "name": "ncclDevKernel_SendRecv(x)",
            "ts": 10 * rank,
            "dur": 5,
        }
        kernel["args"] = {
            "Collective name": ("send", "recv")[rank],
            "In msg nelems": 1000,
            "dtype": "Half",
            "Group size": 2,
        }
        document = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": [kernel]}
        (tmp_path / f"r{rank}.json").write_text(json.dumps(document))
    report = dl.analyze_trace(tmp_path)
    assert len(report.stragglers) == len(report.waits) == 0
    assert report.collectives["collective"].tolist() == ["send", "recv"]
    assert report.collectives["busbw_GBps"].tolist() == pytest.approx([2000 / 5e-6 / 1e9] * 2)
    assert report.collectives["wait_us"].tolist() == [None, None]


def test_message_sizes_are_counted_as_nccl_tests_counts_them(tmp_path):
    rows = [
        ("_allgather_base", 1000, 4000, 4000 * 4, 3 / 4),
        ("_reduce_scatter_base", 4000, 1000, 4000 * 4, 3 / 4),
        ("all_to_all", 4000, 4000, 4000 * 4, 3 / 4),
        ("broadcast", 1000, 1000, 1000 * 4, 1),
        ("allreduce", 1000, 1000, 1000 * 4, 6 / 4),
    ]
    events = [
        {
            "ph": "X", "cat": "kernel", "name": "ncclDevKernel_Generic(x)", "pid": 0, "tid": 20, "ts": 100 * i,
            "dur": 10,
            "args": {"Collective name": name, "In msg nelems": n, "Out msg nelems": out, "Group size": 4,
                     "dtype": "Float"},
        }
        for i, (name, n, out, _, _) in enumerate(rows)
    ]  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps(events))
    table = dl.analyze_trace(path).collectives
    assert table["message_bytes"].tolist() == [size for *_, size, _ in rows]
    assert table["busbw_GBps"].tolist() == pytest.approx([size / 10e-6 / 1e9 * factor for *_, size, factor in rows])


# ---------------------------------------------------------------- outer forms


def test_json_csv_and_text_say_the_same(tmp_path):
    report = job(tmp_path, {(2, 1): ("compute", 250.0)})
    found = json.loads(report.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert found["ranks"] == [0, 1, 2, 3]
    assert found["stragglers"][0]["rank"] == 2 and found["stragglers"][0]["cause"] == "compute"
    paths = report.to_csv(tmp_path / "new" / "tables")
    assert {path.stem for path in paths} >= {
        "breakdown",
        "overlap",
        "steps",
        "collectives",
        "stragglers",
        "holdups",
        "waits",
    }
    table = pd.read_csv(tmp_path / "new" / "tables" / "breakdown.csv")
    assert table["span_ns"].tolist() == report.breakdown["span_ns"].tolist()
    text = str(report)
    for word in ("Where the time went", "Steps", "Collectives", "Stragglers", "all_reduce", "compute"):
        assert word in text
    assert len(repr(report)) < 400


# ---------------------------------------------------------------- sets of time


def test_interval_arithmetic_against_counting_every_nanosecond():
    rng = np.random.default_rng(3)
    for _ in range(200):
        sets = []
        for _ in range(2):
            starts = rng.integers(0, 60, rng.integers(0, 12))
            sets.append((starts, starts + rng.integers(0, 9, len(starts))))
        covered = [{t for s, e in zip(*one, strict=True) for t in range(s, e)} for one in sets]
        a, b = (iv.union(*one) for one in sets)
        for got, want in (
            (a, covered[0]),
            (iv.intersect(a, b), covered[0] & covered[1]),
            (iv.subtract(a, b), covered[0] - covered[1]),
            (iv.join(a, b), covered[0] | covered[1]),
        ):
            assert iv.measure(got) == len(want)
            assert {t for s, e in zip(*got, strict=True) for t in range(s, e)} == want
            assert (got[0][1:] > got[1][:-1]).all() and (got[1] > got[0]).all()
        low, high = np.sort(rng.integers(-5, 75, (2, 9)), axis=0)
        assert iv.within(a, low, high).tolist() == [
            sum(x <= t < y for t in covered[0]) for x, y in zip(low, high, strict=True)
        ]

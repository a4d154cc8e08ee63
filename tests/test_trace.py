"""Trace analysis against numbers that others computed: recorded jobs, and small traces worked out by hand."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

import ddplab as dl
from ddplab.trace import read_trace
from ddplab.trace.kernels import collective

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "labs" / "data" / "traces"
SAMPLES = Path(__file__).parent / "data" / "trace"
FOLDERS = ("dlrm_8xV100", "ddp_2xA100_rank0", "resnet_8xMI300X_rank0")
FILES = [(folder, file) for folder in FOLDERS for file in sorted((TRACES / folder).glob("*.json.gz"))]
named_files = pytest.mark.parametrize("folder, file", FILES, ids=lambda value: getattr(value, "name", value)[:12])


def expected(name: str, delimiter: str = ",") -> list[dict[str, str]]:
    """A table of the independent script that the traces came with."""
    with open(SAMPLES / "expected" / name, newline="") as rows:
        return list(csv.DictReader(rows, delimiter=delimiter))


def check_breakdown(report: dl.TraceReport, folder: str) -> None:
    """Times within 0.1 us, overlap within 0.01 points; its `comp` counts what ran beside communication too."""
    want = {int(row["rank"]): row for row in expected(f"{folder}.tsv", "\t")}
    for row, over in zip(report.breakdown.to_dict("records"), report.overlap.to_dict("records"), strict=True):
        known = want[row["rank"]]
        hidden = row["overlapped_ns"]
        got = {
            "span": row["span_ns"],
            "idle": row["idle_ns"],
            "comp": row["compute_only_ns"] + hidden,
            "comm": row["exposed_comm_ns"] + hidden,
            "comm_and_comp": hidden,
            "exposed_comm": row["exposed_comm_ns"],
            "mem_only": row["memory_only_ns"],
        }
        assert {k: v / 1e3 for k, v in got.items()} == pytest.approx({k: float(known[k]) for k in got}, abs=0.1, rel=0)
        assert over["overlap_pct"] == pytest.approx(float(known["overlap_pct"]), abs=0.01)
        parts = ["compute_only_ns", "overlapped_ns", "exposed_comm_ns", "memory_only_ns", "idle_ns"]
        assert sum(row[part] for part in parts) == row["span_ns"]


# ---------------------------------------------------------------- recorded jobs


@named_files
def test_a_rank_alone_gives_the_numbers_of_the_independent_script(folder, file):
    report = dl.analyze_trace(file)
    check_breakdown(report, folder)
    rank = report.ranks[0]
    name = f"collectives_{folder}_rank{rank}.csv" if folder.startswith("dlrm") else f"collectives_{folder}.csv"
    found = report.collectives.to_dict("records")
    want = expected(name)
    assert len(found) == len(want)
    for known in want:  # both name a row by what is unique in it
        size = int(known["bytes"]) if known["bytes"] else None
        [row] = [row for row in found if row["message_bytes"] == size]
        assert row["collective"] == (collective(known["collective"]) if size is not None else "unknown")
        assert row["group_size"] == (int(known["group_size"]) if size is not None else None)
        assert row["count"] == int(known["count"])
        assert row["source"] == {"kernel-args": "kernel", "name-only": "name"}.get(known["source"], known["source"])
        for column in ("total_us", "median_us"):
            assert row[column] == pytest.approx(float(known[column]), abs=0.1)
        for column in ("algbw_GBps", "busbw_GBps"):
            assert row[column] == (pytest.approx(float(known[column]), abs=6e-4) if known[column] else None)
        assert row["wait_us"] is None  # one rank: nothing tells waiting from transfer


def test_dlrm_stragglers_and_last_arrivers():
    report = dl.analyze_trace(TRACES / "dlrm_8xV100")
    check_breakdown(report, "dlrm_8xV100")
    lag = dict(zip(report.stragglers["rank"], report.stragglers["lag_us"], strict=True))
    assert lag == {7: 9710, 2: 7964, 6: 7902, 0: 5664, 5: 5203, 4: 4874, 3: 1673, 1: 119}
    assert list(lag) == [7, 2, 6, 0, 5, 4, 3, 1]  # the latest first
    assert report.holdups["last_rank"].tolist() == [7, 7, 7, 7, 7, 5, 5, 4]
    assert report.holdups["step"].tolist() == [10] * 8
    held = dict(zip(report.stragglers["rank"], report.stragglers["held_up"], strict=True))
    assert held == {7: 5, 5: 2, 4: 1, 0: 0, 1: 0, 2: 0, 3: 0, 6: 0}


def test_waiting_is_split_from_transfer_and_bandwidth_counts_the_fastest_rank():
    report = dl.analyze_trace(TRACES / "dlrm_8xV100")
    [row] = report.collectives[report.collectives["message_bytes"] == 4 * 394241].to_dict("records")
    assert row["transfer_us"] == 86
    assert row["busbw_GBps"] == pytest.approx(4 * 394241 / 86e-6 / 1e9 * 2 * 7 / 8)
    waits = report.waits[report.waits["message_bytes"] == 4 * 394241]
    waits = dict(zip(waits["rank"], waits["wait_us"], strict=True))
    assert waits == {0: 160, 1: 221, 2: 112, 3: 205, 4: 9, 5: 10, 6: 127, 7: 0}
    assert row["wait_us"] == pytest.approx(sum(waits.values()) / 8)


def test_steps_are_the_annotated_ones_and_partition_the_job():
    for folder, steps in (("ddp_2xA100_rank0", [4, 5, 6]), ("resnet_8xMI300X_rank0", [15, 16, 17])):
        report = dl.analyze_trace(TRACES / folder)
        table = report.steps
        assert table["step"].tolist() == steps
        assert (
            table["start_ns"].iloc[1:].to_numpy() == (table["start_ns"] + table["span_ns"]).iloc[:-1].to_numpy()
        ).all()
        assert (table["exposed_pct"] == 100 * table["exposed_comm_ns"] / table["span_ns"]).all()
        assert table["exposed_comm_ns"].sum() <= report.breakdown["exposed_comm_ns"][0]


def test_buckets_of_a_step_belong_to_the_step_that_launched_them():
    """The GPU lags: two of the three steps' last all-reduces run after the next step has begun on the CPU."""
    every = dl.analyze_trace(TRACES / "resnet_8xMI300X_rank0").operations
    counts = every.groupby(every["step"].astype(object).fillna("before"), sort=False).size()
    assert counts.to_dict() == {"before": 5, 15: 4, 16: 4, 17: 4}


# ---------------------------------------------------------------- the same trace, written differently


def _layouts(document: dict):
    """The trace as other writers leave it."""
    events = {"traceEvents": document["traceEvents"]}
    head = {key: value for key, value in document.items() if key != "traceEvents"}
    last = events | head
    yield "minified", json.dumps(document, separators=(",", ":"))
    yield "one line", json.dumps(document)
    yield "indent 2", json.dumps(document, indent=2)
    yield "indent 4, distributedInfo last", json.dumps(last, indent=4)
    yield "minified, distributedInfo last", json.dumps(last, separators=(",", ":"))
    yield "tabs", json.dumps(document, indent="\t")
    yield "byte order mark", "\ufeff" + json.dumps(document)
    yield "bare list", json.dumps(document["traceEvents"])
    yield "bare list, one event a line", "[\n" + ",\n".join(map(json.dumps, document["traceEvents"])) + "\n]"
    yield "list without an end", "[\n" + ",\n".join(map(json.dumps, document["traceEvents"])) + ",\n"
    yield "carriage returns", json.dumps(document, indent=1).replace("\n", "\r\n")
    words = [{**event, "pid": str(event.get("pid")), "tid": str(event.get("tid"))} for event in document["traceEvents"]]
    yield "pid and tid as text", json.dumps({**head, "traceEvents": words}, indent=1)
    old = {
        "kernel": "Kernel",
        "cpu_op": "Operator",
        "cuda_runtime": "Runtime",
        "gpu_memcpy": "Memcpy",
        "gpu_memset": "Memset",
    }
    then = [{**event, "cat": old.get(event.get("cat"), event.get("cat"))} for event in document["traceEvents"]]
    yield "categories of 2021", json.dumps({**head, "traceEvents": then}, indent=1)


@pytest.mark.parametrize("folder, file", [FILES[0], FILES[-2]], ids=["dlrm", "ddp"])
def test_a_trace_reads_the_same_however_it_is_written(folder, file, tmp_path):
    document = json.loads(gzip.decompress(file.read_bytes()))
    if folder.startswith("ddp"):
        document["traceEvents"] = (
            document["traceEvents"][:3000] + document["traceEvents"][-9000:]
        )  # the kernels are last
    native = tmp_path / "native.json"
    native.write_text(json.dumps(document, indent=1))
    want = dl.analyze_trace(native)
    for layout, text in _layouts(document):
        if folder.startswith("ddp") and layout not in ("minified", "indent 4, distributedInfo last", "bare list"):
            continue
        path = tmp_path / "other.json"
        path.write_text(text, "utf8")
        if layout == "minified":
            path = tmp_path / "other.json.gz"
            path.write_bytes(gzip.compress(text.encode(), 1))
        got = dl.analyze_trace(path)
        bare = layout.startswith(("bare", "list"))  # knows neither rank nor the size of the world
        assert got.ranks == ([None] if bare else want.ranks), layout
        for name in ("breakdown", "steps", "overlap"):
            drop = [c for c in ("rank", "file", "start_ns") if c in getattr(want, name)]
            assert getattr(got, name).drop(columns=drop).equals(getattr(want, name).drop(columns=drop)), (layout, name)
        times = ["count", "total_us", "median_us", "p99_us", "dtype", "message_bytes"]
        columns = times if bare else list(want.collectives)
        assert got.collectives[columns].equals(want.collectives[columns]), layout


def test_nanoseconds_survive(tmp_path):
    """The doubles of a trace hold 16 digits: microseconds of today's clock and three decimals are more than that."""
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}
    path = tmp_path / "t.json"
    starts = ["5097465872853.605", "5097465872853.606", "1694128201428006"]
    rows = ",".join(json.dumps(event)[:-1] + f', "ts": {ts}, "dur": 1.001}}' for ts in starts)
    path.write_text(f'{{"baseTimeNanoseconds": 1767189312000000123, "traceEvents": [{rows}]}}')
    starts_ns = read_trace(path).gpu.start_ns.tolist()
    assert starts_ns == [1767189312000000123 + ns for ns in (5097465872853605, 5097465872853606, 1694128201428006000)]
    assert (read_trace(path).gpu.end_ns - read_trace(path).gpu.start_ns).tolist() == [1001] * 3


def test_nanoseconds_survive_since_1970_too(tmp_path):
    """In early 2024 times were since 1970 and had three decimals: a double keeps two of four such kernels apart."""
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}
    path = tmp_path / "t.json"
    starts = ["1708128201428006.001", "1708128201428006.123", "1708128201428006.247", "1708128201428007"]
    path.write_text("[" + ",".join(json.dumps(event)[:-1] + f', "ts": {ts}, "dur": 0.1}}' for ts in starts) + "]")
    got = read_trace(path).gpu
    assert got.start_ns.tolist() == [1708128201428006001, 1708128201428006123, 1708128201428006247, 1708128201428007000]
    assert (got.end_ns - got.start_ns).tolist() == [100] * 4


# ---------------------------------------------------------------- small traces worked out by hand


def test_overlap_counts_each_microsecond_once():
    for sample in ("trace_overlap.json", "trace_overlap_dup_annotation.json"):
        report = dl.analyze_trace(SAMPLES / sample)
        assert report.overlap.to_dict("records") == [
            {"rank": 1, "comm_ns": 80_000, "overlapped_ns": 50_000, "exposed_comm_ns": 30_000, "overlap_pct": 62.5}
        ]
        assert report.collectives["count"].tolist() == [1]


@pytest.mark.parametrize(
    "name, operation",
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce"),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32(ncclSymkDevWorkArgs4K)", "all_reduce"),
        ("ncclSymDevKernel_AllGather_LL(ncclSymDevArgs)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
    ],
)
def test_kernels_of_every_nccl_are_communication(name, operation, tmp_path):
    document = json.loads((SAMPLES / "trace_overlap.json").read_text())
    document["traceEvents"][1]["name"] = name
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    report = dl.analyze_trace(path)
    assert report.overlap["comm_ns"].tolist() == [80_000]
    assert report.collectives["collective"].tolist() == [operation]
    document["traceEvents"][1]["args"]["Collective name"] = "_reduce_scatter_base"  # arguments outrank the name
    path.write_text(json.dumps(document))
    assert dl.analyze_trace(path).collectives["collective"].tolist() == ["reduce_scatter"]


def test_own_communication_kernels_count_once_they_are_named(tmp_path):
    document = json.loads((SAMPLES / "trace_overlap.json").read_text())
    document["traceEvents"][1]["name"] = "void dpsk::ep::internode::dispatch<true>(int4*, float*)"
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    assert dl.analyze_trace(path).overlap["overlap_pct"].tolist() == [None]
    assert dl.analyze_trace(path, comm=r"dispatch|combine").overlap["overlap_pct"].tolist() == [62.5]
    with pytest.raises(ValueError, match="no regular expression"):
        dl.analyze_trace(path, comm="(")


def test_gloo_on_a_cpu():
    report = dl.analyze_trace(SAMPLES / "trace_gloo_cpu.json")
    [row] = report.overlap.to_dict("records")
    assert (row["comm_ns"], row["overlapped_ns"], row["overlap_pct"]) == (500_000, 350_000, 70.0)
    [row] = report.collectives.to_dict("records")
    assert (row["collective"], row["dtype"], row["message_bytes"], row["group_size"]) == (
        "all_reduce",
        "float32",
        4 * 65792,
        2,
    )
    assert row["busbw_GBps"] == pytest.approx(4 * 65792 / 500e-6 / 1e9)  # 2 ranks: the factor is 1


def test_without_communication_overlap_is_none():
    report = dl.analyze_trace(SAMPLES / "trace_no_comm.json")
    assert report.overlap["overlap_pct"].tolist() == [None]
    assert len(report.collectives) == len(report.stragglers) == len(report.waits) == 0
    assert "no communication" in str(report)
    assert json.loads(report.to_json())["overlap"][0]["overlap_pct"] is None


def test_rank_is_unknown_without_distributed_info():
    report = dl.analyze_trace(SAMPLES / "trace_array_unterminated.json")
    assert report.ranks == [None] and report.breakdown["rank"].tolist() == [None]
    assert report.overlap["overlap_pct"].tolist() == [62.5]
    assert any("rank" in note for note in report.notes)

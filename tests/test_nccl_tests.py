"""nccl-tests: text of all versions, JSON, launchers' labels, what is wrong and what was not checked."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pandas as pd
import pytest
from damage import for_seeds, mangled

from ddplab.nccl import parse_nccl_tests

DATA = Path(__file__).parent / "data" / "nccl"
TEXTS = {path.stem.removeprefix("nccl_tests_"): path.read_text() for path in sorted(DATA.glob("nccl_tests_*.txt"))}
JSON = (DATA / "nccl_tests.json").read_text()
ROW = TEXTS["stamp"].splitlines()[-1].rsplit("  ", 1)[0]
FIRST = {"size_B": 1048576, "count": 262144, "type": "float", "redop": "sum", "root": -1}
FIRST |= {
    "time_us": 42.5,
    "algbw_GBps": 24.67,
    "busbw_GBps": 37.01,
    "inplace_time_us": 41.9,
    "inplace_busbw_GBps": 37.54,
}


def only(text: str) -> dict:
    """The one row of a table."""
    (row,) = parse_nccl_tests(text + "\n").table.to_dict("records")
    return row


def has(row: dict, **expected: object) -> bool:
    return {key: row[key] for key in expected} == expected


def test_four_gpus():
    seen = parse_nccl_tests(DATA / "nccl_tests_4gpu.txt")
    assert len(seen.table) == 3 and seen.ranks == 4 and seen.collective == "all_reduce_perf"
    assert has(seen.table.to_dict("records")[0], **FIRST, wrong=0, inplace_wrong=0)
    assert seen.version == "2.19.6" and seen.settings["warmup iters"] == 1 and seen.settings["maxBytes"] == 2**30
    assert (seen.ok, seen.out_of_bounds, seen.average_busbw_GBps) == (True, 0, 190.414)
    both = seen.table[["busbw_GBps", "inplace_busbw_GBps"]].to_numpy()
    assert both.mean() == pytest.approx(190.414, abs=5e-3)  # the rows are rounded to 0.01
    assert (seen.table["busbw_GBps"] / seen.table["algbw_GBps"]).to_numpy() == pytest.approx(2 * 3 / 4, rel=1e-3)
    assert seen.devices.iloc[3][["rank", "host", "device", "bus_id", "name"]].tolist() == [
        3,
        "node-a",
        3,
        "0000:4b:00",
        "NVIDIA H100 80GB HBM3",
    ]
    assert seen.warnings == [] and "4 ranks, results right" in str(seen)


def test_unchecked_is_not_right():
    seen = parse_nccl_tests(TEXTS["unchecked"])
    assert seen.ok is None and seen.table[["wrong", "inplace_wrong"]].isna().all(axis=None)
    assert "results not checked" in str(seen)


def test_wrong_results():
    seen = parse_nccl_tests(TEXTS["wrong"])
    assert has(only(TEXTS["wrong"]), wrong=3, inplace_wrong=3)
    assert (seen.ok, seen.out_of_bounds) == (False, 2)
    assert "results WRONG" in str(seen)


@pytest.mark.parametrize("name", ["mixed", "stamp"])
def test_other_lines_and_time_stamps_change_nothing(name):
    assert has(only(TEXTS[name]), **FIRST)


def test_a_root():
    row = only(TEXTS["root"])
    assert has(row, root=0, redop="none") and row["busbw_GBps"] == row["algbw_GBps"]


def test_started_without_mpi():
    seen = parse_nccl_tests(TEXTS["not_mpi"])
    assert seen.ranks == 1 and list(seen.table["run"]) == [0, 1]
    (warning,) = seen.warnings
    assert warning.startswith("2 separate runs of 1 rank") and "MPI=1" in warning


@pytest.mark.parametrize(
    ("row", "expected"),
    [  # up to 2.11: all_reduce has no root, broadcast no reduction, all_gather neither; the last column is a difference
        ("1024 256 float sum 5.1 0.20 0.30 5e-07 5.2 0.20 0.30 0e+00", {"redop": "sum", "root": None, "error": 5e-07}),
        ("1024 256 float 0 5.1 0.20 0.20 0e+00 5.2 0.20 0.20 0e+00", {"redop": None, "root": 0, "error": 0.0}),
        ("1024 256 float 5.1 0.20 0.15 0e+00 5.2 0.20 0.15 0e+00", {"redop": None, "root": None, "error": 0.0}),
    ],
)
def test_the_columns_of_2_11(row, expected):
    header = (
        "#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error\n"
    )
    row = only(header + row)
    assert {key: None if pd.isna(row[key]) else row[key] for key in expected} == expected
    assert pd.isna(row["wrong"]) and row["time_us"] == 5.1


def test_numbers_that_grew_out_of_their_column():
    row = only(
        "  17179869184    4294967296  float  sum  -1  9.9e+07  209.72  314.5  1e+06   123457     210     315     0"
    )
    assert has(row, time_us=9.9e7, wrong=1_000_000, inplace_time_us=123457.0, inplace_busbw_GBps=315.0)


def test_per_iteration_columns_and_cpu_time():
    side = "cputime algbw busbw #wrong i_min i_max i_p99 i_cv%"
    header = f"# size count type redop root {side} {side}\n"
    text = header + "8 2 float sum -1 5.0 0.1 0.2 0 4.0 7.0 6.9 3.5 5.1 0.1 0.2 N/A 4.1 7.1 7.0 3.6\n"
    assert has(
        only(text), min_us=4.0, max_us=7.0, p99_us=6.9, cv_pct=3.5, inplace_min_us=4.1, inplace_cv_pct=3.6, wrong=0
    )
    assert parse_nccl_tests(text).cpu_time


def test_a_replay_has_the_second_placement_only():
    row = only("1024 256 float sum -1                                    5.0    0.20    0.30       0\n")
    assert math.isnan(row["time_us"]) and pd.isna(row["wrong"]) and has(row, inplace_time_us=5.0, inplace_wrong=0)


@pytest.mark.parametrize(
    "label", ["[1,0]<stdout>:", "0: ", "  3: ", "[1,0]<stdout>: ", "n1: ", "w-0  | ", "2026-05-05T06:16:47.1Z "]
)
def test_labels_of_launchers(label):
    labelled = "".join(f"{label}{line}\n" for line in TEXTS["4gpu"].splitlines())
    pd.testing.assert_frame_equal(parse_nccl_tests(labelled).table, parse_nccl_tests(TEXTS["4gpu"]).table)
    assert parse_nccl_tests(labelled).ranks == 4
    assert has(only(ROW[:40] + "[1,0]<stdout>:" + ROW[40:]), **FIRST)


def test_a_log_line_in_the_middle_of_a_row():
    log = "node-a:4100:4131 [1] NCCL INFO AllReduce: opCount 0 sendbuff 0x7f count 262144 datatype 7\n"
    cut = ROW.index("-1") + 2
    assert has(only(f"{ROW[:cut]}{log}{log}{ROW[cut:]}\n"), **FIRST)


def test_a_list_of_devices_that_was_cut_and_old_device_lines():
    old = (
        "#   Rank  0 Pid 1821213 on AI-A100-01 device  0 [0x00] NVIDIA A100-SXM4-40GB\n#  Rank 1 Group  0 Pid   18...\n"
    )
    seen = parse_nccl_tests(old + ROW)
    assert seen.devices[["rank", "host", "bus_id"]].values.tolist() == [[0, "AI-A100-01", "0x00"]]


def test_json():
    seen = parse_nccl_tests(DATA / "nccl_tests.json")
    row = only(JSON)
    assert has(row, size_B=1048576, root=-1, time_us=42.5, algbw_GBps=24.672376, wrong=0)
    assert math.isnan(row["inplace_busbw_GBps"]) and pd.isna(row["inplace_wrong"])
    assert (seen.ranks, seen.ok, seen.out_of_bounds, seen.average_busbw_GBps) == (4, True, 0, 37.273542)
    assert seen.devices["host"].tolist() == ["node-a"] * 4


def test_json_as_version_3_writes_it():
    """Truth values are text, devices lie in "config", infinity is no JSON, a process lists its first GPU only."""
    devices = [
        {"rank": rank, "group": 0, "pid": 7, "hostname": "n", "device": 0, "device_hex": "0x1"} for rank in (0, 4)
    ]
    side = {"cpu_time": 5.0, "alg_bw": 1.0, "bus_bw": 1.5, "nwrong": 2.0}
    result = {
        "size": 8,
        "count": 2,
        "type": "float",
        "redop": "sum",
        "root": "    -1",
        "out_of_place": None,
        "in_place": side,
    }
    data = {"args": ["./build/all_reduce_perf", "-g", "4"], "config": {"nthreads": 1, "ngpus": 4, "devices": devices}}
    data |= {"results": [result], "out_of_bounds": {"count": 1, "okay": "false"}}
    data |= {"average_bus_bandwidth": {"bandwidth": 1.5, "okay": "unchecked"}}
    seen = parse_nccl_tests(json.dumps(data).replace("1.0,", "inf,"))
    assert (seen.ranks, seen.ok, seen.collective, seen.cpu_time) == (8, False, "all_reduce_perf", True)
    row = seen.table.to_dict("records")[0]
    assert row["inplace_algbw_GBps"] == math.inf and row["inplace_wrong"] == 2 and math.isnan(row["time_us"])


def test_what_is_no_result():
    header = "".join(f"{line}\n" for line in TEXTS["4gpu"].splitlines() if line.startswith("#"))
    for text in ("", "\n", header, "hello\nworld\n"):
        with pytest.raises(ValueError, match="no data rows"):
            parse_nccl_tests(text)
    with pytest.raises(ValueError, match="broken JSON at line .* the run ended early"):
        parse_nccl_tests(JSON[: len(JSON) // 2].rstrip())
    with pytest.raises(ValueError, match='no list "results"'):
        parse_nccl_tests("{}")
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_nccl_tests('{"a":' + "[" * 100_000)
    with pytest.raises(FileNotFoundError, match="there is no file results.txt"):
        parse_nccl_tests("results.txt")


def read_or_refuse(text: str) -> str:
    try:
        seen = parse_nccl_tests(text + "\n")
    except ValueError as error:
        assert "no data rows" in str(error) or "JSON" in str(error), error
    else:
        assert len(seen.rows) and isinstance(str(seen), str)
        if len(text) % 20 == 0:
            assert len(seen.table) == len(seen.rows) and len(seen.devices) == len(seen.listed)
    return text


def test_mangled_text_gives_a_table_or_a_sentence():
    for_seeds(lambda seed: read_or_refuse(mangled(random.Random(seed), random.Random(seed).choice([*TEXTS.values()]))))


def test_mangled_json_gives_a_table_or_a_sentence():
    for_seeds(lambda seed: read_or_refuse(mangled(random.Random(seed), JSON)))

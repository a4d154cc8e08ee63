"""NCCL Inspector's logs, as its source writes them, in the format of NCCL 2.30 (4.0) and the newer one with markers."""

from __future__ import annotations

import gzip
import json
import math
import random

import pandas as pd
import pytest
from damage import for_seeds, mangled_bytes

from ddplab.inspector import COLUMNS, InspectorError, _Reader, is_inspector, read_inspector

META = {"inspector_output_format_version": "v4.0", "git_rev": "abc", "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": 1748030377748202, "hostname": "node1", "pid": 163}  # fmt: skip


def header(rank, ranks=8, comm="0x7f8c"):
    return {"id": comm, "comm_name": "default_pg", "rank": rank, "n_ranks": ranks, "nnodes": 1}


def coll(name="AllReduce", sn=1, size=17179869184, us=61974, ranks=8, **extra):
    """Bandwidths as inspectorComputeOpBw has them: gathers and scatters count n_ranks times the message."""
    traffic = size * (ranks if name in ("AllGather", "ReduceScatter") else 1)
    factor = {"AllReduce": 2 * (ranks - 1) / ranks, "AllGather": (ranks - 1) / ranks,
              "ReduceScatter": (ranks - 1) / ranks, "Broadcast": 1, "AlltoAll": 0}[name]  # fmt: skip
    algbw = traffic / 1e9 / (us / 1e6) if name != "AlltoAll" else 0
    return {"coll": name, "coll_sn": sn, "coll_msg_size_bytes": size, "coll_exec_time_us": us,
            "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": round(algbw, 6),
            "coll_busbw_gbs": round(algbw * factor, 6), **extra}  # fmt: skip


def line(rank, body, kind="coll_perf", **others):
    record = {"header": header(rank, **others), "metadata": META, kind: body}
    return json.dumps(record, separators=(",", ":")) + "\n"


P2P = {"p2p": "Send", "p2p_sn": 3, "p2p_peer": 5, "p2p_msg_size_bytes": 4096, "p2p_exec_time_us": 20,
       "p2p_timing_source": "kernel_cpu", "p2p_algobw_gbs": 0.2048, "p2p_busbw_gbs": 0.2048}  # fmt: skip


def test_the_example_of_nccls_readme(tmp_path):
    path = tmp_path / "node1-pid163.log"
    path.write_text(line(2, coll()) + "\n" + line(2, P2P, "p2p_perf"))
    log = read_inspector(path)
    assert not log.notes and list(log.table.columns) == list(COLUMNS)
    one, two = log.table.to_dict("records")
    assert one["collective"] == "all_reduce" and one["rank"] == 2 and one["ranks"] == 8 and one["nodes"] == 1
    assert one["message_B"] == 17179869184 and one["time_us"] == 61974 and one["comm_name"] == "default_pg"
    assert one["algbw_GBps"] == pytest.approx(277.210914) and one["busbw_GBps"] == pytest.approx(485.119099)
    assert one["host"] == "node1" and one["pid"] == 163 and one["written_us"] == 1748030377748202
    assert pd.isna(one["peer"]) and one["timing"] == "kernel_gpu" and one["algorithm"] == ""
    assert (two["collective"], two["peer"], two["seq"], two["timing"]) == ("send", 5, 3, "kernel_cpu")


def test_markers_carry_rank_and_communicator_for_the_lines_below(tmp_path):
    """Format 4.3 and later: header and metadata once a batch, in the dump_stats line."""
    marker = {
        "header": header(3),
        "metadata": META,
        "dump_stats": {"coll_records": 2, "coll_dropped_since_last_dump": 7},
    }
    other = {"header": header(1, 2, "0xff"), "metadata": {**META, "pid": 9}, "dump_stats": {"coll_records": 1}}
    body = coll(coll_algo="RING", coll_proto="SIMPLE")
    records = [
        marker,
        {"coll_perf": body},
        {"coll_perf": coll(sn=2)},
        {"proxy_trace": {}},
        other,
        {"coll_perf": coll()},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    log = read_inspector(path)
    assert list(log.table["rank"]) == [3, 3, 1] and list(log.table.ranks) == [8, 8, 2]
    assert list(log.table.comm) == ["0x7f8c", "0x7f8c", "0xff"] and list(log.table.pid) == [163, 163, 9]
    assert (log.table.algorithm[0], log.table.protocol[0]) == ("RING", "SIMPLE")
    (note,) = log.notes
    assert "overwrote 7 operations" in note


@pytest.mark.parametrize(
    ("name", "torchs"),
    [("AllReduce", "all_reduce"), ("AllGather", "all_gather"), ("ReduceScatter", "reduce_scatter"),
     ("Broadcast", "broadcast"), ("AlltoAll", "all_to_all")],
)  # fmt: skip
def test_names_as_torch_writes_them(tmp_path, name, torchs):
    (tmp_path / "x.log").write_text(line(0, coll(name)))
    one = read_inspector(tmp_path).table.iloc[0]
    assert one.collective == torchs
    assert math.isnan(one.busbw_GBps) == (name == "AlltoAll")  # NCCL does not know its traffic and writes 0


def test_bandwidth_by_the_fastest_rank_and_who_was_late(tmp_path):
    """Rank 2 comes last each time: its kernel only transfers, the others' also wait."""
    us = {0: [500, 480, 460], 1: [300, 500, 400], 2: [100, 110, 90]}
    for rank, times in us.items():
        lines = [line(rank, coll(sn=i, size=1 << 20, us=t, ranks=3), ranks=3) for i, t in enumerate(times)]
        (tmp_path / f"h-pid{rank}.log").write_text("".join(lines))
    (row,) = read_inspector(tmp_path).collectives.to_dict("records")
    assert row["count"] == 3 and row["time_us"] == 100 and row["late_rank"] == 2 and row["wait_us"] == 390
    assert row["busbw_GBps"] == pytest.approx((1 << 20) / 100e-6 / 1e9 * 4 / 3)
    assert row["total_ms"] == pytest.approx(0.3)


def test_one_rank_alone_accuses_nobody(tmp_path):
    (tmp_path / "x.log").write_text(line(0, coll(sn=1)) + line(0, coll("Broadcast", sn=1, us=5)))
    table = read_inspector(tmp_path).collectives
    assert list(table.collective) == ["all_reduce", "broadcast"]  # the longest first
    assert table.late_rank.isna().all() and (table.wait_us == 0).all()


def test_gzip_and_a_folder_with_other_files(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.log.gz").write_bytes(gzip.compress(line(0, coll()).encode()))
    (tmp_path / "b.jsonl").write_text(line(1, coll()))
    (tmp_path / "train.log").write_text("epoch 1\n")
    (tmp_path / "rank0.json").write_text('{"traceEvents": []}')
    (tmp_path / "metrics.prom").write_text("nccl_bus_bandwidth_gbs{} 1")
    log = read_inspector(tmp_path)
    assert sorted(log.table["rank"]) == [0, 1] and not log.notes
    assert is_inspector(tmp_path / "b.jsonl") and not is_inspector(tmp_path / "train.log")


def test_torn_and_odd_lines_are_counted(tmp_path):
    good = line(0, coll())
    path = tmp_path / "x.log"
    odd = '{"header": {}, "coll_perf": {"coll": "AllReduce"}}\n[1]\nnull\n{"a": 1}\nWARN hello\n'
    path.write_text(good + odd + good + good[:150])
    log = read_inspector(path)
    assert len(log.table) == 2
    (note,) = log.notes
    assert "6 lines could not be read, the first is line 2: coll_perf without" in note
    path.write_text(good + good[:-3])
    assert "line 2: it ends early; was the job killed?" in read_inspector(path).notes[0]


def test_a_torn_gzip_gives_what_stands_before_the_tear(tmp_path):
    lines = "".join(line(0, coll(sn=i, us=1000 + i * i % 977)) for i in range(2000)).encode()
    whole = gzip.compress(lines)
    (tmp_path / "x.log.gz").write_bytes(whole[: len(whole) // 2])
    log = read_inspector(tmp_path / "x.log.gz")
    assert 0 < len(log.table) < 2000 and "what stands before that was read" in log.notes[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no operation in it"),
        (b"\n\n", "no operation in it"),
        (b"hello\n", "1 lines could not be read, the first is line 1: column 1"),
        (b"\xff\xfe{}\n", "line 1: "),
        (b'{"header": {"rank": 0}}\n', "no operation in it"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"coll_perf": {"coll": 1, "coll_msg_size_bytes": 1, "coll_exec_time_us": 1}}', "coll_perf without"),
        (b'{"coll_perf": {"coll": "AllReduce", "coll_msg_size_bytes": -1, "coll_exec_time_us": NaN}}', "without"),
    ],
)
def test_nothing_to_read_is_one_clear_error(tmp_path, data, message):
    (tmp_path / "x.log").write_bytes(data)
    with pytest.raises(InspectorError, match=message) as caught:
        read_inspector(tmp_path / "x.log")
    assert "x.log" in str(caught.value) and len(str(caught.value)) < 600


def test_no_log_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_inspector(tmp_path / "none")
    with pytest.raises(InspectorError, match="no log of NCCL Inspector"):
        read_inspector(tmp_path)


LINES = (
    line(0, coll()) + line(1, P2P, "p2p_perf") + json.dumps({"dump_stats": {"coll_dropped_since_last_dump": 3}})
).encode()


def test_mangled(tmp_path):
    """Cut, flip, drop, repeat, and swap values: a table or an InspectorError, nothing else."""

    def check(seed):
        data = mangled_bytes(random.Random(seed), LINES)
        path = tmp_path / "x.log"
        path.write_bytes(data)
        reader = _Reader(path)
        rows = list(reader.rows())
        assert len(rows) <= 6 and all(row["message_B"] >= 0 and row["time_us"] >= 0 for row in rows)
        assert all(len(note) < 400 for note in reader.notes())
        if len(data) % 16 == 0:  # the tables take ten times as long
            try:
                log = read_inspector(path)
            except InspectorError as problem:
                assert not rows and len(str(problem)) < 600
            else:
                assert len(log.table) == len(rows) and log.collectives["count"].sum() <= len(rows)
        return data

    for_seeds(check)

"""NCCL's log: two generations, launchers' labels, glued lines, what is missing."""

from __future__ import annotations

import random
from pathlib import Path

import pandas as pd
import pytest
from damage import for_seeds, mangled

from ddplab.nccl import parse_log

DATA = Path(__file__).parent / "data" / "nccl"
NEW, GLUED = ((DATA / f"nccl_log_{name}.txt").read_text() for name in ("2.30", "interleaved"))


def said(*messages: str, pid: int = 10) -> str:
    return "".join(f"n1:{pid}:11 [0] NCCL INFO {message}\n" for message in messages)


def test_a_log_of_nccl_2_30():
    log = parse_log(DATA / "nccl_log_2.30.txt")
    assert (log.version, log.ranks) == ((2, 30, 7), 2)
    assert set(log.comms["comm_id"]) == {"0x8d3f2c1b77aa0011"}
    first = log.comms.iloc[0]
    assert (first["rank"], first["pid"], first["device"], first["nodes"], first["bus_id"]) == (0, 4100, 0, 1, "1b000")
    assert list(log.comms["state"]) == ["COMPLETE", "COMPLETE"]
    assert log.transports == {(0, 1): "P2P/CUMEM/read", (1, 0): "P2P/CUMEM/read"}
    assert log.networks == ["Socket"]
    assert list(log.calls["op_count"]) == [0, 26]
    assert list(log.calls["count"]) == [262144, 524288]
    assert list(log.calls["nbytes"]) == [262144 * 4, 524288 * 2]
    assert list(log.calls["datatype"]) == ["float32", "bfloat16"]
    assert list(log.calls["redop"]) == ["sum", "avg"]
    assert list(log.rings["ranks"]) == [(0, 1), (0, 1)] and set(log.rings["channels"]) == {2}
    assert list(log.trees["children"]) == [(1,), (1,)] and log.trees["parent"].isna().all()
    assert log.channels.iloc[0][["coll", "collnet", "nvls", "p2p", "p2p_per_peer"]].tolist() == [2, 2, 0, 2, 2]
    choice = log.choices.iloc[0]
    assert (choice["algorithm"], choice["protocol"], choice["nbytes"]) == ("Ring", "Simple", 1048576)
    assert log.env[["variable", "value"]].values.tolist() == [["NCCL_SOCKET_IFNAME", "eth0"]]
    (warning,) = log.warnings.itertuples(index=False)
    assert (warning.pid, warning.place, warning.time) == (4101, "transport/net_socket.cc:412", "2026-05-05 06:16:47")
    assert warning.text.startswith("NET/Socket : peer 10.0.0.6<51234> message truncated")
    assert log.verdict()[0].startswith("WARNING of node-a pid 4101")
    assert "2 of 2 edges over P2P: P2P/CUMEM/read" in log.verdict()


def test_lines_that_ranks_and_launchers_wrote_into_each_other():
    log = parse_log(GLUED)
    assert log.comms[["host", "pid", "rank", "nodes"]].values.tolist() == [
        ["node-a", 4100, 0, 1],
        ["node-a", 4101, 1, 1],
    ]
    assert log.transports == {(0, 1): "SHM/direct/direct", (1, 0): "SHM/direct/direct"}
    assert log.connected[["host", "pid", "what"]].values.tolist() == [
        ["node-a", 4100, "trees"],
        ["node-a", 4101, "rings"],
    ]
    assert log.lines == 6 and "loss" not in str(log)
    assert any("0->1" in line and "host memory" in line for line in log.verdict())


def test_what_was_glued_to_a_host_goes_back_to_the_line_before():
    one = "node-a:1:2 [0] NCCL INFO comm 0xa rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0"
    log = parse_log(
        f"{one}node-a:3:4 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/IPC\nnode-a:3:4 [1] NCCL INFO x\n"
    )
    assert log.processes == [("node-a", 1), ("node-a", 3)]
    log = parse_log("n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[n1:3:4 [1] NCCL INFO Using network IB\n")
    assert log.networks == ["IB"] and log.transports == "unknown (needs NCCL_DEBUG_SUBSYS=INIT,GRAPH)"


def test_a_log_of_nccl_2_8():
    log = parse_log(
        "n1:10:10 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\nNCCL version 2.8.4+cuda11.1\n"
        + said(
            "Channel 00/02 :    0   1",
            "Trees [0] 1/-1/-1->0->-1",
            "Channel 00 : 0[1b000] -> 1[2b000] via direct shared memory",
            "Channel 01 : 0[1b000] -> 1[2b000] via P2P/IPC/read",
            "2 coll channels, 2 p2p channels, 2 p2p channels per peer",
            "comm 0x7f0 rank 0 nranks 2 cudaDev 0 busId 1b000 - Init COMPLETE",
        )
        + "\nn1:10:12 [0] misc/socket.cc:53 NCCL WARN Net : no answer\n"
    )
    assert log.version == (2, 8, 4)
    assert log.edges[["src_device", "kind"]].values.tolist() == [["1b000", "SHM"], ["1b000", "P2P"]]
    assert log.comms.iloc[0][["rank", "nranks", "device", "bus_id", "state"]].tolist() == [0, 2, 0, "1b000", "COMPLETE"]
    assert log.channels.iloc[0]["coll"] == 2 and pd.isna(log.channels.iloc[0]["nvls"])
    assert log.warnings.iloc[0][["place", "text"]].tolist() == ["misc/socket.cc:53", "Net : no answer"]


def test_edges_over_the_network_have_two_ends():
    log = parse_log(
        said(
            "Channel 00/0 : 3[3] -> 11[3] [send] via NET/IB/3(4)/GDRDMA(PCI)/Shared",
            "Channel 00/0 : 11[3] -> 3[3] [receive] via NET/IB/3/GDRDMA(PCI)/Shared",
            "Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer/read",
            "Channel 01/0 : 0[0] -> 1[1] via P2P/indirect/4[4]",
        )
    )
    assert list(log.edges["kind"]) == ["NET", "NET", "P2P", "P2P"]
    assert list(log.edges["end"]) == ["send", "receive", None, None]
    assert log.transports[(0, 1)] == "P2P/direct pointer/read and P2P/indirect/4[4]"
    assert log.transports[(3, 11)] == "NET/IB/3(4)/GDRDMA(PCI)/Shared"


def test_missing_lines_are_unknown_and_not_none():
    log = parse_log(said("Using network Socket"))
    assert log.transports == "unknown (needs NCCL_DEBUG_SUBSYS=INIT,GRAPH)"
    text = str(log)
    for subsystem in ("INIT,GRAPH", "=COLL", "=TUNING"):
        assert subsystem in text
    assert log.ranks is None


def test_smaller_communicators_do_not_mix_with_the_world():
    start = "ncclCommInitRank comm 0xa1 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 1b000 commId 0x11 - Init START"
    split = (
        "ncclCommSplit comm 0xb2 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1b000 parent 0xa1 childCount 1 color 5 key 0"
        " - Init COMPLETE"
    )
    log = parse_log(
        said(
            start,
            "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
            "comm 0xb2 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0",
            "Channel 00/0 : 0[0] -> 1[4] [send] via NET/IB/0",
            split,
        )
    )
    assert log.ranks == 4 and log.transports == {(0, 1): "P2P/CUMEM"}
    assert log.comms.iloc[1][["nodes", "parent", "color", "state"]].tolist() == [2, "0xa1", 5, "COMPLETE"]
    assert "initialisation began and did not end on any rank that speaks here" in log.verdict()
    assert "3 of 4 ranks say nothing here: 1, 2, 3" in log.verdict()


def test_environment_that_took_effect_and_that_did_not():
    log = parse_log(
        said(
            "NCCL_BUFFSIZE set by environment to 8.",
            "NCCL_PROTO set by environment to LL",
            "Invalid NCCL_NTHREADS 4 (must be a multiple of 32)",
            "Invalid value 99999999999999999999 for NCCL_MIN_NCHANNELS, using default -2.",
        )
        + said("NCCL_PROTO set by environment to Simple", pid=20)
    )
    assert log.env[["pid", "variable", "value"]].values.tolist() == [
        [10, "NCCL_BUFFSIZE", "8"],
        [10, "NCCL_PROTO", "LL"],
        [20, "NCCL_PROTO", "Simple"],
    ]
    assert log.rejected[["variable", "value", "used"]].values.tolist() == [
        ["NCCL_NTHREADS", "4", "must be a multiple of 32"],
        ["NCCL_MIN_NCHANNELS", "99999999999999999999", "-2"],
    ]
    assert "NCCL_PROTO differs between processes: LL, Simple" in log.verdict()


def test_algorithm_and_protocol_in_three_dialects():
    log = parse_log(
        said(
            "AllReduce: 1048576 Bytes -> Algo 1 proto 2 time 2771.4",
            "AllReduce: 8 Bytes -> Algo NVLS_TREE proto LL128 channel{Lo..Hi}={0..15}",
            "AllGather [Copy Engine]: 64 Bytes -> cudaMemcpy; CE synchronization with NVLS",
            "AllReduce [Symmetric]: 32 Bytes -> Kernel AllReduce_AGxLL_R nchannels 2 nthreads 512 nWorks 1",
        )
    )
    assert log.choices[["algorithm", "protocol", "nbytes"]].values.tolist() == [
        ["Ring", "Simple", 1048576],
        ["NVLSTree", "LL128", 8],
        ["CopyEngine", "cudaMemcpy", 64],
        ["Symmetric", "AllReduce_AGxLL_R", 32],
    ]


def test_the_tuning_table_is_read_block_by_block():
    log = parse_log(
        said(
            "  Algorithm   |                            Tree                  |                            Ring"
            "                  |                   CollNetDirect                  |",
            "  Protocol    |             LL |          LL128 |         Simple |             LL |          LL128 |",
            " Max NThreads |            512 |            640 |            512 |            512 |            640 |",
            "    AllReduce |    15.2/  29.1 |    31.5/  85.9 |    64.4/ 110.4 |    15.0/  50.1 |    40.6/ 126.2 |"
            "    56.0/ 137.1 |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |",
            "  Algorithm   |                    CollNetChain                  |                            NVLS"
            "                  |                        NVLSTree                  |",
            "    AllReduce |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |"
            "    25.0/ 272.0 |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |",
        )
    )
    table = log.tuning.set_index(["algorithm", "protocol"])
    assert len(table) == 18
    assert table.loc[("Ring", "LL128"), ["latency_us", "algbw_GBps"]].tolist() == [40.6, 126.2]
    assert table.loc[("NVLS", "Simple"), ["latency_us", "algbw_GBps"]].tolist() == [25.0, 272.0]


def test_a_ring_that_nccl_cut_is_marked():
    log = parse_log(said("Channel 05/16 :    0   7   6  1...", "Channel 06/16 : 0 1 2"))
    assert log.rings[["ranks", "complete"]].values.tolist() == [[(0, 7, 6), False], [(0, 1, 2), True]]


def test_files_of_a_folder_belong_together(tmp_path):
    for pid in (10, 20):
        (tmp_path / f"nccl.n1.{pid}").write_text(said("Connected all rings", pid=pid))
    assert parse_log(tmp_path).processes == [("n1", 10), ("n1", 20)]
    assert parse_log([tmp_path / "nccl.n1.20"]).processes == [("n1", 20)]


def test_no_log_at_all(tmp_path):
    with pytest.raises(ValueError, match="no line of NCCL in it; start the job with NCCL_DEBUG=INFO"):
        parse_log("step 3 loss 0.41\nsee NCCL INFO in the manual\n")
    with pytest.raises(FileNotFoundError, match="there is no file nothing.log"):
        parse_log("nothing.log")
    with pytest.raises(FileNotFoundError, match="there is no file in"):
        parse_log(tmp_path)
    with pytest.raises(TypeError, match="expected text, a path"):
        parse_log(3)


def test_a_line_of_megabytes_takes_no_time():
    junk = "x" * 1_000_000
    log = parse_log(f"{junk} NCCL INFO {junk}n1:10:11 [0] NCCL INFO Using network IB\n")
    assert log.networks == ["IB"]


def test_mangled_logs_give_a_table_or_a_sentence():
    def check(seed):
        text = mangled(random.Random(seed), random.Random(seed).choice([NEW, GLUED]))
        try:
            log = parse_log(text + "\n")
        except ValueError as error:
            assert "no line of NCCL" in str(error)
            return text
        assert all(isinstance(line, str) for line in log.verdict())
        if seed % 20 == 0:
            for name in log.rows:
                assert len(getattr(log, name)) == len(log.rows[name])
        return text

    for_seeds(check)

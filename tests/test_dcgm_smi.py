"""nvidia-smi's link states, counters and matrix: the stated values, and pasted copies of them."""

from __future__ import annotations

import math

import pytest
from conftest import ROOT

import ddplab as dl

DATA = ROOT / "tests/data/dcgm"


def text(name: str) -> str:
    return (DATA / name).read_bytes().decode()


# ---------------------------------------------------------------- nvidia-smi nvlink


def test_inactive_links_are_not_links_of_speed_zero():
    frame = dl.parse_nvlink(text("nvlink_s.txt"))
    assert list(frame.groupby("gpu").active.sum()) == [2, 1] and len(frame) == 6
    assert list(frame.groupby("gpu").speed_GBps.sum().round(3)) == [53.124, 26.562]
    assert math.isnan(frame.speed_GBps[2]) and set(frame.name) == {"NVIDIA H100 80GB HBM3"}


def test_counters_become_rates_between_two_readings():
    rates = dl.nvlink_rates(text("nvlink_gt_d_t0.txt"), text("nvlink_gt_d_t1.txt"), 1.0)
    assert list(rates.tx_GBps) == [10.24, 1.024] and rates.rx_GBps[0] == 20.48 and math.isnan(rates.rx_GBps[1])
    assert list(rates.device) == ["GPU 0", "GPU 0"] and list(rates.link) == ["NVLink 0", "NVLink 1"]
    assert list(dl.nvlink_rates(text("nvlink_gt_d_t0.txt"), text("nvlink_gt_d_t1.txt"), 4).tx_GBps) == [2.56, 0.256]
    with pytest.raises(ValueError, match="counter reset: GPU 0 link 0 tx goes from 11000000 down to 1000000 KiB"):
        dl.nvlink_rates(text("nvlink_gt_d_t1.txt"), text("nvlink_gt_d_t0.txt"), 1.0)
    with pytest.raises(ValueError, match="link 1 is in one of them only"):
        dl.nvlink_rates(text("nvlink_gt_d_t0.txt"), "\n".join(text("nvlink_gt_d_t1.txt").splitlines()[:3]), 1.0)
    with pytest.raises(ValueError, match="no counters here"):
        dl.nvlink_rates(text("nvlink_s.txt"), text("nvlink_s.txt"), 1.0)
    for seconds in (0, -1, math.nan, math.inf, "1"):
        with pytest.raises(ValueError, match="positive number of seconds"):
            dl.nvlink_rates(text("nvlink_gt_d_t0.txt"), text("nvlink_gt_d_t1.txt"), seconds)


GPU = "GPU 0: Tesla V100-SXM2-16GB (UUID: GPU-0f0e0d0c-1111-2222-3333-444455556666)\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("\t Link 0: Tx0: 1000000 KiB\n\t Link 0: Rx0: 2000 KiB\n", (1e6, 2e3)),
        ("\t Link 0: Rx0: 1204 KBytes, Tx0: 2408 KBytes\n", (2408, 1204)),
        ("\t Link 0: Rx0: N/A, Tx0: N/A\n", (math.nan, math.nan)),
        ("         Link 0: Data Tx: 7 KiB\r\n         Link 0: Data Rx: 9 KiB\r\n", (7, 9)),
    ],
)
def test_the_generations_of_counters(lines, expected):
    frame = dl.parse_nvlink(GPU + lines)
    assert frame[["tx_KiB", "rx_KiB"]].iloc[0].tolist() == pytest.approx(list(expected), nan_ok=True)


def test_raw_counters_and_other_lines():
    frame = dl.parse_nvlink(GPU + "\t Link 0: Raw Tx: 1004000 KiB\n\t Link 0: Data Tx: 1000000 KiB\n")
    assert (frame.raw_tx_KiB[0], frame.tx_KiB[0]) == (1004000, 1000000)
    both = dl.parse_nvlink(
        GPU + "\t Link 0: 25.781 GB/s\n\t Link 0, P2P is supported: true\n".replace("0, P2P", "0: P2P")
    )
    assert both.speed_GBps[0] == 25.781
    errors = dl.parse_nvlink(GPU + "\t Link 0: 25 GB/s\n\t Link 0: Replay Errors: 0\n")
    assert errors.active[0] and errors.speed_GBps[0] == 25


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", "no output of `nvidia-smi nvlink`"),
        (GPU, "GPU 0 .* has no NVLink lines"),
        ("\t Link 0: 25 GB/s\n", "line 1: a link without its GPU"),
        (GPU + "\t Link 0: fast\n", "line 2 says nothing known of a link"),
        (GPU + "hello\n", "line 2 is no output"),
    ],
)
def test_other_text_is_refused_with_its_line(wrong, said):
    with pytest.raises(ValueError, match=said):
        dl.parse_nvlink(wrong)


@pytest.mark.parametrize("reader", [dl.parse_nvlink, dl.parse_topo, dl.parse_dmon])
@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        (text("nvidia_smi_fail.txt"), "modprobe nvidia"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", "reload it"),
        ("bash: nvidia-smi: command not found\n", "no nvidia-smi on this machine"),
    ],
)
def test_a_failure_of_the_driver_is_no_table(reader, failure, hint):
    if reader is dl.parse_dmon and "command" in failure:
        failure = failure.replace("nvidia-smi", "dcgmi")
    with pytest.raises(dl.GpuUnavailable, match=hint):
        reader(failure)


# ---------------------------------------------------------------- topo -m


def test_the_matrix_with_its_escape_codes():
    topology = dl.parse_topo(text("topo_m_ansi.txt"))
    assert topology.devices == ("GPU0", "GPU1", "NIC0") and topology.links == {("GPU0", "GPU1"): "NV18"}
    assert topology.cells["GPU0", "NIC0"] == "PIX" and topology.cells["GPU1", "NIC0"] == "SYS"
    assert topology.numa == {"GPU0": "0", "GPU1": "1"} and topology.gpu_numa_id == {"GPU0": None, "GPU1": None}
    assert topology.cpus == {"GPU0": "0-31", "GPU1": "32-63"} and topology.nics == {"NIC0": "mlx5_0"}
    assert topology.matrix().loc["GPU1", "GPU0"] == "NV18" and topology.matrix().loc["NIC0", "NIC0"] == "X"
    rows = topology.affinity().set_index("gpu")
    assert rows.nic["GPU0"] == "mlx5_0" and rows.path["GPU1"] == "SYS"
    assert "another NUMA node" in rows.advice["GPU1"] and "another NUMA node" not in rows.advice["GPU0"]


PASTED = """        GPU0    GPU1    GPU2    GPU3    NIC0    NIC1    CPU Affinity    NUMA Affinity
GPU0     X      NV12    PXB     SYS     NODE    SYS     0-15,32-47      0-1
GPU1    NV12     X      SYS     SYS     NODE    SYS     0-15,32-47      0-1
GPU2    PXB     SYS      X      PHB     SYS     PXB     16-31           1
GPU3    SYS     SYS     PHB      X      SYS     PXB     16-31           1
NIC0    NODE    NODE    SYS     SYS      X      SYS
NIC1    SYS     SYS     PXB     PXB     SYS      X

Legend:

  X    = Self
"""


def test_a_pasted_copy_with_blanks_ranges_and_far_peers():
    topology = dl.parse_topo(PASTED)
    assert topology.numa["GPU0"] == "0-1" and topology.cpus["GPU1"] == "0-15,32-47" and topology.nics == {}
    assert topology.links["GPU2", "GPU3"] == "PHB" and len(topology.links) == 6
    rows = topology.affinity().set_index("gpu")
    assert rows.peers["GPU0"] == "NV12, PXB, SYS" and "some peers over SYS" in rows.advice["GPU0"]
    assert rows.path["GPU2"] == "PXB" and "behind the CPU" in rows.advice["GPU0"]
    glued = PASTED.replace("NODE    NODE    SYS     SYS      X ", "NODENODESYSSYSX ")
    assert dl.parse_topo(glued).cells == topology.cells
    moved = text("topo_m_ansi.txt").replace("\t\x1b[4mGPU0", "\x1b[4m\tGPU0")
    assert dl.parse_topo(moved) == dl.parse_topo(text("topo_m_ansi.txt"))


def test_one_gpu_has_no_links():
    topology = dl.parse_topo("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t\tN/A\n\nLegend:\n")
    assert topology.links == {} and topology.numa == {"GPU0": None}
    row = topology.affinity().iloc[0]
    assert row.nic is None and row.peers is None and row.advice == "bind its process to cores 0-7"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", "no heading of"),
        ("GPU0 GPU1\nGPU0 X OK\nGPU1 OK X\n", "line 2: cell 2 of 2: this is the matrix of topo -p2p"),
        ("GPU0 GPU1\nGPU0 X NV2\n", "1 rows for 2 devices"),
        ("GPU0 GPU0\n", "names a device twice"),
        ("GPU0 GPU1\nGPU0 X NV2\nGPU0 X NV2\n", "line 3: a second row for GPU0"),
        ("GPU0 GPU1\nGPU0 NV2 X\n", "line 2: GPU0 to itself is not X"),
        ("GPU0 GPU1\nGPU0 X fast\n", "line 2: cell 2 of 2: 'fast' is no path"),
        ("GPU0 GPU1\nGPU7 X NV2\n", "line 2 begins with 'GPU7'"),
    ],
)
def test_other_matrices_are_refused_with_their_line(wrong, said):
    with pytest.raises(ValueError, match=said):
        dl.parse_topo(wrong)

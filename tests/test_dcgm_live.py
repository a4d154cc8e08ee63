"""Watching links: the counters of this machine for real, DCGM and NVML against fakes of the tool and of the library."""

from __future__ import annotations

import os
import socket
import stat
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT

import ddplab as dl
from ddplab.dcgm.dcgmi import DcgmSource
from ddplab.dcgm.live import LinkWatch, polled
from ddplab.dcgm.nic import HostSource, NicSource
from ddplab.dcgm.nvml import ALL_LINKS, NvmlSource

DATA = ROOT / "tests/data/dcgm"


# ---------------------------------------------------------------- rates from counters


class Clock:
    """A clock that moves when somebody waits; as `stop` it is set at wait number `most`."""

    def __init__(self, most: int) -> None:
        self.now, self.most = 100.0, most

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.most -= 1
        return self.most <= 0


def counted(*tx: float | None) -> Any:
    """A reader whose device sends these cumulative bytes, one a call; None: the device is not there."""
    left = list(tx)

    def read() -> list[dict]:
        value = left.pop(0)
        return [] if value is None else [{"device": "a", "link": "NIC", "tx_bytes": value, "rx_bytes": 0}]

    return read


def test_a_rate_is_the_difference_over_the_time_that_really_passed():
    clock = Clock(3)
    found = list(polled(counted(0, 10**9, 3 * 10**9, 3 * 10**9), 0.5, clock, clock))
    assert [rows[0]["tx_GBps"] for _, rows in found] == [2.0, 4.0, 0.0] and [t for t, _ in found] == [
        100.5,
        101.0,
        101.5,
    ]


def test_a_reading_that_took_long_is_taken_again():
    clock, slow = Clock(2), [0.0, 0.0, 0.3, 0.2, 0.0, 0.0]  # seconds that each reading takes

    def read() -> list[dict]:
        clock.now += slow.pop(0)
        return [{"device": "a", "link": "NIC", "tx_bytes": clock.now * 1e9, "rx_bytes": 0}]  # 1 GB/s, always

    found = list(polled(read, 1.0, clock, clock))
    assert [rows[0]["tx_GBps"] for _, rows in found] == pytest.approx([1.0, 1.0]) and len(slow) == 1


def test_a_counter_that_falls_or_a_new_device_has_no_rate():
    clock = Clock(4)
    found = list(polled(counted(5, 4, None, 10, 12 * 10**9 + 10), 1.0, clock, clock))
    assert [[row["tx_GBps"] for row in rows] for _, rows in found] == [[None], [], [None], [12.0]]


# ---------------------------------------------------------------- this machine


def test_bytes_through_loopback_are_seen():
    sent = 40 * 2**20
    with dl.watch_links(0.02, source="nic") as watch:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
            inside, _ = server.accept()
            reader = threading.Thread(target=lambda: [None for _ in iter(lambda: inside.recv(2**20), b"")])
            reader.start()
            out.sendall(bytes(sent))
            out.shutdown(socket.SHUT_WR)
            reader.join()
            inside.close()
    frame = watch.frame()
    assert sent <= volume(frame, "tx_GBps") and sent <= volume(frame, "rx_GBps")  # headers and others' traffic on top
    assert "NIC counters" in watch.source
    assert list(frame.columns) == ["sample", "time_s", "device", "link", "tx_GBps", "rx_GBps"]


def volume(frame: Any, column: str) -> float:
    """Bytes of `lo` over all samples."""
    lo = frame[frame.device == "lo"]
    return float((lo[column] * lo.time_s.diff().fillna(lo.time_s)).sum() * 1e9)


def test_infiniband_counts_words_of_four_bytes(tmp_path: Path):
    port = tmp_path / "mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "counters/port_xmit_data").write_text("250\n")
    (port / "counters/port_rcv_data").write_text("1000\n")
    source = NicSource(tmp_path)
    row = next(row for row in source.read() if row["device"] == "mlx5_0:1")
    assert (row["link"], row["tx_bytes"], row["rx_bytes"]) == ("RDMA", 1000, 4000)
    assert source.peaks["mlx5_0:1", "RDMA"].GBps == 50
    (port / "counters/port_rcv_data").write_text("N/A\n")
    assert all(row["device"] != "mlx5_0:1" for row in source.read())


def test_emulated_hosts_are_held_against_their_rate():
    hosts = SimpleNamespace(
        n=2,
        link=dl.Link.parse("1gbit"),
        counters=lambda: [SimpleNamespace(sent=5, received=7), SimpleNamespace(sent=0, received=0)],
    )
    source = HostSource(hosts)
    assert source.read()[0] == {"device": "host 0", "link": "NIC", "tx_bytes": 5, "rx_bytes": 7}
    assert source.peaks["host 1", "NIC"].GBps == 0.125 and "2 emulated hosts" in source.name
    with pytest.raises(ValueError, match="kernel counters only"):
        dl.watch_links(hosts=hosts, source="nvml")


def test_a_watch_that_fails_in_the_background_says_so_at_the_end():
    def broken() -> list:
        raise OSError("no counters any more")

    source = SimpleNamespace(name="fake", peaks={}, read=broken, close=lambda: None)
    with pytest.raises(OSError, match="no counters any more"), LinkWatch(source, 0.01, None, []):
        pass
    watch = LinkWatch(SimpleNamespace(name="fake", peaks={}, read=list, close=lambda: None), 0.01, 2, [])
    assert list(watch) == [[], []] and len(watch.frame()) == 0
    with pytest.raises(RuntimeError, match="has been used"):
        next(iter(watch))


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval_s": 0},
        {"interval_s": "1"},
        {"interval_s": float("nan")},
        {"count": 0},
        {"count": 1.5},
        {"source": "gpu"},
    ],
)
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dl.watch_links(**wrong)


# ---------------------------------------------------------------- NVML, against a fake of the library


class NVMLError(Exception):
    """As pynvml's."""


def fake_nvml(**changes: Any) -> SimpleNamespace:
    """Two GPUs: 18 active links of 25 GB/s on the first, none on the second; PCIe 5 x16, idling at generation 1."""
    calls: list[str] = []
    state = {"reads": 0}

    def fields(handle: int, wanted: list) -> list:
        state["reads"] += 1
        out = []
        for one in wanted:
            key, scope = one if isinstance(one, tuple) else (one, None)
            value, failed = 0, 0
            if handle == 1 and key != 90:
                failed = 3  # not supported
            elif key in (138, 139):
                assert scope == ALL_LINKS  # without it the driver gives link 0 only
                value = 10**6 * state["reads"] * (key - 137)
            elif key == 90:
                value = 25_000 if handle == 0 else 0
            else:
                failed = 3
            out.append(SimpleNamespace(nvmlReturn=failed, valueType=3, value=SimpleNamespace(ullVal=value)))
        return out

    def link_state(handle: int, link: int) -> int:
        if handle == 1 or link >= 18:
            raise NVMLError("Not Supported")
        return 1

    given = {
        "NVMLError": NVMLError,
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX": 138,
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX": 139,
        "NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES": 202,
        "NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES": 204,
        "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON": 90,
        "NVML_PCIE_UTIL_TX_BYTES": 0,
        "NVML_PCIE_UTIL_RX_BYTES": 1,
        "nvmlInit": lambda: calls.append("init"),
        "nvmlShutdown": lambda: calls.append("shutdown"),
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetFieldValues": fields,
        "nvmlDeviceGetNvLinkState": link_state,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetPcieThroughput": lambda handle, way: 1_240_331 * (way + 1),
        "calls": calls,
    }
    return SimpleNamespace(**{**given, **changes})


def test_the_fake_has_the_names_and_numbers_of_the_library():
    import pynvml

    for name, value in vars(fake_nvml()).items():
        if name.startswith("NVML_"):
            assert getattr(pynvml, name) == value
        elif name.startswith("nvml"):
            assert callable(getattr(pynvml, name))
    assert pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG == 3 and hasattr(pynvml.c_nvmlFieldValue_t(), "nvmlReturn")


def test_nvml_counts_kib_of_all_links_and_states_peaks():
    nvml = fake_nvml()
    source = NvmlSource(nvml)
    first, second = source.read(), source.read()
    assert [row["link"] for row in first] == ["NVLink", "PCIe", "PCIe"]
    assert second[0]["tx_bytes"] - first[0]["tx_bytes"] == 3 * 10**6 * 1024  # three calls of `fields` a round
    assert second[0]["rx_bytes"] == 2 * second[0]["tx_bytes"]
    assert (first[1]["tx_GBps"], first[2]["rx_GBps"]) == (1.240331, 2.480662)
    assert source.peaks["GPU 0", "NVLink"].GBps == 450 and source.peaks["GPU 1", "PCIe"].GBps == pytest.approx(
        63, rel=1e-2
    )
    assert ("GPU 1", "NVLink") not in source.peaks and "not run on a GPU yet" in source.name
    source.close(), source.close()
    assert nvml.calls == ["init", "shutdown"]


def test_newer_generations_have_counters_of_bytes():
    def fields(handle: int, wanted: list) -> list:
        keys = [one[0] if isinstance(one, tuple) else one for one in wanted]
        return [
            SimpleNamespace(nvmlReturn=0 if k in (202, 204) else 3, valueType=3, value=SimpleNamespace(ullVal=k))
            for k in keys
        ]

    row = NvmlSource(fake_nvml(nvmlDeviceGetFieldValues=fields)).read()[0]
    assert (row["link"], row["tx_bytes"], row["rx_bytes"]) == ("NVLink", 202, 204)


def test_without_a_driver_or_a_gpu_it_says_what_to_do():
    def refuse() -> None:
        raise NVMLError("Driver/library version mismatch")

    with pytest.raises(dl.GpuUnavailable, match="reload it"):
        NvmlSource(fake_nvml(nvmlInit=refuse))
    nvml = fake_nvml(nvmlDeviceGetCount=lambda: 0)
    with pytest.raises(dl.GpuUnavailable, match="sees no GPU"):
        NvmlSource(nvml)
    assert nvml.calls == ["init", "shutdown"]
    lost = fake_nvml(nvmlDeviceGetHandleByIndex=lambda i: (_ for _ in ()).throw(NVMLError("GPU is lost")))
    with pytest.raises(dl.GpuUnavailable, match="GPU is lost"):
        NvmlSource(lost)


# ---------------------------------------------------------------- DCGM, against a fake of the tool


@pytest.fixture
def dcgmi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`dcgmi(body)` puts a program of that name first in the PATH; it writes its arguments beside itself."""

    def make(body: str) -> Path:
        program = tmp_path / "dcgmi"
        program.write_text(
            f"#!{sys.executable}\nimport os, sys, time\nopen(__file__ + '.args', 'w').write(' '.join(sys.argv[1:]))\n"
            f"open(__file__ + '.pid', 'w').write(str(os.getpid()))\nsay = lambda t: print(t, end='', flush=True)\n"
            + textwrap.dedent(body)
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return program

    return make


def test_dmon_is_read_as_it_comes_and_ended_when_we_are_done(dcgmi):
    program = dcgmi(f"""
        lines = open({str(DATA / "dmon_4.6.txt")!r}).read().splitlines(True)
        say("".join(lines))
        while True:
            say("".join(lines[4:]))
            time.sleep(0.02)
    """)
    found = list(watch := dl.watch_links(0.1, count=3))
    assert "DCGM (not run on a GPU yet)" == watch.source
    assert [len(rows) for rows in found] == [4, 4, 4] and found[0][1]["tx_GBps"] is None
    assert found[1][3] | {"time_s": 0} == {
        "sample": 1, "time_s": 0, "device": "GPU 0", "link": "NVLink",
        "tx_GBps": pytest.approx(186.203998), "rx_GBps": pytest.approx(186.204122),
    }  # fmt: skip
    assert program.with_name("dcgmi.args").read_text() == "dmon -e 203,1009,1010,1011,1012 -d 100"
    with pytest.raises(ProcessLookupError):
        os.kill(int(program.with_name("dcgmi.pid").read_text()), 0)


def test_a_refusal_is_told_and_the_next_source_is_taken(dcgmi, monkeypatch):
    program = dcgmi("""
        say("#Entity         NVLTX                       \\nID                                          \\n")
        text = "This request is serviced by a module of DCGM that is not currently loaded"
        print("Error setting watches. Result: -33: " + text, file=sys.stderr)
        sys.exit(33)
    """)
    with pytest.raises(dl.DcgmError, match="profiling module is missing") as error:
        DcgmSource(0.2)
    assert error.value.code == -33
    monkeypatch.setattr("ddplab.dcgm.live.NvmlSource", lambda: NvmlSource(fake_nvml()))
    watch = dl.watch_links(0.01, count=2)
    assert watch.source == "NVML (not run on a GPU yet)" and "code -33" in watch.why[0]
    assert [row["device"] for rows in watch for row in rows] == ["GPU 0", "GPU 0", "GPU 1"] * 2
    use = dl.link_utilisation(watch.frame())
    assert list(use.peak_GBps.round(0)) == [450, 63, 63]
    with pytest.raises(dl.DcgmError, match="-33"):
        dl.watch_links(source="dcgm")
    with pytest.raises(ProcessLookupError):
        os.kill(int(program.with_name("dcgmi.pid").read_text()), 0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "DCGM says: nothing"),
        ("say('#Entity   NVLTX\\nID\\n')", "a heading and no samples"),
        ("say('hello\\n')", "not the output of dmon"),
        ("time.sleep(60)", "nothing for 0.3 s"),
    ],
)
def test_a_tool_that_says_nothing_of_use_is_an_error_and_no_hang(dcgmi, body, said, monkeypatch):
    monkeypatch.setattr("ddplab.dcgm.dcgmi._PATIENCE_S", 0.1 if "sleep" in body else 10.0)
    dcgmi(body)
    with pytest.raises(dl.DcgmError, match=said):
        DcgmSource(0.2)


def test_without_the_tool_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(dl.GpuUnavailable, match="install datacenter-gpu-manager"):
        DcgmSource(1.0)

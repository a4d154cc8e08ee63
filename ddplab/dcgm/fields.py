"""DCGM's fields that matter for communication, as data: what `dcgmi dmon -e ID` prints, and in which unit.

The output says little: most columns carry no unit, a column called PCITX looks like a counter of bytes and is a rate,
and 203 looks like a bandwidth to whoever copied the number from somewhere. Ids, short names and printed units are those
of DCGM 4.6.0 (dcgmlib/dcgm_fields.h, dcgmlib/src/dcgm_fields.cpp); what a value means comes from the same header, from
DcgmCacheManager.cpp and, for rate against counter, from NVIDIA's answer in dcgm-exporter issue 87.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

ANY, VOLTA, NVLINK, SWITCH4 = "all", "data-centre, Volta or newer", "with NVLink", "with NVLink, DCGM 4.6"
_MOST_LINKS = 18  # per-link fields 1040 to 1075; NVLink generations with more links have LINK entities instead


@dataclass(frozen=True)
class DcgmField:
    """One DCGM field.

    id: for `-e`.  short: its heading in dmon.  name: its constant, without DCGM_FI_.  unit: of the printed number.
    kind: "gauge", a state now; "rate", an average over the sampling interval; "counter", grows until a reset.
    si: what the printed number is multiplied with to give bytes, bytes a second, or a fraction of 1; None where that
    makes no sense.  gpus: which GPUs report it.  profiling: True where it needs the profiling counters, and with them
    a permission (see `explain_dcgm`).  link, way: "NVLink", "PCIe"; "tx", "rx" or "both"; empty for other fields.
    """

    id: int
    short: str
    name: str
    unit: str
    kind: str
    si: float | None = None
    gpus: str = ANY
    profiling: bool = False
    link: str = ""
    way: str = ""
    note: str = ""


def _prof(id: int, short: str, name: str, note: str) -> DcgmField:
    return DcgmField(id, short, f"PROF_{name}_UTIL_RATIO", "0..1", "rate", 1.0, VOLTA, True, note=note)


def _bytes(id: int, short: str, name: str, link: str, way: str, gpus: str = VOLTA, note: str = "") -> DcgmField:
    return DcgmField(id, short, f"PROF_{name}", "B/s", "rate", 1.0, gpus, True, link, way, note)


_HEADERS = "payload and headers"
# The driver's KiB a second, divided by 1000 and printed as MB/s: 2.4% more than it says.
_MB = {"unit": "MB/s", "kind": "rate", "si": 1024e3, "gpus": NVLINK}

_FIELDS = (
    DcgmField(54, "UUID#", "DEV_GPU_UUID", "text", "gauge"),
    DcgmField(100, "SMCLK", "DEV_SM_CLOCK", "MHz", "gauge"),
    DcgmField(101, "MMCLK", "DEV_MEM_CLOCK", "MHz", "gauge"),
    DcgmField(140, "MMTMP", "DEV_MEMORY_TEMP_CELSIUS", "C", "gauge"),
    DcgmField(150, "TMPTR", "DEV_GPU_TEMP_CELSIUS", "C", "gauge"),
    DcgmField(155, "POWER", "DEV_BOARD_POWER_WATTS", "W", "gauge"),
    DcgmField(
        200, "TXTPT", "DEV_PCIE_TX_THROUGHPUT", "KB/s", "rate", 1e3, link="PCIe", way="tx",
        note="deprecated: DCGM 4.6 always answers N/A; 1 KB taken as 1000 B",
    ),
    DcgmField(
        201, "RXTPT", "DEV_PCIE_RX_THROUGHPUT", "KB/s", "rate", 1e3, link="PCIe", way="rx",
        note="deprecated: DCGM 4.6 always answers N/A; 1 KB taken as 1000 B",
    ),
    DcgmField(202, "RPCTR", "DEV_PCIE_REPLAY_TOTAL", "count", "counter", note="PCIe retries"),
    DcgmField(
        203, "GPUTL", "DEV_GPU_UTIL_RATIO", "percent", "gauge", 0.01,
        note="time with any kernel running, waiting NCCL kernels included; not a bandwidth",
    ),
    DcgmField(
        204, "MCUTL", "DEV_MEM_COPY_UTIL", "percent", "gauge", 0.01,
        note="time in which the GPU's own memory was read or written; not a bandwidth",
    ),
    DcgmField(250, "FBTTL", "DEV_FB_TOTAL", "MiB", "gauge"),
    DcgmField(251, "FBFRE", "DEV_FB_FREE", "MiB", "gauge"),
    DcgmField(252, "FBUSD", "DEV_FB_USED", "MiB", "gauge"),
    DcgmField(409, "NFELT", "DEV_NVLINK_CRC_FLIT_ERROR_TOTAL", "count", "counter", gpus=NVLINK),
    DcgmField(429, "NRELT", "DEV_NVLINK_REPLAY_ERROR_TOTAL", "count", "counter", gpus=NVLINK),
    DcgmField(439, "NRCLT", "DEV_NVLINK_RECOVERY_ERROR_TOTAL", "count", "counter", gpus=NVLINK),
    DcgmField(
        449, "NBWLT", "DEV_NVLINK_THROUGHPUT_TOTAL", **_MB, link="NVLink", way="both",
        note="both directions together; the driver's KiB/s over 1000, so 1 is 1.024 MB/s",
    ),
    _prof(1001, "GRACT", "GR_ENGINE", "a compute or graphics context is busy"),
    _prof(1002, "SMACT", "SM", "cycles in which an SM has a warp"),
    DcgmField(1003, "SMOCC", "PROF_SM_OCCUPANCY_RATIO", "0..1", "rate", 1.0, VOLTA, True, note="warps over the most"),
    _prof(1004, "TENSO", "TENSOR", "the tensor cores are busy"),
    _prof(1005, "DRAMA", "DRAM", "the GPU's own memory is read or written"),
    _prof(1006, "FP64A", "FP64", "the fp64 pipe is busy"),
    _prof(1007, "FP32A", "FP32", "the fp32 pipe is busy"),
    _prof(1008, "FP16A", "FP16", "the fp16 pipe is busy, tensor cores aside"),
    _bytes(1009, "PCITX", "PCIE_TX_BYTES", "PCIe", "tx", note=f"{_HEADERS}; N/A for a MIG instance, by design"),
    _bytes(1010, "PCIRX", "PCIE_RX_BYTES", "PCIe", "rx", note=f"{_HEADERS}; N/A for a MIG instance, by design"),
    _bytes(
        1011, "NVLTX", "NVLINK_TX_BYTES", "NVLink", "tx", NVLINK,
        "all links; with headers by the header file, without by the exporter's text: the sources conflict",
    ),
    _bytes(1012, "NVLRX", "NVLINK_RX_BYTES", "NVLink", "rx", NVLINK, "as 1011"),
    *(
        _bytes(1040 + 2 * i + j, f"NVL{i}{w[0].upper()}", f"NVLINK_L{i}_{w.upper()}_BYTES", f"NVLink {i}", w, NVLINK)
        for i in range(_MOST_LINKS)
        for j, w in enumerate(("tx", "rx"))
    ),
    DcgmField(1091, "PCICTX", "PROF_PCIE_TX_BYTES_TOTAL", "B", "counter", 1.0, VOLTA, True, "PCIe", "tx"),
    DcgmField(1092, "PCICRX", "PROF_PCIE_RX_BYTES_TOTAL", "B", "counter", 1.0, VOLTA, True, "PCIe", "rx"),
    DcgmField(1201, "NLXMITB", "DEV_NVLINK_TX_BYTES_TOTAL", "B", "counter", 1.0, NVLINK, False, "NVLink", "tx"),
    DcgmField(1203, "NLRCVB", "DEV_NVLINK_RX_BYTES_TOTAL", "B", "counter", 1.0, NVLINK, False, "NVLink", "rx"),
    DcgmField(1529, "NVLBWL", "DEV_NVLINK_THROUGHPUT_PER_LINK", **_MB | {"gpus": SWITCH4}, link="NVLink", way="both"),
    DcgmField(1530, "NVLTXL", "DEV_NVLINK_TX_THROUGHPUT_PER_LINK", **_MB | {"gpus": SWITCH4}, link="NVLink", way="tx"),
    DcgmField(1531, "NVLRXL", "DEV_NVLINK_RX_THROUGHPUT_PER_LINK", **_MB | {"gpus": SWITCH4}, link="NVLink", way="rx"),
    _bytes(1532, "NVLPTX", "NVLINK_TX_BYTES_PER_LINK", "NVLink", "tx", SWITCH4, "a LINK entity each"),
    _bytes(1533, "NVLPRX", "NVLINK_RX_BYTES_PER_LINK", "NVLink", "rx", SWITCH4, "a LINK entity each"),
)  # fmt: skip


@cache
def _index() -> dict[int | str, DcgmField]:
    return {key: field for field in _FIELDS for key in (field.id, field.short)}


def dcgm_field(key: int | str) -> DcgmField | None:
    """The field with this id (203, "203") or short name ("GPUTL"); None for one that the table does not hold."""
    if isinstance(key, str):
        key = int(key) if key.isascii() and key.isdigit() and len(key) < 6 else key.upper()
    return _index().get(key)


def dcgm_fields(*keys: int | str) -> pd.DataFrame:
    """The table of fields, or the rows of some ids and short names: `dcgm_fields(203, 204)`. KeyError for others."""
    import pandas as pd

    chosen = []
    for key in keys:
        if (field := dcgm_field(key)) is None:
            raise KeyError(f"no field {key!r} in this table; `dcgmi dmon -l` lists all of DCGM's")
        chosen.append(field)
    return pd.DataFrame([asdict(field) for field in chosen or _FIELDS])

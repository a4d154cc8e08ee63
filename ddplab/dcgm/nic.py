"""The byte counters of this machine's network devices, and of emulated hosts.

The kernel counts what passes through its network stack. RDMA does not: InfiniBand and RoCE adapters keep counters of
their own in sysfs, in units of four bytes, which are read here too. psutil asks the kernel on Linux, macOS and Windows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplab.dcgm.peaks import LinkPeak

if TYPE_CHECKING:
    from ddplab.hosts import Hosts

_INFINIBAND = Path("/sys/class/infiniband")
_WORD = 4  # port_xmit_data counts octets divided by 4 (Documentation/ABI/stable/sysfs-class-infiniband)


class NicSource:
    """Every network device that is up, `lo` included: `read()` gives cumulative bytes, `peaks` what drivers claim."""

    name = "NIC counters of this machine"

    def __init__(self, infiniband: Path = _INFINIBAND) -> None:
        import psutil

        self._psutil, self._infiniband = psutil, infiniband
        # A virtual device claims a number that nothing enforces; 0 means that the driver does not know.
        self.peaks: dict[tuple[str, str], LinkPeak] = {
            (name, "NIC"): LinkPeak(stats.speed / 8e3, f"{stats.speed:g} Mbit/s", "reported")
            for name, stats in psutil.net_if_stats().items()
            if 0 < stats.speed < 65535
        }
        for device, port in self._ports():
            text = _read(port / "rate")
            if match := re.match(r"(\d{1,6}(?:\.\d)?) Gb/sec", text):
                self.peaks[device, "RDMA"] = LinkPeak(float(match[1]) / 8, text.strip(), "reported")

    def read(self) -> list[dict[str, Any]]:
        """Rows with device, link, tx_bytes, rx_bytes since boot."""
        up = {name for name, stats in self._psutil.net_if_stats().items() if stats.isup}
        # Not psutil's own mending of counters that went down: a gap is more honest than a guess.
        counted = self._psutil.net_io_counters(pernic=True, nowrap=False)
        rows = [
            {"device": name, "link": "NIC", "tx_bytes": c.bytes_sent, "rx_bytes": c.bytes_recv}
            for name, c in counted.items()
            if name in up
        ]
        for device, port in self._ports():
            words = [_read(port / "counters" / f"port_{way}_data").strip() for way in ("xmit", "rcv")]
            if all(re.fullmatch(r"\d{1,20}", word) for word in words):
                sent, received = (int(word) * _WORD for word in words)
                rows.append({"device": device, "link": "RDMA", "tx_bytes": sent, "rx_bytes": received})
        return rows

    def _ports(self) -> list[tuple[str, Path]]:
        ports = sorted(self._infiniband.glob("*/ports/*"))
        return [(f"{port.parents[1].name}:{port.name}", port) for port in ports]

    def close(self) -> None:
        """Nothing is open."""


class HostSource:
    """The links of `ddplab.Hosts`: as their kernel counts them, against the rate that shapes them."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.name = f"kernel counters of {hosts.n} emulated hosts"
        peak = LinkPeak(hosts.link.rate_Bps / 1e9, f"{hosts.link}, emulated", "given")
        self.peaks = {(f"host {i}", "NIC"): peak for i in range(hosts.n)}

    def read(self) -> list[dict[str, Any]]:
        """Rows with device, link, tx_bytes, rx_bytes since the hosts came up."""
        return [
            {"device": f"host {i}", "link": "NIC", "tx_bytes": c.sent, "rx_bytes": c.received}
            for i, c in enumerate(self._hosts.counters())
        ]

    def close(self) -> None:
        """The hosts belong to the caller."""


def _read(path: Path) -> str:
    try:
        return path.read_text("utf8", "replace")
    except OSError:
        return ""

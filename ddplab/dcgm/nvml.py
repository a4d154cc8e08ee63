"""NVLink and PCIe traffic through NVML (the `nvidia-ml-py` package). Not run on a GPU yet: tested against a fake.

NVLink: the driver's cumulative data counters, summed over the links of a GPU (KiB in the fields 138 and 139; bytes in
202 and 204, which newer generations have instead). PCIe: the driver's own average over the last 20 ms, in KB/s.
"""

from __future__ import annotations

from typing import Any

from ddplab.dcgm.errors import GpuUnavailable, gpu_failure
from ddplab.dcgm.peaks import LinkPeak, link_peak

ALL_LINKS = 2**32 - 1  # as scopeId: all links of the GPU together
_MOST_LINKS = 36
_KIB = 1024
# value type -> member of the union
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class NvmlSource:
    """All GPUs of the driver. Raises GpuUnavailable, with what to do, where there is no driver or no GPU."""

    name = "NVML (not run on a GPU yet)"

    def __init__(self, nvml: Any = None) -> None:
        if nvml is None:
            try:
                import pynvml as nvml
            except ImportError:
                raise GpuUnavailable("nvidia-ml-py is not installed. What to do: pip install nvidia-ml-py") from None
        self._nvml = nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            hint = "no NVIDIA driver answers on this machine; see `nvidia-smi`"
            raise gpu_failure(str(error)) or GpuUnavailable(f"NVML: {error}. What to do: {hint}") from None
        self._open = True
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            if not handles:
                raise GpuUnavailable("the driver runs and sees no GPU. What to do: `lspci | grep -i nvidia`")
            self._gpus = [(f"GPU {i}", handle) for i, handle in enumerate(handles)]
            self.peaks: dict[tuple[str, str], LinkPeak] = {}
            for device, handle in self._gpus:
                self._peaks(device, handle)
        except nvml.NVMLError as error:
            self.close()
            raise GpuUnavailable(f"NVML: {error}. What to do: see `nvidia-smi`") from None
        except BaseException:
            self.close()
            raise

    def read(self) -> list[dict[str, Any]]:
        """Rows with device, link and tx_bytes, rx_bytes (cumulative) or tx_GBps, rx_GBps (None: not there)."""
        rows = []
        for device, handle in self._gpus:
            if (moved := self._nvlink(handle)) is not None:
                rows.append({"device": device, "link": "NVLink", "tx_bytes": moved[0], "rx_bytes": moved[1]})
            n = self._nvml
            sent, received = (
                self._ask(n.nvmlDeviceGetPcieThroughput, handle, way)
                for way in (n.NVML_PCIE_UTIL_TX_BYTES, n.NVML_PCIE_UTIL_RX_BYTES)
            )
            row = {"device": device, "link": "PCIe"}
            rows.append(
                row | {f"{way}_GBps": None if v is None else v / 1e6 for way, v in (("tx", sent), ("rx", received))}
            )
        return rows

    def close(self) -> None:
        """Let go of the driver."""
        if self._open:
            self._open = False
            self._ask(self._nvml.nvmlShutdown)

    def _nvlink(self, handle: Any) -> tuple[int, int] | None:
        n = self._nvml
        for tx, rx, unit in (
            (n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _KIB),
            (n.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES, n.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES, 1),
        ):
            values = self._fields(handle, (tx, ALL_LINKS), (rx, ALL_LINKS))
            if None not in values:
                return values[0] * unit, values[1] * unit
        return None

    def _fields(self, handle: Any, *wanted: Any) -> list[Any]:
        found = self._ask(self._nvml.nvmlDeviceGetFieldValues, handle, list(wanted))
        if found is None:
            return [None] * len(wanted)
        return [None if v.nvmlReturn else getattr(v.value, _MEMBERS[v.valueType]) for v in found]

    def _peaks(self, device: str, handle: Any) -> None:
        n = self._nvml
        active = sum(self._ask(n.nvmlDeviceGetNvLinkState, handle, link) == 1 for link in range(_MOST_LINKS))
        (speed,) = self._fields(handle, n.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON)
        if active and speed:
            text = f"{active} active NVLinks, line rate {speed / 1e3:g} GB/s each"
            self.peaks[device, "NVLink"] = LinkPeak(active * speed / 1e3, text, "reported", "NVLink", active)
        # The current generation falls when the GPU idles; the highest is what traffic will get.
        generation = self._ask(n.nvmlDeviceGetMaxPcieLinkGeneration, handle)
        width = self._ask(n.nvmlDeviceGetCurrPcieLinkWidth, handle)
        if generation and width:
            try:
                self.peaks[device, "PCIe"] = link_peak(f"pcie{generation} x{width}")
            except ValueError:  # a generation that is newer than the table
                pass

    def _ask(self, call: Any, *args: Any) -> Any:
        """The answer, or None where this GPU or driver does not have it."""
        try:
            return call(*args)
        except self._nvml.NVMLError:
            return None

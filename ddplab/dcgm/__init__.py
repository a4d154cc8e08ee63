"""What a link says: DCGM, NVML and nvidia-smi, this machine's NIC counters, and a verdict on what they report."""

from ddplab.dcgm.dmon import parse_dmon
from ddplab.dcgm.errors import DcgmError, GpuUnavailable, explain_dcgm
from ddplab.dcgm.fields import DcgmField, dcgm_field, dcgm_fields
from ddplab.dcgm.live import LinkWatch, watch_links
from ddplab.dcgm.peaks import LinkPeak, link_peak
from ddplab.dcgm.rates import link_rates
from ddplab.dcgm.smi import nvlink_rates, parse_nvlink
from ddplab.dcgm.topo import GpuTopology, parse_topo
from ddplab.dcgm.verdict import LinkVerdict, link_utilisation, link_verdict

__all__ = [
    "DcgmError",
    "DcgmField",
    "GpuTopology",
    "GpuUnavailable",
    "LinkPeak",
    "LinkVerdict",
    "LinkWatch",
    "dcgm_field",
    "dcgm_fields",
    "explain_dcgm",
    "link_peak",
    "link_rates",
    "link_utilisation",
    "link_verdict",
    "nvlink_rates",
    "parse_dmon",
    "parse_nvlink",
    "parse_topo",
    "watch_links",
]

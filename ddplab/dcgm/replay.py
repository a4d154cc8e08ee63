"""Which of the texts that a terminal holds is this: dmon, nvidia-smi nvlink, topo -m, or a failure?"""

from __future__ import annotations

import re

from ddplab.dcgm.errors import gpu_failure
from ddplab.dcgm.topo import is_topo


def recognise(text: str) -> str:
    """ "dmon", "topo", "nvlink" (states) or "nvlink counters". Raises GpuUnavailable for the tools' own failures and
    ValueError for a text that is none of these."""
    if not isinstance(text, str):
        raise ValueError(f"a text is recognised, not {type(text).__name__}")
    if re.search(r"^[ \t]*#[ ]?Entity\b", text, re.MULTILINE):
        return "dmon"
    if is_topo(text):
        return "topo"
    if re.search(r"^[ \t]*Link \d+: .*(?:[TR]x\d?: )", text, re.MULTILINE):
        return "nvlink counters"
    if re.search(r"^[ \t]*Link \d+: ", text, re.MULTILINE) or re.search(r"^GPU \d+: .*\(UUID: ", text, re.MULTILINE):
        return "nvlink"
    if failure := gpu_failure(text):
        raise failure
    if re.search(
        r"^[ \t]*Error\b|Error setting watches|Host engine|No data returned", text, re.MULTILINE | re.IGNORECASE
    ):
        return "dmon"  # an error text without a table: its reader explains it
    raise ValueError(
        "this is none of the texts that are read here: dcgmi dmon, nvidia-smi nvlink -s, nvidia-smi nvlink -gt d, "
        "nvidia-smi topo -m"
    )

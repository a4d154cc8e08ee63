"""From DCGM's columns to the traffic of a link: one table whatever the field, its unit, and rate or counter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplab.dcgm.fields import dcgm_field

if TYPE_CHECKING:
    import pandas as pd


def link_rates(frame: pd.DataFrame) -> pd.DataFrame:
    """The traffic in a `parse_dmon` table, in GB/s: one row a sample, device and link.

    Columns: sample, time_s (if known), device ("GPU 0"), link ("NVLink", "PCIe", "NVLink 3"), tx_GBps, rx_GBps (1e9
    bytes a second, one direction each). DCGM's rates stay rates; its counters become rates between samples, which needs
    time_s; a counter that falls is a ValueError. ValueError too where no column is about a link.
    """
    import pandas as pd

    linked = [f for name in frame.columns if (f := dcgm_field(str(name))) and f.way]
    found = [f for f in linked if f.way != "both"]
    if linked and not found:
        raise ValueError(f"{linked[0].short} adds both directions: ask dmon for 1011 and 1012, one each")
    if not found:
        raise ValueError("no column here is the traffic of a link: ask dmon for 1009 to 1012")
    parts: dict[tuple, dict] = {}
    for (entity, number), part in frame.groupby(["entity", "id"], sort=False):
        for f in found:
            values = part[f.short].astype(float) * f.si
            if f.kind == "counter":
                if "time_s" not in part:
                    raise ValueError(f"{f.short} is a counter: parse_dmon needs interval_s to make a rate of it")
                values = values.diff()
                if (values < 0).any():
                    raise ValueError(f"{entity} {number}: counter reset, {f.short} falls; leave that sample out")
                values = values / part["time_s"].diff()
            single = entity.endswith(" LINK")
            device = entity.removesuffix(" LINK") if single else f"{entity} {number}"
            link = f"{f.link} {number}" if single else f.link
            for row, value in zip(part.itertuples(), values, strict=True):
                place = parts.setdefault(
                    (row.sample, device, link),
                    {
                        "sample": row.sample,
                        **({"time_s": row.time_s} if "time_s" in frame else {}),
                        "device": device,
                        "link": link,
                        "tx_GBps": float("nan"),
                        "rx_GBps": float("nan"),
                    },
                )
                place[f"{f.way}_GBps"] = value / 1e9
    return pd.DataFrame(sorted(parts.values(), key=lambda row: row["sample"]))

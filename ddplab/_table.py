"""From the times of all ranks to the table that nccl-tests prints."""

from __future__ import annotations

import math
import os
import platform
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from ddplab.hosts import Hosts


def frame_of(
    seen: list[dict[str, Any]], names: list[str], counts: list[int], op: str, dtype: str, hosts: Hosts | None
) -> pd.DataFrame:
    """One row a size and algorithm, from what `_measure.measure` returned on each rank. See `bench` for the columns."""
    n, item = seen[0]["ranks"], seen[0]["item_bytes"]
    rows = []
    for i, count in enumerate(counts):
        for a, name in enumerate(names):
            ranks = [one["times"][i][a] for one in seen]
            runs = np.max([times.seconds for times in ranks], axis=0)  # the slowest rank's time is the collective's
            time = float(np.median(runs))
            algbw = count * item / time / 1e9
            busbw = algbw * 2 * (n - 1) / n
            spread = np.percentile(runs, [0, 25, 75, 100]) * 1e6
            sent = None
            if ranks[0].sent is not None:
                sent = round(float(np.median(np.max([times.sent for times in ranks], axis=0))))
            rows.append(
                {
                    "size_B": count * item,
                    "count": count,
                    "type": dtype,
                    "redop": op,
                    "algorithm": name,
                    "time_us": time * 1e6,
                    "algbw_GBps": algbw,
                    "busbw_GBps": busbw,
                    "errors": None if ranks[0].wrong is None else sum(times.wrong for times in ranks),
                    **dict(zip(("time_min_us", "time_p25_us", "time_p75_us", "time_max_us"), spread, strict=True)),
                    "sent_B": sent,
                    "busbw_pct": busbw * 1e9 / hosts.link.payload_Bps * 100 if hosts is not None else math.nan,
                }
            )
    frame = pd.DataFrame(rows).astype({"errors": "Int64", "sent_B": "Int64"})
    frame.attrs = {key: seen[0][key] for key in ("ranks", "backend", "device", "versions")} | {
        "runs": len(seen[0]["times"][0][0].seconds),
        "time": "median of the slowest rank's times, measured",
        "hosts": hosts.n if hosts is not None else None,
        "link": str(hosts.link) if hosts is not None else None,
        "peak_GBps": hosts.link.payload_Bps / 1e9 if hosts is not None else None,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
    }
    return frame


def table(frame: pd.DataFrame) -> str:
    """The frame as nccl-tests would print it; what a percentage refers to is said below it."""
    about, on_links = frame.attrs, frame.attrs["peak_GBps"] is not None
    where = f"{about['hosts']} emulated hosts, {about['link']} links" if on_links else "this machine, no emulated links"
    pct = f"{'of link':>8}" if on_links else ""
    lines = [
        f"# all_reduce: {about['ranks']} ranks, {about['backend']} on {about['device']}, {where}",
        f"# {about['machine']}; {about['versions']}",
        f"# time: {about['time']}; {about['runs']} runs; spread: quartiles",
        "#",
        f"#{'size':>11} {'count':>11} {'type':>8} {'redop':>7} {'algorithm':>16} {'time':>11} {'spread':>19} "
        f"{'algbw':>8} {'busbw':>8}{pct} {'#wrong':>7}",
        f"#{'(B)':>11} {'(elements)':>11} {'':>8} {'':>7} {'':>16} {'(us)':>11} {'(us)':>19} "
        f"{'(GB/s)':>8} {'(GB/s)':>8}{'(%)' if on_links else '':>{len(pct)}}",
    ]
    for row in frame.itertuples(index=False):
        share = f"{row.busbw_pct:8.1f}" if on_links else ""
        spread = f"{row.time_p25_us:.1f}-{row.time_p75_us:.1f}"
        wrong = "N/A" if pd.isna(row.errors) else row.errors
        lines.append(
            f" {row.size_B:>11} {row[1]:>11} {row.type:>8} {row.redop:>7} {row.algorithm:>16} {row.time_us:>11.1f} "
            f"{spread:>19} {row.algbw_GBps:>8.4g} {row.busbw_GBps:>8.4g}{share} {wrong:>7}"
        )
    if on_links:
        lines.append(
            f"# of link: busbw over {about['peak_GBps']:.4g} GB/s, the rate of payload through one host's link"
        )
    else:
        lines.append("# no percentage: without emulated links there is no known peak to compare with")
    wrong = frame["errors"].sum() if frame["errors"].notna().all() else None
    verdict = "not checked" if wrong is None else f"{wrong} {'OK' if wrong == 0 else 'FAILED'}"
    means = ", ".join(
        f"{name} {busbw:.4g}" for name, busbw in frame.groupby("algorithm", sort=False)["busbw_GBps"].mean().items()
    )
    lines += [f"# Out of bounds values : {verdict}", f"# Avg bus bandwidth    : {means} (GB/s)"]
    return "\n".join(lines)

"""What `ddplab links --replay` prints: rates of links, states of links, the topology, each as a table or as JSON."""

from __future__ import annotations

import argparse
import math
import sys

from ddplab._files import open_to_read
from ddplab.cli import output
from ddplab.cli.values import Problem

_USE = {
    "device": "device",
    "link": "link",
    "samples": "samples",
    "tx_mean_GBps": "tx_mean",
    "tx_max_GBps": "tx_max",
    "rx_mean_GBps": "rx_mean",
    "rx_max_GBps": "rx_max",
    "peak_GBps": "peak",
    "mean_pct": "mean_%",
    "max_pct": "max_%",
}
_MOST_BYTES = 64 * 2**20  # of a replayed file


def replay(args: argparse.Namespace, peak: object) -> None:
    """Recognise the texts of `args.replay` and print what they say. Raises Problem."""
    from ddplab import dcgm
    from ddplab.dcgm.replay import recognise

    texts = [_read(name) for name in args.replay]
    try:
        kinds = {recognise(text) for text in texts}
        if len(texts) == 2 and kinds == {"nvlink counters"}:
            rates = dcgm.nvlink_rates(*texts, args.interval)
            return _rates(args, "nvlink counters", rates, peak, [])
        if len(texts) != 1:
            raise Problem("--replay reads one file, or two readings of `nvidia-smi nvlink -gt d`")
        kind, text = kinds.pop(), texts[0]
        if kind == "topo":
            return _topo(args, dcgm.parse_topo(text))
        if kind == "nvlink counters":
            raise Problem("one reading of counters has no rate; give two, and the seconds between them as --interval")
        if kind == "nvlink":
            return _states(args, dcgm.parse_nvlink(text))
        frame = dcgm.parse_dmon(text, args.interval)
        try:
            rates = dcgm.link_rates(frame)
        except ValueError as error:
            return _no_rates(args, frame, str(error))
        return _rates(args, kind, rates, peak, frame.attrs["warnings"])
    except (dcgm.DcgmError, dcgm.GpuUnavailable) as error:
        raise Problem(str(error), 1) from error
    except ValueError as error:
        raise Problem(f"{args.replay[0]}: {error}") from error


def _rates(args: argparse.Namespace, kind: str, rates, peak: object, warnings: list[str]) -> None:
    from ddplab.dcgm import link_utilisation

    use = link_utilisation(rates, peak)
    if args.json:
        return output.print_json({"kind": kind, "rows": rows_of(rates), "links": rows_of(use), "warnings": warnings})
    summary(use, None)
    for warning in warnings:
        print(output.visible(f"\nNote: {warning}."))


def _no_rates(args: argparse.Namespace, frame, why: str) -> None:
    rows, warnings = rows_of(frame), frame.attrs["warnings"]
    if args.json:
        return output.print_json({"kind": "dmon", "rows": rows, "links": [], "warnings": [*warnings, why]})
    means = frame.drop(columns=["sample", "time_s"]).groupby(["entity", "id"], sort=False).mean(numeric_only=True)
    means = means.reset_index()
    print(f"Means over {frame['sample'].nunique()} samples, in DCGM's own units:\n")
    print(output.table(rows_of(means), {name: name for name in means}))
    for warning in dict.fromkeys([*warnings, why]):
        print(output.visible(f"\nNote: {warning}."))


def _states(args: argparse.Namespace, frame) -> None:
    rows = []
    for gpu, part in frame.groupby("gpu"):
        up = part[part["active"].astype("boolean").fillna(False).astype(bool)]
        speed = float(up["speed_GBps"].sum())
        row = {"gpu": f"GPU {gpu}", "name": part["name"].iloc[0], "links_up": len(up), "links": len(part)}
        rows.append(row | {"line_rate_GBps": speed})
    if args.json:
        return output.print_json({"kind": "nvlink", "rows": rows_of(frame), "gpus": rows})
    print(output.table(rows, {name: name for name in rows[0]}))
    print("\nLine rate of one direction. Data can get less: 25 of 26.562 GB/s for NVLink 4.")
    down = [row["gpu"] for row in rows if row["links_up"] < row["links"]]
    if down:
        print(f"Inactive links on {', '.join(down)}: some boards have fewer; if its peers have more, look at it.")


def _topo(args: argparse.Namespace, topology) -> None:
    rows = rows_of(topology.affinity())
    if args.json:
        cells = [{"from": a, "to": b, "path": cell} for (a, b), cell in topology.cells.items()]
        return output.print_json({"kind": "topo", "gpus": rows, "cells": cells, "nics": topology.nics})
    print(topology.matrix().to_string(), end="\n\n")
    for row in rows:
        where = f"NUMA node {row['numa']}" if row["numa"] is not None else "no NUMA node stated"
        nic = f"nearest NIC {row['nic']} ({row['path']})" if row["nic"] else "no NIC in the matrix"
        print(output.visible(f"{row['gpu']}: {where}, {nic}; {row['advice']}."))


def summary(use, peaks: dict | None) -> None:
    """Print mean and most of each link, and against which peak."""
    rows = rows_of(use)
    known = any(row["against"] for row in rows)
    columns = {key: title for key, title in _USE.items() if known or key not in ("peak_GBps", "mean_pct", "max_pct")}
    print("\nGB/s in each direction, mean and most:\n")
    print(output.table(rows, columns))
    if not known:
        print("\nNo peak is known: --peak nvlink4, pcie5, 25gbit ... adds percentages.")
    for text in dict.fromkeys(row["against"] for row in rows if row["against"]):
        print(f"\nAgainst {text}." + (" A virtual device can claim any speed." if peaks else ""))


def rows_of(frame) -> list[dict]:
    """The rows of a table with None for what is not there."""
    rows = [output.plain(row) for row in frame.to_dict("records")]
    return [{key: None if isinstance(v, float) and math.isnan(v) else v for key, v in row.items()} for row in rows]


def _read(name: str) -> str:
    try:
        if name == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with open_to_read(name) as file:
                data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Problem(f"cannot read '{name}': {error.strerror}") from error
    if len(data) > _MOST_BYTES:
        raise Problem(f"'{name}' is larger than 64 MiB; cut out the part that you want to see")
    if b"\0" in data:
        raise Problem(f"'{name}' is not text")
    return data.decode("utf-8", "replace")

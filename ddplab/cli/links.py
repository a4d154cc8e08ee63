"""Watch the traffic of links: NVLink and PCIe through DCGM where there is one, else through NVML, else the counters of
this machine's network devices. Rates are averages over the interval, one direction each, in GB/s of 1e9 bytes; with a
peak they are also parts of it. Ctrl-C ends it with a summary.

Or read what a job left (--replay): the output of dcgmi dmon, nvidia-smi nvlink -s, nvidia-smi topo -m, or two readings
of nvidia-smi nvlink -gt d that lie --interval seconds apart. The kind of text is recognised.

Or judge (--busbw, --reference, --exposed, --utilisation, --longest): is the link healthy, and does the step wait for
it? The two rules of the article are shown beside."""

from __future__ import annotations

import argparse
import math

from ddplab.cli import output
from ddplab.cli.values import Problem, count, one_of, seconds

EXAMPLE = """\
ddplab links --interval 0.5 --count 20 --peak 25gbit
ddplab links --replay dmon.txt --peak nvlink4
ddplab links --replay before.txt after.txt --interval 10
ddplab links --busbw 150 --reference 235 --exposed 0.2"""

_RATES = ("time_s", "device", "link", "tx_GBps", "rx_GBps")
_LINE = "{:>9}  {:<12} {:<10} {:>10} {:>10}"
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


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="S", help="seconds a sample (default 1)")
    parser.add_argument("--count", type=count, metavar="N", help="samples (default: until Ctrl-C)")
    parser.add_argument(
        "--source", type=one_of(("auto", "dcgm", "nvml", "nic"), "source"), default="auto", help="auto, dcgm, nvml, nic"
    )
    parser.add_argument("--replay", nargs="+", metavar="FILE", help="read these instead; - is standard input")
    parser.add_argument(
        "--peak",
        action="append",
        metavar="L",
        help="hold rates against it: nvlink4, pcie5, 'pcie4 x8', 25gbit, 300GB/s (one direction); may be given twice",
    )
    parser.add_argument("--fields", action="store_true", help="list DCGM's fields: what their numbers are")
    parser.add_argument("--json", action="store_true", help="print JSON; live: one object a line")
    judge = parser.add_argument_group("a verdict")
    judge.add_argument("--busbw", type=_positive, metavar="GBPS", help="bus bandwidth of the job")
    judge.add_argument("--reference", type=_positive, metavar="GBPS", help="of a benchmark on the same machines")
    judge.add_argument("--exposed", type=_part, metavar="P", help="exposed communication over step, 0 to 1")
    judge.add_argument("--utilisation", type=_part, metavar="P", help="mean over peak of the link, 0 to 1")
    judge.add_argument("--longest", type=_positive, metavar="P", help="longest all-reduce over backward")


def run(args: argparse.Namespace) -> int | None:
    judged = [args.busbw, args.reference, args.exposed, args.utilisation, args.longest]
    wanted = [args.replay is not None, args.fields, any(value is not None for value in judged)]
    if sum(wanted) > 1:
        raise Problem("--replay, --fields and a verdict are three different things; ask for one of them")
    if args.fields:
        return _fields(args)
    if wanted[2]:
        return _judge(args)
    peak = None
    if args.peak:
        from ddplab.dcgm import link_peak

        try:
            peak = [link_peak(text) for text in args.peak]
        except ValueError as error:
            raise Problem(str(error)) from error
    return _replay(args, peak) if args.replay else _watch(args, peak)


def _watch(args: argparse.Namespace, peak: object) -> int | None:
    import json

    from ddplab.dcgm import DcgmError, GpuUnavailable, link_utilisation, watch_links

    try:
        watch = watch_links(args.interval, args.count, args.source)
    except (GpuUnavailable, DcgmError) as error:
        raise Problem(str(error), 1) from error
    except ValueError as error:
        raise Problem(str(error)) from error
    if not args.json:
        print(f"Source: {watch.source}.")
        for why in watch.why:
            print(f"  not {why}")
        print("Averages over the interval, each direction, in GB/s:")
        print(_LINE.format("time_s", "device", "link", "tx", "rx"), flush=True)
    code = None
    try:
        for rows in watch:
            if args.json:
                shown = [{key: row.get(key) for key in ("sample", *_RATES)} for row in rows]
                print(json.dumps(output.plain(shown), allow_nan=False), flush=True)
                continue
            for row in rows:
                cells = (output.cell(row[key]) for key in ("tx_GBps", "rx_GBps"))
                print(_LINE.format(f"{row['time_s']:.2f}", row["device"], row["link"], *cells), flush=True)
    except KeyboardInterrupt:
        code = 130
    except (DcgmError, GpuUnavailable, ValueError) as error:
        raise Problem(str(error), 1) from error
    frame = watch.frame()
    if not args.json and len(frame):
        _summary(link_utilisation(frame, peak), frame.attrs["peaks"] if peak is None else None)
    return code


def _replay(args: argparse.Namespace, peak: object) -> None:
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
        return output.print_json({"kind": kind, "rows": _rows(rates), "links": _rows(use), "warnings": warnings})
    _summary(use, None)
    for warning in warnings:
        print(f"\nNote: {warning}.")


def _no_rates(args: argparse.Namespace, frame, why: str) -> None:
    rows, warnings = _rows(frame), frame.attrs["warnings"]
    if args.json:
        return output.print_json({"kind": "dmon", "rows": rows, "links": [], "warnings": [*warnings, why]})
    means = frame.drop(columns=["sample", "time_s"]).groupby(["entity", "id"], sort=False).mean(numeric_only=True)
    means = means.reset_index()
    print(f"Means over {frame['sample'].nunique()} samples, in DCGM's own units:\n")
    print(output.table(_rows(means), {name: name for name in means}))
    for warning in dict.fromkeys([*warnings, why]):
        print(f"\nNote: {warning}.")


def _states(args: argparse.Namespace, frame) -> None:
    rows = []
    for gpu, part in frame.groupby("gpu"):
        up = part[part["active"].astype("boolean").fillna(False).astype(bool)]
        speed = float(up["speed_GBps"].sum())
        row = {"gpu": f"GPU {gpu}", "name": part["name"].iloc[0], "links_up": len(up), "links": len(part)}
        rows.append(row | {"line_rate_GBps": speed})
    if args.json:
        return output.print_json({"kind": "nvlink", "rows": _rows(frame), "gpus": rows})
    print(output.table(rows, {name: name for name in rows[0]}))
    print("\nLine rate of one direction. Data can get less: 25 of 26.562 GB/s for NVLink 4.")
    down = [row["gpu"] for row in rows if row["links_up"] < row["links"]]
    if down:
        print(f"Inactive links on {', '.join(down)}: some boards have fewer; if its peers have more, look at it.")


def _topo(args: argparse.Namespace, topology) -> None:
    rows = _rows(topology.affinity())
    if args.json:
        cells = [{"from": a, "to": b, "path": cell} for (a, b), cell in topology.cells.items()]
        return output.print_json({"kind": "topo", "gpus": rows, "cells": cells, "nics": topology.nics})
    print(topology.matrix().to_string(), end="\n\n")
    for row in rows:
        where = f"NUMA node {row['numa']}" if row["numa"] is not None else "no NUMA node stated"
        nic = f"nearest NIC {row['nic']} ({row['path']})" if row["nic"] else "no NIC in the matrix"
        print(f"{row['gpu']}: {where}, {nic}; {row['advice']}.")


def _judge(args: argparse.Namespace) -> None:
    from ddplab.dcgm import link_verdict

    verdict = link_verdict(
        busbw_GBps=args.busbw,
        reference_GBps=args.reference,
        exposed=args.exposed,
        utilisation=args.utilisation,
        largest_over_backward=args.longest,
    )
    rows = _rows(verdict.frame())
    if args.json:
        return output.print_json({"says": verdict.says, "rules": rows})
    for row in rows:
        row["holds"] = {True: "yes", False: "no"}.get(row["holds"], "not measured")
    print(output.table(rows, {name: name for name in ("whose", "rule", "limit", "value", "holds")}))
    print(f"\n{verdict.says[0].upper()}{verdict.says[1:]}.")


def _fields(args: argparse.Namespace) -> None:
    from ddplab.dcgm import dcgm_fields

    rows = _rows(dcgm_fields())
    if args.json:
        return output.print_json({"fields": rows})
    for row in rows:
        row["profiling"] = "yes" if row["profiling"] else "-"
    print(output.table(rows, {name: name for name in ("id", "short", "unit", "kind", "profiling", "name")}))
    print("\nrate: an average over the interval; gauge: a state; counter: grows. --json has notes and GPUs.")


def _summary(use, peaks: dict | None) -> None:
    rows = _rows(use)
    known = any(row["against"] for row in rows)
    columns = {key: title for key, title in _USE.items() if known or key not in ("peak_GBps", "mean_pct", "max_pct")}
    print("\nGB/s in each direction, mean and most:\n")
    print(output.table(rows, columns))
    if not known:
        print("\nNo peak is known: --peak nvlink4, pcie5, 25gbit ... adds percentages.")
    for text in dict.fromkeys(row["against"] for row in rows if row["against"]):
        print(f"\nAgainst {text}." + (" A virtual device can claim any speed." if peaks else ""))


def _rows(frame) -> list[dict]:
    """The rows of a table with None for what is not there."""
    rows = [output.plain(row) for row in frame.to_dict("records")]
    return [{key: None if isinstance(v, float) and math.isnan(v) else v for key, v in row.items()} for row in rows]


def _read(name: str) -> str:
    import sys

    try:
        if name == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with open(name, "rb") as file:
                data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Problem(f"cannot read '{name}': {error.strerror}") from error
    if len(data) > _MOST_BYTES:
        raise Problem(f"'{name}' is larger than 64 MiB; cut out the part that you want to see")
    if b"\0" in data:
        raise Problem(f"'{name}' is not text")
    return data.decode("utf-8", "replace")


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return value


def _part(text: str) -> float:
    value = _number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a part; write 0.2 or 20%")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan

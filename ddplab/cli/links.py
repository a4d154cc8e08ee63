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

from ddplab.cli import linktexts, output
from ddplab.cli.values import Problem, count, named, one_of, seconds

EXAMPLE = """\
ddplab links --interval 0.5 --count 20 --peak 25gbit
ddplab links --replay dmon.txt --peak nvlink4
ddplab links --replay before.txt after.txt --interval 10
ddplab links --busbw 150 --reference 235 --exposed 0.2"""

_RATES = ("time_s", "device", "link", "tx_GBps", "rx_GBps")
_LINE = "{:>9}  {:<12} {:<10} {:>10} {:>10}"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="S", help="seconds a sample (default 1)")
    parser.add_argument("--count", type=count, metavar="N", help="samples (default: until Ctrl-C)")
    parser.add_argument(
        "--source", type=one_of(("auto", "dcgm", "nvml", "nic"), "source"), default="auto", help="auto, dcgm, nvml, nic"
    )
    parser.add_argument(
        "--replay", nargs="+", type=named("a file"), metavar="FILE", help="read these instead; - is standard input"
    )
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
    if any(wanted) and (args.count is not None or args.source != "auto"):
        raise Problem("--count and --source are for watching; leave them out with --replay, --fields or a verdict")
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
    return linktexts.replay(args, peak) if args.replay else _watch(args, peak)


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
        linktexts.summary(link_utilisation(frame, peak), frame.attrs["peaks"] if peak is None else None)
    return code


def _judge(args: argparse.Namespace) -> None:
    from ddplab.dcgm import link_verdict

    verdict = link_verdict(
        busbw_GBps=args.busbw,
        reference_GBps=args.reference,
        exposed=args.exposed,
        utilisation=args.utilisation,
        largest_over_backward=args.longest,
    )
    rows = linktexts.rows_of(verdict.frame())
    if args.json:
        return output.print_json({"says": verdict.says, "rules": rows})
    for row in rows:
        row["holds"] = {True: "yes", False: "no"}.get(row["holds"], "not measured")
    print(output.table(rows, {name: name for name in ("whose", "rule", "limit", "value", "holds")}))
    print(f"\n{verdict.says[0].upper()}{verdict.says[1:]}.")


def _fields(args: argparse.Namespace) -> None:
    from ddplab.dcgm import dcgm_fields

    rows = linktexts.rows_of(dcgm_fields())
    if args.json:
        return output.print_json({"fields": rows})
    for row in rows:
        row["profiling"] = "yes" if row["profiling"] else "-"
    print(output.table(rows, {name: name for name in ("id", "short", "unit", "kind", "profiling", "name")}))
    print("\nrate: an average over the interval; gauge: a state; counter: grows. --json has notes and GPUs.")


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

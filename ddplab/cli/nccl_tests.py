"""Read what nccl-tests printed (all_reduce_perf and the others), in text of any version or the JSON of -J, through
labels of launchers and lines of NCCL_DEBUG.

Exit code 0: read. 1: it says that results are wrong, or there are no rows."""

from __future__ import annotations

import argparse

from ddplab.cli import output
from ddplab.cli.given import apart, given, printable
from ddplab.cli.values import Problem, named

EXAMPLE = """\
ddplab nccl tests all_reduce.txt
ddplab nccl tests all_reduce.json --csv all_reduce.csv"""

_SHOWN = {
    "size_B": "size_B",
    "type": "type",
    "redop": "redop",
    "root": "root",
    "time_us": "time_us",
    "algbw_GBps": "alg_GBps",
    "busbw_GBps": "bus_GBps",
    "wrong": "wrong",
    "inplace_time_us": "in_us",
    "inplace_busbw_GBps": "in_bus",
    "inplace_wrong": "in_wrong",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=named("a file"), metavar="FILE", help="what it printed, or its JSON; - is standard input"
    )
    parser.add_argument(
        "--csv", type=named("a file"), metavar="F", help="write the rows to this file; - is standard output"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    from ddplab.nccl.tests import parse_nccl_tests

    if args.json and args.csv == "-":
        raise Problem("--json and --csv - both want standard output; name a file for the CSV")
    apart("--csv", args.csv, [args.path])
    try:
        found = parse_nccl_tests(given([args.path]))
    except (ValueError, OSError) as error:
        raise Problem(str(error), 1) from error
    with output.csv_file(args.csv) as rows:
        rows += [{key: row.get(key) for key in found.table.columns} for row in found.rows]
    if args.json:
        names = ("collective", "version", "ranks", "settings", "cpu_time", "out_of_bounds", "ok", "average_busbw_GBps")
        about = {name: getattr(found, name) for name in (*names, "warnings")}
        output.print_json({**about, "devices": found.listed, "rows": found.rows})
    elif args.csv != "-":
        print(printable(str(found)) + "\n\n" + output.table(found.rows, _SHOWN))
    return int(found.ok is False)

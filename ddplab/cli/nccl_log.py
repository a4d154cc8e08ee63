"""Read a log of NCCL (NCCL_DEBUG=INFO) of one or many ranks, of one file, several, or a folder: who talks to whom over
what, with which algorithm and protocol, which variables took effect, what went wrong.

A log holds only what NCCL_DEBUG_SUBSYS let through; what is missing is called unknown. For all of it start the job with
NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,NET,COLL,TUNING and NCCL_DEBUG_FILE=nccl.%h.%p.

Exit code 0: read, and no warning of NCCL in it. 1: there are warnings, or nothing of NCCL."""

from __future__ import annotations

import argparse

from ddplab.cli import output
from ddplab.cli.given import apart, given, printable
from ddplab.cli.values import Problem, named, one_of

EXAMPLE = """\
ddplab nccl log nccl.log
ddplab nccl log logs/ --table edges
ddplab nccl log nccl.log --json"""

TABLES = ("comms", "edges", "rings", "trees", "channels", "calls", "choices", "tuning", "env", "rejected", "network")
TABLES += ("warnings",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        type=named("a log"),
        metavar="PATH",
        help="log files, or folders of them; - is standard input",
    )
    parser.add_argument("--table", type=one_of(TABLES, "table"), metavar="T", help=f"print it: {', '.join(TABLES)}")
    parser.add_argument(
        "--csv", type=named("a file"), metavar="F", help="write that table to this file; - is standard output"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    from ddplab.nccl.log import parse_log

    if args.csv and not args.table:
        raise Problem("--csv needs --table, the table to write")
    if args.json and args.csv == "-":
        raise Problem("--json and --csv - both want standard output; name a file for the CSV")
    apart("--csv", args.csv, args.paths)
    try:
        log = parse_log(given(args.paths))
    except (ValueError, OSError) as error:
        raise Problem(str(error), 1) from error
    columns = list(getattr(log, args.table).columns) if args.table else []
    rows = [{key: row.get(key) for key in columns} for row in log.rows[args.table]] if args.table else []
    with output.csv_file(args.csv) as saved:
        saved += rows
    if args.json:
        facts = {"version": log.version, "lines": log.lines, "processes": log.processes, "ranks": log.ranks}
        transports = log.transports
        if isinstance(transports, dict):
            transports = [{"src": a, "dst": b, "transport": way} for (a, b), way in transports.items()]
        output.print_json({**facts, "transports": transports, "verdict": log.verdict(), **log.rows})
    elif args.table and args.csv != "-":
        print(printable(output.table(rows, {key: key for key in columns})) if rows else "no rows")
    elif not args.table:
        print(printable("\n".join(log.verdict())))
    return int(bool(log.rows["warnings"]))

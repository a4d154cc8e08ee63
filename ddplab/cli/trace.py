"""Say where the time of a training run went, from the traces that torch's profiler left: compute, communication hidden
and exposed, collectives and their bandwidth, who was late and who waited, and what to change.

PATH is a trace (.json or .json.gz), or a folder with one trace a rank. Give all ranks of a run: only then waiting for
late ranks can be told from transfer.

Kernels that communicate without NCCL or RCCL count as compute unless --comm names them."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import nullcontext

from ddplab.cli import output
from ddplab.cli.given import apart
from ddplab.cli.values import Problem, named

EXAMPLE = """\
ddplab trace traces/
ddplab trace rank0.pt.trace.json.gz rank1.pt.trace.json.gz --html report.html
ddplab trace traces/ --comm 'dispatch|combine|nvshmem' --json"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="+",
        type=named("a trace, or a folder of traces"),
        metavar="PATH",
        help="traces, or folders of traces",
    )
    parser.add_argument("--comm", metavar="REGEX", help="names of your own communication kernels")
    parser.add_argument("--partial", action="store_true", help="read what is whole of damaged or torn traces")
    parser.add_argument("--json", action="store_true", help="print all tables as JSON")
    parser.add_argument("--csv", type=named("a folder"), metavar="FOLDER", help="write each table to FOLDER as CSV")
    parser.add_argument(
        "--html", type=named("a file"), metavar="FILE", help="write the report as one self-contained page"
    )


def run(args: argparse.Namespace) -> None:
    if args.comm is not None:
        try:
            re.compile(args.comm)
        except re.error as error:
            raise Problem(f"--comm '{args.comm}' is no regular expression: {error}") from error
    from ddplab._files import Unwritable, made_folder
    from ddplab.trace import TraceError, analyze_trace
    from ddplab.trace.text import text

    apart("--html", args.html, args.path)
    written: list[object] = []
    try:  # the places are tried first; what is written, is written whole, or nothing is
        with output.text_file(args.html) as page, made_folder(args.csv) if args.csv else nullcontext():
            report = analyze_trace(args.path, comm=args.comm, partial=args.partial)
            if args.csv:
                written += report.to_csv(args.csv)
            if page:
                page.write(report.to_html())
                written.append(args.html)
    except (TraceError, Unwritable) as error:
        raise Problem(str(error)) from error
    print(report.to_json() if args.json else output.visible(text(report, output.width())))
    for place in written:
        print(output.visible(f"wrote {place}"), file=sys.stderr)

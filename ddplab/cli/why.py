"""Say why a job hung, died or crawled, from the folder that holds what it left: flight recorder dumps, logs, stacks and
profiler traces of any ranks. The fault, the rank and the collective are named, with the lines that show it and what
to do. Other files are left alone, and nothing of the job is run.

Exit code 0: something could be read, fault or not; what could not be read is listed. 1: nothing could be read."""

from __future__ import annotations

import argparse

from ddplab.cli import output
from ddplab.cli.values import Problem, named

EXAMPLE = "ddplab why remains/\nddplab why remains/ --json"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=named("the folder"), metavar="FOLDER", help="what the job left, in any layout")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")


def run(args: argparse.Namespace) -> int:
    from ddplab.why import why

    try:
        found = why(args.folder)
    except OSError as error:
        raise Problem(str(error), 2 if isinstance(error, (FileNotFoundError, NotADirectoryError)) else 1) from error
    if args.json:
        output.print_json(found.to_dict())
    else:
        print(output.visible(str(found)))
    return 0 if found.kind or found.read else 1

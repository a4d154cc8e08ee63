"""Say what this machine can run: backends, GPUs, how many ranks fit, whether hosts with shaped links can be emulated
(and if not, why, and what helps), and the versions of everything that matters.

Exit code 0: the labs run here. 1: something is missing (with --strict, also when something is only limited)."""

from __future__ import annotations

import argparse
import re
import sys

from ddplab.cli import output

EXAMPLE = "ddplab doctor\nddplab doctor --json"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.add_argument("--no-try", action="store_true", help="do not start two ranks on each backend")
    parser.add_argument("--strict", action="store_true", help="exit with 1 also when something is limited")


def run(args: argparse.Namespace) -> int:
    from ddplab.doctor import examine, text

    if sys.stderr is not None and sys.stderr.isatty():
        trying = "" if args.no_try else ", and trying each backend with two ranks"
        print(f"asking torch what it sees{trying} ...", file=sys.stderr, flush=True)
    facts = examine(attempt=not args.no_try)
    if args.json:
        output.print_json(facts)
    else:
        colours = {"missing": 31, "limited": 33}
        mark = lambda found: output.coloured(found[0], colours[found[1]])  # noqa: E731
        print(re.sub(r"^(missing|limited):", mark, text(facts), flags=re.M))
    levels = {finding["level"] for finding in facts["findings"]}
    return int("missing" in levels or (args.strict and bool(levels)))

"""Check the environment variables that NCCL, gloo and torch read: names that nobody reads, values that mean something
else, settings that hurt. Given NAME=VALUE, it checks these instead of the environment.

Exit code 0: nothing found. 1: there are findings."""

from __future__ import annotations

import argparse
import os

from ddplab.cli import output
from ddplab.cli.values import Problem

EXAMPLE = """\
ddplab nccl check
ddplab nccl check NCCL_PROTO=LL NCCL_BUFFSIZE=8MB"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("setting", nargs="*", metavar="NAME=VALUE", help="check these (default: the environment)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ddplab.nccl.env import check_env

    environ = dict(map(_setting, args.setting)) if args.setting else os.environ
    found = check_env(environ)
    if args.json:
        output.print_json({"findings": [asdict(finding) for finding in found]})
    else:
        print("\n".join(map(str, found)) or "Nothing to complain about.")
    return int(bool(found))


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise Problem(f"'{text}' is not NAME=VALUE, as in NCCL_DEBUG=INFO")
    return name, value

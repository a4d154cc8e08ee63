"""Measure the values of a knob on real ranks, interleaved and repeated, and say of each whether it helps, hurts or has
no effect against the first. A knob is an environment variable (NCCL_PROTO, GLOO_SOCKET_IFNAME ...), an option of
DistributedDataParallel (bucket_cap_mb ...), or "algorithm".

The value "unset" leaves a variable out, "default" an option at its default. The same value twice is an A/A sweep: it
must say "no effect", so run one first. With NCCL the ranks need a GPU each; without, they use gloo."""

from __future__ import annotations

import argparse
import sys

from ddplab.cli import output
from ddplab.cli.values import Problem, count, named, one_of, seconds

EXAMPLE = """\
ddplab nccl sweep bucket_cap_mb default default
ddplab nccl sweep NCCL_PROTO unset LL LL128 Simple --ranks 8 --size 25M
ddplab nccl sweep algorithm backend ring --csv runs.csv"""


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("knob", metavar="KNOB", help="a variable in capitals, an option of DDP, or algorithm")
    add("values", nargs="+", metavar="VALUE", help="two or more; the first is the baseline")
    add("--workload", type=one_of(("all_reduce", "ddp"), "workload"), help="all_reduce, or ddp: a training step")
    add("--size", default="4M", metavar="S", help="bytes of the buffer, or of all gradients (default 4M)")
    add("--ranks", type=count, default=4, metavar="N", help="default 4")
    add("--rounds", type=count, default=24, metavar="R", help="each value is measured once in each (default 24)")
    add("--iters", type=count, default=5, metavar="K", help="steps of a measurement, the median counts (default 5)")
    add("--confidence", type=float, default=0.99, metavar="C", help="of the whole table (default 0.99)")
    add("--device", type=one_of(("auto", "cpu", "cuda"), "device"), default="auto", help="auto (default), cpu or cuda")
    add("--timeout", type=seconds, default=120, metavar="S", help="seconds for each launch (default 120)")
    add("--csv", type=named("a file"), metavar="F", help="write every measurement to this file; - is standard output")
    add("--json", action="store_true", help="print the table and the measurements as JSON")


def run(args: argparse.Namespace) -> None:
    if args.json and args.csv == "-":
        raise Problem("--json and --csv - both want standard output; name a file for the CSV")
    values = [_value(args.knob, text) for text in args.values]
    with output.csv_file(args.csv) as rows:
        if sys.stderr.isatty():
            print(f"measuring {len(values)} values in {args.rounds} rounds ...", file=sys.stderr)
        found = _measure(args, values)
        rows += found.observations.to_dict("records")
    if args.json:
        table = found.table.to_dict("records")
        output.print_json({"basis": "measured", **found.about, "table": table, "observations": rows})
    elif args.csv != "-":
        print(found)


def _value(knob: str, text: str):
    """Text for a variable; for an option of DDP what Python would write: 25, 0.5, True."""
    from ddplab.nccl.sweep import DDP_OPTIONS

    if text in ("unset", "default"):
        return None
    if knob not in DDP_OPTIONS:
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise Problem(f"'{text}' is no value of {knob}; write a number, true or false") from None


def _measure(args: argparse.Namespace, values: list):
    from ddplab.launch import RankError
    from ddplab.nccl.sweep import sweep

    names = ("workload", "size", "ranks", "rounds", "iters", "confidence", "device", "timeout")
    try:
        return sweep(args.knob, values, show=False, **{name: getattr(args, name) for name in names})
    except RankError as error:
        raise Problem(str(error), 1) from error
    except (ValueError, TypeError) as error:  # arguments that sweep refuses; what fails in a rank is a RankError
        raise Problem(str(error)) from error

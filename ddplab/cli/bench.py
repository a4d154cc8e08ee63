"""Measure a collective on real ranks: each algorithm in turn, at each size, checked against the backend's own result.
The columns are those of nccl-tests.

Without --link the ranks talk over this machine's loopback, or over NCCL where every rank has a GPU. With --link each
rank is a host of its own, behind an emulated link of that speed. Under torchrun the ranks are those of the job, and
rank 0 prints."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import textwrap

from ddplab.cli import output
from ddplab.cli.values import SCHEDULES, Problem, count, link, many_of, named, one_of, seconds, sizes

EXAMPLE = """ddplab bench all_reduce --ranks 4 --sizes 1K:64M --link 1gbit
ddplab bench all_reduce --algorithms ring,backend --csv ring.csv
torchrun --standalone --nproc-per-node 2 -m ddplab bench all_reduce --sizes 1M"""

COLLECTIVES = ("all_reduce",)
ALGORITHMS = (*SCHEDULES, "backend")

# On a terminal that is narrower than the table of nccl-tests: the columns that differ between the rows.
_NARROW = {
    "size_B": "size_B",
    "algorithm": "algorithm",
    "time_us": "time_us",
    "time_p75_us": "p75_us",
    "algbw_GBps": "alg_GBps",
    "busbw_GBps": "bus_GBps",
    "busbw_pct": "%link",
    "errors": "wrong",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("collective", nargs="?", type=one_of(COLLECTIVES, "collective"), default="all_reduce", help="all_reduce")
    add("--ranks", type=count, metavar="N", help="default 4, under torchrun those of the job")
    add("--sizes", type=sizes, default="1K:64M", metavar="S", help="1K:64M doubles (default), 1K:64M:4, or 1K,1M")
    add("--algorithms", type=many_of(ALGORITHMS, "algorithm"), default="ring,star,backend", metavar="A,B", help="of "
        f"{', '.join(ALGORITHMS)} (default ring,star,backend)")  # fmt: skip
    add("--link", type=link, metavar="L", help="emulate a host a rank on links of this rate, as 1gbit")
    add("--ranks-per-host", type=count, default=1, metavar="G", help="with --link; default 1")
    add("--op", default="sum", help="sum (default), mean, max, min or product")
    add("--dtype", default="float32", help="float32 (default), bfloat16, int64, ...")
    add("--iters", type=count, default=7, metavar="K", help="timed runs at each size (default 7)")
    add("--device", type=one_of(("auto", "cpu", "cuda"), "device"), default="auto", help="auto (default), cpu or cuda")
    add("--timeout", type=seconds, default=600, metavar="S", help="seconds for everything (default 600)")
    add("--no-check", action="store_true", help="do not compare the results")
    add(
        "--csv",
        type=named("a file for the rows"),
        metavar="F",
        help="write the rows to this file too, whole or not at all; - is standard output",
    )
    add("--json", action="store_true", help="print the rows as JSON instead of the table")


def run(args: argparse.Namespace) -> None:
    ranks, first = _ranks(args), os.environ.get("RANK", "0") == "0"
    if args.json and args.csv == "-":
        raise Problem("--json and --csv - both want standard output; name a file for the CSV")
    with output.csv_file(args.csv if first else None) as rows:
        if first and sys.stderr.isatty():
            print(f"measuring {len(args.sizes)} sizes with {', '.join(args.algorithms)} ...", file=sys.stderr)
        frame = _measure(args, ranks)
        rows += frame.astype(object).where(frame.notna(), None).to_dict("records")
    if first and args.json:
        output.print_json({"basis": "measured", "collective": args.collective, **frame.attrs, "rows": rows})
    elif first and args.csv != "-":
        print(_text(frame, rows))
    wrong = sum(row["errors"] or 0 for row in rows)
    if wrong:
        raise Problem(f"{wrong} elements differ from the backend's own result", 1)


def _text(frame, rows: list[dict]) -> str:
    """The table of nccl-tests, or a narrow one where the terminal would break its lines."""
    from ddplab.bench import table

    wide = table(frame)
    if max(map(len, wide.splitlines())) <= output.width():
        return wide
    about = [line for line in wide.splitlines() if line.startswith("# ")]  # what was measured, where, how
    head = [line for line in about if not line.startswith(("#  ", "# (B)"))]
    return "\n".join(
        [*(textwrap.fill(line, 80, subsequent_indent="#   ") for line in head), "", output.table(rows, _NARROW)]
    )


def _ranks(args: argparse.Namespace) -> int:
    job = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if job is None:
        ranks = args.ranks or 4
    elif args.link:
        raise Problem("--link emulates hosts for ranks that ddplab starts; leave it out under torchrun")
    elif args.ranks not in (None, int(job)):
        raise Problem(f"--ranks {args.ranks}, but torchrun started {job}; leave --ranks out")
    else:
        ranks = int(job)
    if ranks % args.ranks_per_host:
        raise Problem(f"{ranks} ranks do not fill hosts of {args.ranks_per_host}; use a multiple")
    if args.ranks_per_host > 1 and not args.link:
        raise Problem("--ranks-per-host needs --link, the speed of the hosts' links")
    return ranks


def _measure(args: argparse.Namespace, ranks: int):
    from ddplab.bench import bench
    from ddplab.hosts import Hosts, HostsError
    from ddplab.launch import RankError

    per_host = args.ranks_per_host
    try:
        emulated = Hosts(ranks // per_host, link=args.link, ranks_per_host=per_host) if args.link else None
        with emulated or contextlib.nullcontext() as hosts:
            return bench(
                args.collective,
                algorithms=args.algorithms,
                ranks=ranks,
                sizes=args.sizes,
                op=args.op,
                dtype=args.dtype,
                hosts=hosts,
                iters=args.iters,
                device=args.device,
                check=not args.no_check,
                timeout=args.timeout,
                show=False,
            )
    except HostsError as error:
        raise Problem(f"{error}; without --link the ranks talk over loopback", 1) from error
    except RankError as error:
        late = error.rank is None  # nobody failed; where each rank was is of no use to who measures
        raise Problem(f"{str(error).splitlines()[0]}; --timeout gives it longer" if late else str(error), 1) from error
    except (ValueError, TypeError) as error:  # arguments that bench refuses; what fails in a rank is a RankError
        raise Problem(str(error)) from error

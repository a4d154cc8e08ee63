"""`ddplab labs run`: the cores of the labs, on ranks of this machine or of the torchrun job around it."""

from __future__ import annotations

import argparse
import os
import textwrap
import time

from ddplab.cli import output
from ddplab.cli.values import Problem, did_you_mean

_WORDS = {True: "ok", False: "WRONG", None: ""}


def run(args: argparse.Namespace) -> None:
    from ddplab.cores import CORES

    labs = [_lab(name, CORES) for name in (args.folder, *args.name) if name] or list(CORES)
    if args.force:
        raise Problem("--force belongs to 'ddplab labs copy'; run overwrites nothing")
    job = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if job is not None and args.ranks not in (None, int(job)):
        raise Problem(f"--ranks {args.ranks}, but torchrun started {job}; leave --ranks out")
    started = time.monotonic()
    first, rows = os.environ.get("RANK", "0") == "0", []
    where = _join(args)
    if first and not args.json:
        print(f"# {where.ranks} ranks on {_machines(where)}, {where.backend} on {where.device}", flush=True)
    for lab, found in _outcomes(dict.fromkeys(labs), where):
        rows += [{"lab": lab, **row._asdict()} for row in found]
        if first and not args.json:
            print("\n".join(_line(lab, *row) for row in found), flush=True)
    wrong = [row for row in rows if row["right"] is False]
    took, checked = time.monotonic() - started, sum(row["right"] is not None for row in rows)
    if first and args.json:
        about = {"ranks": where.ranks, "machines": [len(host) for host in where.hosts], "backend": where.backend}
        output.print_json({**about, "device": where.device, "seconds": round(took, 1), "rows": rows})
    if wrong:
        raise Problem(f"{len(wrong)} of {checked} checks are wrong: " + "; ".join(_short(row) for row in wrong), 1)
    if first and not args.json:
        print(f"OK: {checked} checks of {len(set(labs))} labs, {took:.0f} s")


def _lab(name: str, cores: dict) -> str:
    number = name[:2] if name[2:3] == "_" else name
    lab = f"{int(number):02d}" if number.isascii() and number.isdigit() else name
    if lab not in cores:
        raise Problem(f"unknown lab '{name}'{did_you_mean(name, cores)}; labs are 01 to {max(cores)}")
    return lab


def _join(args: argparse.Namespace):
    from ddplab.cores.job import Job
    from ddplab.launch import RankError

    try:
        return Job.join(args.ranks, args.device or "auto")
    except RankError as error:
        raise Problem(str(error), 1) from error
    except ValueError as error:
        raise Problem(str(error)) from error


def _outcomes(labs, where):
    """The cores' rows; without torchrun a rank's failure is told, under torchrun each process tells its own."""
    from ddplab.cores import run_cores
    from ddplab.launch import RankError

    try:
        yield from run_cores(list(labs), where)
    except RankError as error:
        raise Problem(str(error), 1) from error


def _machines(where) -> str:
    sizes = [len(host) for host in where.hosts]
    return "1 machine" if len(sizes) == 1 else f"{len(sizes)} machines ({' + '.join(map(str, sizes))})"


def _line(lab: str, what: str, found: str, expected: str, right: bool | None) -> str:
    line = f"{lab}  {what:<44}  {found:>16}  {expected:>16}  {_WORDS[right]}".rstrip()
    return line if len(found) <= 40 else textwrap.fill(f"{lab}  {what}: {found}", 88, subsequent_indent="    ")


def _short(row: dict) -> str:
    return f"lab {row['lab']}, {row['what']}: {row['found']}, expected {row['expected']}"

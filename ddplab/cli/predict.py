"""Predict an all-reduce: seconds and bytes of one schedule, or of all of them side by side, on ranks joined by links
of a given speed. Nothing is run: the figures come from the alpha-beta model.

With --model, predict a training step of DistributedDataParallel instead: how it scales from 1 to 1024 ranks, what
overlaps and what is exposed. MODEL is a torchvision classifier, or FILE:FUNCTION of yours as module:factory, where
factory() returns a torch module, or (module, example inputs). That imports and runs your code: name only code that
you trust.

Sizes are binary, as in nccl-tests: 100M is 100 MiB; write 100MB for 10^8 bytes. Links are rates in one direction,
such as 1gbit, 10 Gbit/s or 25GB/s, or a known link: nvlink-v100, nvlink-a100, nvlink-h100, nvlink-b200, 10gbe, 25gbe,
100gbe."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ddplab.cli import output, scaling
from ddplab.cli.values import SCHEDULES, Problem, count, link, one_of, seconds, size

EXAMPLE = """\
ddplab predict --ranks 8 --size 100M --link 10gbit
ddplab predict --schedule ring --ranks 8 --size 25.6MB
ddplab predict --model resnet50 --ranks 8 --link 10gbit --html resnet50.html"""

MOST_LISTED = 1024  # ranks up to which a schedule is written out; beyond, there is the ring's closed form

_COLUMNS = {
    "schedule": "schedule",
    "steps": "steps",
    "time_ms": "time_ms",
    "sent_max_MiB": "sends_MiB",
    "busiest_link_MiB": "link_MiB",
    "algbw_GBps": "algbw_GBps",
    "times_fastest": "x_fastest",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedule", type=one_of(SCHEDULES, "schedule"), metavar="NAME", help=", ".join(SCHEDULES))
    parser.add_argument("--ranks", type=count, default=4, metavar="N", help="default 4")
    parser.add_argument("--size", type=size, metavar="S", help="bytes to reduce (default 100M)")
    parser.add_argument(
        "--link", type=link, default="1gbit", metavar="L", help="of each host (default 1gbit); see below"
    )
    parser.add_argument("--latency-us", type=seconds, metavar="US", help="of that link, a step (default 50, assumed)")
    parser.add_argument("--ranks-per-host", type=count, default=1, metavar="G", help="default 1: every rank is a host")
    parser.add_argument("--inner-link", type=link, metavar="L", help="between the ranks of one host")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    scaling.arguments(parser.add_argument_group("a training step of DDP"))


def run(args: argparse.Namespace) -> None:
    from ddplab.cost import Topology

    scaling.check(args)
    hosts, rest = divmod(args.ranks, args.ranks_per_host)
    if rest:
        raise Problem(f"{args.ranks} ranks do not fill hosts of {args.ranks_per_host}; use a multiple")
    if args.ranks_per_host > 1 and args.inner_link is None:
        raise Problem("ranks that share a host need --inner-link, the speed between them, as --inner-link 300GB/s")
    if args.latency_us is not None:
        args.link = replace(args.link, latency_s=args.latency_us / 1e6)
    topology = Topology(hosts, args.ranks_per_host, args.link, args.inner_link)
    if args.model:
        return scaling.run(args, topology)
    args.size = 100 * 2**20 if args.size is None else args.size
    rows, notes = _rows(args, topology)
    fastest = min(row["seconds"] for row in rows)
    for row in rows:
        row["times_fastest"] = row["seconds"] / fastest if fastest else 1.0
    if args.json:
        output.print_json(
            {
                "basis": "predicted",
                "ranks": args.ranks,
                "hosts": hosts,
                "size_B": args.size,
                "link": _facts(args.link),
                "inner_link": args.inner_link and _facts(args.inner_link),
                "rows": rows,
                "notes": notes,
            }
        )
        return
    print(
        f"Predicted, not measured: all-reduce of {args.size} B, ranks: {args.ranks}, hosts: {hosts},\n"
        f"links of {args.link.rate_Bps / 1e9:.4g} GB/s ({args.link.payload_Bps / 1e9:.4g} GB/s payload, "
        f"{args.link.latency_s * 1e6:.4g} us latency).\n"
    )
    for row in rows:
        row["time_ms"] = row["seconds"] * 1e3
        for key in ("sent_max", "busiest_link"):
            row[f"{key}_MiB"] = row[f"{key}_B"] / 2**20
    print(output.table(rows, _COLUMNS))
    print("\nsends: by the rank that sends most. link: on the busiest link of a host, one way.")
    for note in notes:
        print(f"\n{note}")


def _rows(args: argparse.Namespace, topology) -> tuple[list[dict], list[str]]:
    from ddplab.cost import predict, ring_seconds
    from ddplab.schedule import ScheduleError

    n, notes, rows = args.ranks, [], []
    if n > MOST_LISTED:
        if args.schedule not in (None, "ring") or args.ranks_per_host > 1:
            raise Problem(
                f"above {MOST_LISTED} ranks only the ring on hosts of one rank has a closed form; use fewer ranks"
            )
        time_s, sent = ring_seconds(n, args.size, args.link), 2 * (n - 1) * args.size // n
        notes.append(f"Above {MOST_LISTED} ranks: the closed form of the ring.")
        return [_row("ring", 2 * (n - 1), time_s, sent, sent, args)], notes
    for name in [args.schedule] if args.schedule else SCHEDULES:
        if name == "hierarchical" and args.schedule is None and args.ranks_per_host == 1:
            continue  # one rank a host: it is the ring
        try:
            schedule = _build(name, topology)
        except ScheduleError as error:
            if args.schedule:
                raise Problem(str(error)) from error
            notes.append(str(error))
            continue
        found = predict(schedule, args.size, topology)
        busiest = found.bytes_per_link[found.busiest]
        rows.append(_row(name, schedule.steps, found.seconds, int(found.bytes_sent.max()), busiest, args))
    return rows, notes


def _build(name: str, topology):
    from ddplab import schedule

    if name == "hierarchical":
        return schedule.hierarchical(topology.hosts, topology.ranks_per_host)
    return getattr(schedule, name)(topology.hosts * topology.ranks_per_host)


def _row(name: str, steps: int, time_s: float, sent: int, busiest: int, args: argparse.Namespace) -> dict:
    algbw = args.size / time_s / 1e9 if time_s else None
    return {
        "schedule": name,
        "steps": steps,
        "seconds": float(time_s),
        "sent_max_B": sent,
        "busiest_link_B": busiest,
        "algbw_GBps": algbw,
        "busbw_GBps": algbw and algbw * 2 * (args.ranks - 1) / args.ranks,
    }


def _facts(link) -> dict:
    return {"name": link.name, "rate_Bps": link.rate_Bps, "payload_Bps": link.payload_Bps, "latency_s": link.latency_s}

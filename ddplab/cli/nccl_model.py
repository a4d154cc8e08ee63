"""NCCL's own cost model of an all-reduce on one node: the latency and bandwidth that it assumes for each algorithm and
protocol, what it would choose at each size, and what NCCL_PROTO or NCCL_ALGO would cost. Nothing is run: these are
the constants of NCCL 2.30.7, and what it believes is not what a machine does.

Nodes: 8xV100 with all of its GPUs; 8xA100, 8xH100 and 8xB200 with 2 to 8 of them."""

from __future__ import annotations

import argparse

from ddplab.cli import output
from ddplab.cli.values import Problem, count, many_of, one_of, sizes

EXAMPLE = """\
ddplab nccl model --node 8xA100
ddplab nccl model --node 8xA100 --proto LL --sizes 1M,25M
ddplab nccl model --node 8xH100 --algo Ring --json"""

NODES = ("8xV100", "8xA100", "8xH100", "8xB200")
_SHOWN = {
    "size_B": "size_B",
    "chosen": "chosen",
    "time_us": "time_us",
    "busbw_GBps": "bus_GBps",
    "forced": "forced",
    "forced_us": "forced_us",
    "times": "x_chosen",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--node", type=one_of(NODES, "node"), default="8xA100", metavar="M", help=f"{', '.join(NODES)} (default 8xA100)"
    )
    add("--ranks", type=count, metavar="N", help="GPUs, if not all of the node")
    add("--channels", type=count, metavar="C", help="channels, if not the node's own")
    add("--sizes", type=sizes, default="64K:1G:4", metavar="S", help="as in nccl-tests (default 64K:1G:4)")
    add(
        "--proto",
        type=many_of(("LL", "LL128", "Simple"), "protocol"),
        metavar="P",
        help="as with NCCL_PROTO=P: of LL, LL128, Simple",
    )
    add(
        "--algo",
        type=many_of(("Ring", "Tree", "NVLS"), "algorithm"),
        metavar="A",
        help="as with NCCL_ALGO=A: of Ring, Tree, NVLS",
    )
    add("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> None:
    from ddplab.nccl.model import ALGORITHMS, PROTOCOLS, tuning_model

    try:
        model = tuning_model(args.node, ranks=args.ranks, channels=args.channels)
        rows = [_row(model, size, args.algo or ALGORITHMS, args.proto or PROTOCOLS) for size in args.sizes]
    except ValueError as error:
        raise Problem(str(error)) from error
    if not (args.algo or args.proto):
        rows = [{key: row[key] for key in ("size_B", "chosen", "time_us", "busbw_GBps")} for row in rows]
    pairs = model.table().to_dict("records")
    if args.json:
        output.print_json({"basis": "assumed", "node": model.machine.name, "ranks": model.machine.ranks,
                           "channels": model.machine.channels, "channels_are": model.machine.basis, "pairs": pairs,
                           "crossover_B": model.crossover(), "rows": rows})  # fmt: skip
        return
    m = model.machine
    print(f"What NCCL 2.30.7 assumes, not measured: {m.name}, {m.ranks} GPUs,")
    print(f"{m.channels} channels of {m.channel_GBps:g} GB/s ({m.basis}).\n")
    print(output.table(pairs, {"algorithm": "algorithm", "protocol": "protocol", "latency_us": "latency_us",
                               "algbw_GBps": "alg_GBps", "busbw_GBps": "bus_GBps"}))  # fmt: skip
    print(f"\nRing/LL is the fastest ring up to {model.crossover() / 2**20:.2f} MiB.\n")
    print(output.table(rows, {key: name for key, name in _SHOWN.items() if key in rows[0]}))


def _row(model, size: int, algorithms, protocols) -> dict:
    free, forced = model.choose(size), model.choose(size, algorithms, protocols)
    seconds, forced_s = model.seconds(size, *free), model.seconds(size, *forced)
    factor = 2 * (model.machine.ranks - 1) / model.machine.ranks
    return {
        "size_B": size,
        "chosen": "/".join(free),
        "time_us": seconds * 1e6,
        "busbw_GBps": size / seconds / 1e9 * factor,
        "forced": "/".join(forced),
        "forced_us": forced_s * 1e6,
        "times": forced_s / seconds,
    }

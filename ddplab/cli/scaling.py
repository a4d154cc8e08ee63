"""`ddplab predict --model`: how a step of DDP scales from 1 to 1024 ranks, with everything that was assumed."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from ddplab.cli import output
from ddplab.cli.values import Problem, count, named, one_of, positive, seconds

COUNTS = tuple(2**k for k in range(11))
JITTER_PERCENT = 3.0  # of the compute time, one standard deviation; a figure to reckon with
MOST_JITTER_PERCENT = 50.0  # as `predict_step` allows
ONLY_MODEL = ("batch", "tflops", "compute_ms", "bucket_cap_mb", "compression", "jitter", "slowdown", "html")
ONLY_SCHEDULE = ("schedule", "size")

_COLUMNS = {
    "ranks": "ranks",
    "step_ms": "step_ms",
    "low_ms": "from",
    "high_ms": "to",
    "communication_ms": "comm_ms",
    "exposed_ms": "exposed_ms",
    "efficiency_pct": "efficiency_%",
    "samples_per_s": "samples/s",
}


def _at_least(least: float, what: str, most: float = math.inf):
    span = f"{least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= float(text) <= most and math.isfinite(float(text)):
                return float(text)
        raise argparse.ArgumentTypeError(f"'{text}' is not {what}; give a number, {span}")

    return convert


def arguments(group: argparse._ArgumentGroup) -> None:
    """The options that only --model reads."""
    add = group.add_argument
    add("--model", metavar="MODEL", help="resnet50, vgg16, ... or module:factory (trusted code)")
    add("--batch", type=count, metavar="B", help="images a rank (default 32)")
    speed, cap = positive("a speed in TFLOP/s"), positive("a size in MiB")
    add("--tflops", type=speed, metavar="T", help="sustained speed of a rank (default 10, assumed)")
    add("--compute-ms", type=seconds, metavar="MS", help="or state a rank's compute time of a step")
    add("--bucket-cap-mb", type=cap, metavar="MB", help="MiB (default: torch's 25, first one 1)")
    add("--compression", type=one_of(("none", "fp16"), "compression"), metavar="C", help="none (default) or fp16")
    add("--jitter", type=_at_least(0, "a jitter in percent", MOST_JITTER_PERCENT), metavar="PCT",
        help="%% of compute, sigma (default 3)")  # fmt: skip
    add("--slowdown", type=_at_least(1, "a factor"), metavar="F", help="of compute while communicating")
    add(
        "--html", type=named("a file for the page"), metavar="FILE", help="write a page with the chart and the timeline"
    )


def check(args: argparse.Namespace) -> None:
    """Options that belong to the other half of the command are a mistake, not to be ignored."""
    if args.model == "":
        raise Problem("--model is empty; name one, such as resnet50, or a module:factory of yours")
    for name in ONLY_SCHEDULE if args.model else ONLY_MODEL:
        if getattr(args, name) is not None:
            why = "prices one all-reduce, not --model" if args.model else "needs --model"
            raise Problem(f"--{name.replace('_', '-')} {why}")


def run(args: argparse.Namespace, topology: Any) -> None:
    """Print the table, JSON, and write the page."""
    with output.text_file(args.html) as place:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is neither table nor JSON
            profile = _profile(args)
        page = _report(args, topology, profile)
        if place:
            place.write(page())
    if place and not args.json:
        print(f"\nWrote {args.html}")


def _report(args: argparse.Namespace, topology: Any, profile: Any) -> Callable[[], str]:
    """Print it; what comes back makes the page."""
    from ddplab.timeline import best_bucket_cap, predict_step

    options = {
        "bucket_cap_mb": args.bucket_cap_mb,
        "compression": args.compression or "none",
        "slowdown": args.slowdown or 1.0,
        "jitter": (JITTER_PERCENT if args.jitter is None else args.jitter) / 100,
    }
    rows = _rows(args, profile, options)
    chosen = next(row for row in rows if row["ranks"] == args.ranks)
    step = {k: v for k, v in options.items() if k != "bucket_cap_mb"}
    best, sweep = best_bucket_cap(profile, topology=topology, **step)
    usual = predict_step(profile, topology=topology, **step).step_s * 1e3
    assumptions = _assumptions(args, profile, options)
    if args.json:
        output.print_json(
            {
                "basis": "predicted",
                "model": args.model,
                "assumptions": assumptions,
                "ranks": args.ranks,
                "best_bucket_cap_mb": best,
                "rows": rows,
            }
        )
    else:
        print(f"Predicted, not measured: a training step of {args.model} under DDP.\n")
        print(output.table(rows, _COLUMNS))
        print(
            f"\n{args.ranks} ranks: step {chosen['step_ms']:.4g} ms, of which {chosen['exposed_ms']:.4g} ms exposed; "
            f"{chosen['buckets']} buckets.\nBest single bucket cap: {best:g} MiB "
            f"({sweep.step_ms.min():.4g} ms); torch's default: {usual:.4g} ms.\n\nAssumed:"
        )
        for line in assumptions:
            print(textwrap.fill(line, 78, initial_indent="- ", subsequent_indent="  "))

    def page() -> str:
        from ddplab.figures.scaling import page

        return page(args.model, profile, rows, assumptions, args.ranks, args.link, options)

    return page


def _profile(args: argparse.Namespace) -> Any:
    """The model's `Profile`, or a Problem that says what is wrong with it."""
    from ddplab.assumed import BATCH, TFLOPS, assumed_profile

    stated = {"tflops": args.tflops or TFLOPS, "compute_s": args.compute_ms and args.compute_ms / 1e3}
    args.samples = args.batch or BATCH
    try:
        if ":" not in args.model:
            return assumed_profile(args.model, batch=args.samples, **stated)
        if args.batch:
            raise Problem("--batch is for torchvision models; example inputs of module:factory bring their own")
        model, inputs = _user_model(args.model)
        args.samples = None
        if inputs is not None:
            first = inputs[0] if isinstance(inputs, tuple) else inputs
            args.samples = len(first) if getattr(first, "ndim", 0) else None
        return assumed_profile(model, inputs, **stated)
    except ImportError as error:
        raise Problem(str(error), 1) from error
    except ValueError as error:
        hint = "; use --compute-ms" if "compute_s" in str(error) else ""
        raise Problem(f"{' '.join(str(error).split()).rstrip('.')}{hint}") from error


def _user_model(name: str) -> tuple[Any, Any]:
    """(module, example inputs or None) from the user's factory. Runs the user's code."""
    import importlib

    import torch

    module_name, _, factory = name.partition(":")
    if module_name.endswith(".py") or os.sep in module_name:
        module = os.path.basename(module_name).removesuffix(".py")
        raise Problem(f"'{module_name}' is a file; name the module, from its folder: --model {module}:{factory}")
    path = list(sys.path)
    sys.path.insert(0, "")  # the working folder, as for python -c
    try:
        made = getattr(importlib.import_module(module_name), factory)()
    except (Exception, SystemExit) as error:  # whatever the user's code raises is told, not thrown at them
        said = " ".join(str(error).split())
        raise Problem(f"{name} failed: {type(error).__name__}: {said}", 1) from error
    finally:
        sys.path[:] = path
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise Problem(f"{name}() returned {type(made).__name__}; it must return a torch module, or (module, inputs)")
    return model, inputs


def _rows(args: argparse.Namespace, profile: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    from ddplab.link import Topology
    from ddplab.timeline import predict_step

    rows = []
    for n in sorted({*COUNTS, args.ranks}):
        hosts, rest = divmod(n, args.ranks_per_host)
        if rest and hosts:
            continue  # would not fill its hosts
        shape = Topology(max(hosts, 1), min(n, args.ranks_per_host), args.link, args.inner_link)
        t = predict_step(profile, topology=shape, **options)
        low, high = t.band_s or (t.step_s, t.step_s)
        rows.append(
            {
                "ranks": n,
                "step_ms": t.step_s * 1e3,
                "low_ms": low * 1e3,
                "high_ms": high * 1e3,
                "compute_ms": t.compute_s * 1e3,
                "communication_ms": t.communication_s * 1e3,
                "exposed_ms": t.exposed_s * 1e3,
                "efficiency_pct": 100 * profile.compute_s / t.step_s,
                "samples_per_s": args.samples and n * args.samples / t.step_s,
                "buckets": len(t.buckets),
            }
        )
    return rows


def _assumptions(args: argparse.Namespace, profile: Any, options: dict[str, Any]) -> list[str]:
    inner = f"; {args.ranks_per_host} ranks a host, {args.inner_link} inside" if args.ranks_per_host > 1 else ""
    cap = f"{args.bucket_cap_mb:g} MiB" if args.bucket_cap_mb else "torch's default, 25 MiB and 1 MiB for the first"
    user = [f"{args.model} was imported and run: trusted code"] if ":" in args.model else []
    return [
        *user,
        str(profile),
        "forward 1/3, backward 2/3 of the compute time, the optimizer nothing; the batch of a rank stays the same",
        f"every all-reduce is a ring over {args.link}: {args.link.payload_Bps / 1e9:.4g} GB/s payload, "
        f"{args.link.latency_s * 1e6:.4g} us a step{inner}; one at a time",
        f"buckets: {cap}; compression: {options['compression']}, encoding and copies free",
        f"compute x {options['slowdown']:g} while communication runs",
        f"a rank's compute time varies by {options['jitter'] * 100:g}% (sigma, normal, independent); a step waits for "
        "the slowest; from and to: 5th and 95th percentile",
    ]

"""Is the timeline right? One step of torch's DDP on four emulated hosts, paced compute, measured, over the prediction.

    python benchmarks/timeline_predicted_vs_measured.py --part 1    (of 6: link x hook; two to four minutes each)
    python benchmarks/timeline_predicted_vs_measured.py --report

A part calibrates (all-reduce, copy and cast on their own, without DDP), records the paced model on all ranks at once,
without DDP, predicts, and only then measures. Parts are merged into labs/results/timeline.json. Needs root, for the
ranks' priority and the hosts, and torchvision, for the layers of ResNet-18.

Expected: median error of the step at most 5%, worst at most 15%; the exposed part and every bucket's end within 10% of
the step; every difference between two bucket sizes that exceeds the spread has the predicted sign; and both naive
estimates, compute + communication and the larger of the two, are off by at least twice as much.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

import ddplab as dl

RESULTS = Path(__file__).parents[1] / "labs" / "results" / "timeline.json"
PARTS = list(itertools.product(("1gbit", "0.5gbit", "0.2gbit"), ("none", "fp16")))
CAPS_MB = (1, 5, 25, 100)
HOSTS = 4
COMPUTE_S = 1.2
BASIS = "paced: torch's DDP on 4 emulated hosts, ResNet-18's parameters, backward waits on the clock"
KEY = ["link", "hook", "bucket_cap_mb"]


def measure(link: str, hook: str, caps: list[float], steps: int) -> Iterator[dict]:
    """The rows of one part, each as soon as it is measured."""
    stated = dl.assumed_profile("resnet18", compute_s=COMPUTE_S)
    wire = "float16" if hook == "fp16" else "float32"
    with dl.Hosts(HOSTS, link=link) as hosts:
        costs = dl.calibrate(hosts=hosts, dtypes=[wire], realtime=True)
        print(
            f"{costs}, divide {costs.divide_s_per_byte * 1e9:.3g}, cast {costs.cast_s_per_byte * 1e9:.3g}, "
            f"uncast {costs.uncast_s_per_byte * 1e9:.3g} ns/B; worst residual {costs.worst:.1%}",
            flush=True,
        )
        seen = dl.launch(lambda: dl.record(dl.paced(stated), repeats=3), hosts=hosts, realtime=True)
        profile = max(seen, key=lambda p: p.backward_s)  # the slowest rank sets the pace
        print(profile, flush=True)
        for cap in caps:
            said = dl.predict_step(profile, topology=hosts, bucket_cap_mb=cap, compression=hook, costs=costs)
            got = dl.measure_timeline(stated, hosts=hosts, bucket_cap_mb=cap, hook=hook, steps=steps, realtime=True)
            factor = costs.compression(hook).factor
            comm = sum(costs.all_reduce_seconds(b.nbytes * factor, wire) for b in said.buckets)
            low, high = np.percentile(got.about["steps_s"], [25, 75])
            ends = [abs(a.end_s - b.end_s) for a, b in zip(said.buckets, got.buckets, strict=True)]
            yield {
                "link": link,
                "hook": hook,
                "bucket_cap_mb": cap,
                "buckets": len(got.buckets),
                "compute_ms": profile.compute_s * 1e3,
                "communication_ms": comm * 1e3,
                "measured_ms": got.step_s * 1e3,
                "p25_ms": low * 1e3,
                "p75_ms": high * 1e3,
                "predicted_ms": said.step_s * 1e3,
                "sum_ms": (profile.compute_s + comm) * 1e3,
                "max_ms": max(profile.compute_s, comm) * 1e3,
                "exposed_measured_ms": got.exposed_s * 1e3,
                "exposed_predicted_ms": said.exposed_s * 1e3,
                "worst_bucket_end_ms": max(ends) * 1e3,
            }


def line(row: dict) -> str:
    """One configuration in words."""
    error = row["predicted_ms"] / row["measured_ms"] - 1
    quarters = f"[{row['p25_ms']:.1f}, {row['p75_ms']:.1f}]"
    exposed = f"{row['exposed_measured_ms']:.0f}, predicted {row['exposed_predicted_ms']:.0f}"
    return (
        f"{row['link']:>8} {row['hook']:>5} {row['bucket_cap_mb']:>4} MiB, {row['buckets']:>2} buckets: "
        f"measured {row['measured_ms']:7.1f} ms {quarters}, predicted {row['predicted_ms']:7.1f} ({error:+.1%}); "
        f"exposed {exposed}; worst bucket end off by {row['worst_bucket_end_ms']:.0f} ms"
    )


def report(frame: pd.DataFrame) -> None:
    """The figures that say whether the timeline is right."""
    error = {
        kind: (frame[f"{kind}_ms"] / frame.measured_ms - 1).abs() for kind in ("predicted", "sum", "max")
    }  # fmt: skip
    worst = frame.loc[error["predicted"].idxmax()]
    print(f"{len(frame)} configurations, {(frame.communication_ms < frame.compute_ms).sum()} with less communication")
    for kind, values in error.items():
        print(f"  {kind:>9}: median error {values.median():.1%}, worst {values.max():.1%}")
    print(f"  worst of the timeline: {line(worst.to_dict())}")
    exposed = (frame.exposed_predicted_ms - frame.exposed_measured_ms).abs() / frame.measured_ms
    ends = frame.worst_bucket_end_ms / frame.measured_ms
    print(f"  exposed part: worst {exposed.max():.1%} of the step; a bucket's end: worst {ends.max():.1%} of the step")
    right = clear = 0
    for _, group in frame.groupby(["link", "hook"]):
        for a, b in itertools.combinations(group.to_dict("records"), 2):
            difference = a["measured_ms"] - b["measured_ms"]
            if abs(difference) > max(row["p75_ms"] - row["p25_ms"] for row in (a, b)):
                clear += 1
                right += difference * (a["predicted_ms"] - b["predicted_ms"]) > 0
    print(f"  bucket sizes: {right} of {clear} differences above the spread have the predicted sign")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, choices=range(1, len(PARTS) + 1), help="measure this part and merge it")
    parser.add_argument("--caps", type=int, nargs="+", default=CAPS_MB, help="bucket caps in MiB (default 1 5 25 100)")
    parser.add_argument("--report", action="store_true", help="only print what has been measured")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of a configuration (default 7)")
    options = parser.parse_args()
    if not options.report and not options.part:
        parser.error("say --part N or --report")
    known = dl.load_results(RESULTS)[0] if RESULTS.exists() else pd.DataFrame()
    if options.part:
        link, hook = PARTS[options.part - 1]
        for row in measure(link, hook, options.caps, options.steps):
            print(line(row), flush=True)
            if len(known):
                known = known[~(known[KEY] == [row[key] for key in KEY]).all(axis=1)]
            known = pd.concat([known, pd.DataFrame([row])]).sort_values(KEY, kind="stable", ignore_index=True)
            dl.save_results(RESULTS, known, basis=BASIS, script="benchmarks/timeline_predicted_vs_measured.py")
    report(known)


if __name__ == "__main__":
    main()

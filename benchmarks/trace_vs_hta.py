"""Trace analysis beside HolisticTraceAnalysis (HTA): the same traces, the same numbers, seconds and memory.

    python -m venv /some/where && /some/where/bin/pip install HolisticTraceAnalysis==0.5.0
    python benchmarks/trace_vs_hta.py /some/where/bin/python [--record]

Each run is a process of its own. Seconds and processor seconds (with children) count from the call to the printed
tables, both sides without their imports. Memory is the peak of what is resident, imports and all, in a run of its own:
of the process as the kernel counted it, or with its children, where it has any, sampled. The large traces are
`labs/data/traces/ddp_2xA100_rank0`, repeated in time with new correlation ids and step numbers until they have the
wanted size. Both report breakdown and overlap; ours also collectives, steps and stragglers. HTA's multiprocessing stays
as it is by default.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import psutil

from ddplab.results import save_results

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "labs" / "data" / "traces"
RUNS = {"ddp 49 MB": 3, "ddp 200 MB": 3, "ddp 800 MB": 2, "dlrm 8 ranks": 3}

OURS = """
import os, sys, time
import ddplab.trace.report
from ddplab.trace import analyze_trace
begin, busy = time.perf_counter(), sum(os.times()[:4])
report = analyze_trace(sys.argv[1])
print(report.breakdown.to_string(), report.overlap.to_string(), report.collectives.to_string(), report.stragglers)
percent = [f"{value:.2f}" for value in report.overlap["overlap_pct"]]
print("RESULT", time.perf_counter() - begin, sum(os.times()[:4]) - busy, PEAK, *percent)
"""
HTA = """
import os, sys, time
from hta.trace_analysis import TraceAnalysis
begin, busy = time.perf_counter(), sum(os.times()[:4])
analysis = TraceAnalysis(trace_dir=sys.argv[1])
print(analysis.get_temporal_breakdown(visualize=False))
percent = [f"{value:.2f}" for value in analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]]
print("RESULT", time.perf_counter() - begin, sum(os.times()[:4]) - busy, PEAK, *percent)
"""
_PEAK = "1024 * int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"  # exec resets it, not ru_maxrss

_SHIFTED = re.compile(
    r'"ts": (?P<ts>\d+(?:\.\d+)?)|"External id": (?P<ext>\d+)|"correlation": (?P<corr>\d+)|"id": (?P<flow>\d+)'
    r"|ProfilerStep#(?P<step>\d+)"
)


def tile(source: Path, target: Path, megabytes: float) -> None:
    """Write `source` again and again, later each time, until the text has about `megabytes` of 10^6 bytes."""
    text = gzip.decompress(source.read_bytes()).decode()
    begin = text.index('"traceEvents": [') + len('"traceEvents": [')
    # The profiler's own span and what follows it stay once, at the end.
    end = text.rindex("\n  {", 0, text.index('"cat": "Trace"'))
    body = text[begin:end].rstrip().rstrip(",")
    pieces, kinds, values, at = [], [], [], 0
    for match in _SHIFTED.finditer(body):
        low, high = match.span(match.lastgroup)
        pieces.append(body[at:low])
        kinds.append(match.lastgroup)
        values.append(float(match[match.lastgroup]) if match.lastgroup == "ts" else int(match[match.lastgroup]))
        at = high
    times = [value for kind, value in zip(kinds, values, strict=True) if kind == "ts"]
    steps = {value for kind, value in zip(kinds, values, strict=True) if kind == "step"}
    most = max(value for kind, value in zip(kinds, values, strict=True) if kind in ("ext", "corr", "flow"))
    by = {
        "ts": max(times) - min(times) + 1000.0,
        "ext": most + 1,
        "corr": most + 1,
        "flow": most + 1,
        "step": len(steps),
    }
    with open(target, "w", encoding="utf8") as out:
        out.write(text[:begin])
        for turn in range(max(1, round(megabytes * 1e6 / len(body)))):
            out.write("," if turn else "")
            for piece, kind, value in zip(pieces, kinds, values, strict=True):
                out.write(piece)
                out.write(f"{value + turn * by[kind]:.3f}" if kind == "ts" else str(value + turn * by[kind]))
            out.write(body[at:])
        out.write("," + text[end:])


def measure(python: str, code: str, folder: Path) -> tuple[float, float, float, list[str]]:
    """(seconds, processor seconds, peak MB with children, overlap percentages) of one process; imports not timed."""
    peak = 0
    command = [python, "-c", code.replace("PEAK", _PEAK), str(folder)]
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL) as run:
        process = psutil.Process(run.pid)
        while True:
            if run.poll() is not None:
                break
            try:
                family = [process, *process.children(recursive=True)]
                peak = max(peak, sum(one.memory_info().rss for one in family))
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.02)
        out.seek(0)
        text = out.read()
    if run.returncode:
        raise SystemExit(f"{python} ended with {run.returncode} on {folder}: {text[-500:]}")
    seconds, busy, own, *overlap = text.rpartition("RESULT")[2].split()
    return float(seconds), float(busy), max(peak, int(own)) / 1e6, overlap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="of the environment that has HTA")
    parser.add_argument("--only", nargs="*", default=list(RUNS), metavar="CASE", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--record", action="store_true", help="write labs/results/trace_vs_hta.json")
    args = parser.parse_args()
    rows = []
    for case in args.only:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            if case.startswith("ddp"):
                tile(
                    TRACES / "ddp_2xA100_rank0" / "rank0.pt.trace.json.gz", place / "rank0.json", float(case.split()[1])
                )
            else:
                place = TRACES / "dlrm_8xV100"
            size = sum(file.stat().st_size for file in place.glob("*.json*"))
            ours = [measure(sys.executable, OURS, place) for _ in range(RUNS[case])]
            # the report and pandas are loaded after reading; timed runs load them first, because imports are not timed
            lean = measure(sys.executable, OURS.replace("import ddplab.trace.report\n", ""), place)
            hta = [measure(args.python, HTA, place) for _ in range(1 if "800" in case else RUNS[case])]
        print(f"{case}: overlap % ours {ours[0][3]}, HTA {hta[0][3]}")
        fast, slow = min(one[0] for one in ours), min(one[0] for one in hta)
        cpu, hta_cpu = min(one[1] for one in ours), min(one[1] for one in hta)
        small, large = lean[2], max(one[2] for one in hta)
        rows.append(
            {
                "case": case, "file_MB": size / 1e6, "ddplab_s": fast, "hta_s": slow, "times_faster": slow / fast,
                "ddplab_cpu_s": cpu, "hta_cpu_s": hta_cpu, "times_less_cpu": hta_cpu / cpu,
                "ddplab_peak_MB": small, "hta_peak_MB": large, "times_less_memory": large / small,
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    table = pd.DataFrame(rows)
    print(table.round(2).to_string(index=False))
    times = table.set_index("case")["ddplab_s"]
    if {"ddp 200 MB", "ddp 800 MB"} <= set(times.index):
        print(f"ours, 800 MB over 200 MB: {times['ddp 800 MB'] / times['ddp 200 MB']:.2f}")
    if args.record:
        about = {"hta": "HolisticTraceAnalysis 0.5.0", "script": "benchmarks/trace_vs_hta.py PYTHON --record"}
        save_results(ROOT / "labs" / "results" / "trace_vs_hta.json", table, **about)


if __name__ == "__main__":
    main()

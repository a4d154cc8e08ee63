"""Cores of the labs on looking: profiler traces (06), links (07), what a broken job leaves behind (08).

Each rank writes files on its own machine, which the others cannot open. They are small, so the job carries them to
rank 0; a real job would write to a shared file system, or collect them afterwards.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddplab.cores.job import Job, Row, at_least, equal, here, leaving_bytes
from ddplab.execute import all_reduce
from ddplab.schedule import ring

Files = dict[str, bytes]
WIDTH, LAYERS, STEPS = 64, 3, 2
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
NUMEL = 1 << 20  # 4 MiB of float32
FAULT, STEP, LIMIT_S = "skipped_collective", 3, 6.0


def _kept(work: Callable[[Path], Any]) -> Files:
    """Inside a rank: what `work` left in a folder of this rank alone."""
    folder = Path(tempfile.mkdtemp(prefix="ddplab-core-"))
    try:
        work(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _words(ranks: Iterable[int]) -> str:
    return " ".join(map(str, ranks))


def _unpacked(files: list[Files], read: Callable[[Path], Any]) -> Any:
    """On rank 0: all ranks' files in one folder, and what `read` says of it."""
    with tempfile.TemporaryDirectory(prefix="ddplab-core-") as folder:
        for mine in files:
            for name, data in mine.items():
                (Path(folder) / name).write_bytes(data)
        return read(Path(folder))


# -- lab 06 -----------------------------------------------------------------------------------------------------------


def profiler_traces(job: Job) -> list[Row]:
    """A trace of every rank, read together: who is there, and what went through the all-reduces."""
    ranks, seen_B, exposed = job.first(_unpacked, job.launch(_kept, _record), _read_traces)
    return [
        equal("ranks in the traces", _words(ranks), _words(range(job.ranks))),
        equal(f"bytes all-reduced in {STEPS} steps", seen_B, STEPS * 4 * PARAMETERS),
        Row("exposed communication, the most", f"{exposed:.0f}% of a step"),
    ]


def _record(folder: Path) -> None:
    from ddplab.trace.capture import capture

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(here())
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    with capture(folder, steps=STEPS) as recorder:
        while not recorder.done:
            ddp(torch.randn(8, WIDTH, device=here())).square().mean().backward()
            ddp.zero_grad()
            recorder.step()


def _read_traces(folder: Path) -> tuple[list[int], int, float]:
    from ddplab.trace import analyze_trace

    report = analyze_trace(folder)
    table = report.collectives
    moved = int((table["count"] * table["message_bytes"]).sum())
    return sorted(map(int, report.ranks)), moved, float(report.steps["exposed_pct"].max())


# -- lab 07 -----------------------------------------------------------------------------------------------------------


def links(job: Job) -> list[Row]:
    """A ring, while this machine's links are watched; the kernel's count against the ring's closed form."""
    several = len(job.hosts) > 1
    seen = job.launch(_watched, several)
    rows = []
    for number, host in enumerate(job.hosts):
        one, where = seen[host[0]], f"machine {number}"
        rows.append(Row(f"{where}, busiest link", f"{one['peak'] * 8:.3g} Gbit/s, {one['device']}"))
        if job.counted:
            # the ring leaves a machine wherever the next rank lives on another one; on one machine all is loopback
            out = sum((rank + 1) % job.ranks not in host for rank in host) if several else job.ranks
            share = out * 2 * (job.ranks - 1) / job.ranks * 4 * NUMEL
            rows.append(at_least(f"{where}, sent in a ring", one["sent"] / 1e6, share / 1e6, " MB"))
    return rows


def _watched(several: bool) -> dict[str, Any]:
    from ddplab.dcgm.live import watch_links

    tensor, schedule = torch.ones(NUMEL, device=here()), ring(dist.get_world_size())

    def work() -> None:
        all_reduce(tensor, schedule, check=False)

    work()  # connections
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # one watch a machine
    with watch_links(0.05) if first else nullcontext() as watch:
        sent = leaving_bytes(work, loopback=not several)
    if not first:
        return {"sent": sent}
    frame = watch.frame().dropna(subset=["tx_GBps"])
    if several:
        frame = frame[frame.device != "lo"]
    if frame.empty:
        return {"sent": sent, "peak": float("nan"), "device": "no link"}
    top = frame.loc[frame.tx_GBps.idxmax()]
    return {"sent": sent, "peak": float(top.tx_GBps), "device": str(top.device)}


# -- lab 08 -----------------------------------------------------------------------------------------------------------


def hang(job: Job) -> list[Row]:
    """One rank leaves out a collective; from what the ranks leave behind `why` must say which rank, and which call.

    The training has a process group of its own, with a short limit, so its death leaves the job alive.
    """
    culprit = job.ranks - 1
    kind, ranks, operation, step = job.first(_unpacked, job.launch(_kept, _Broken(culprit, job.ranks)), _judge)
    return [
        equal("what happened", kind, FAULT),
        equal("the rank at fault", _words(ranks), _words([culprit])),
        equal("where", f"{operation}, step {step}", f"all_reduce, step {STEP}"),
    ]


class _Broken:
    """A training in which rank `culprit` does one thing wrong; called with the folder for what it leaves."""

    def __init__(self, culprit: int, ranks: int) -> None:
        self.culprit, self.ranks = culprit, ranks

    def __call__(self, folder: Path) -> None:
        import torch._dynamo  # noqa: F401 - DDP loads it, for seconds, which would look like a hang

        from ddplab.faults import Plan, _train

        dist.barrier()
        try:
            _train(Plan(FAULT, self.culprit, STEP, ranks=self.ranks, limit_s=LIMIT_S), str(folder))
        except RuntimeError:
            pass  # the timeout, which the black box has noted


def _judge(folder: Path) -> tuple[Any, ...]:
    from ddplab.why import why

    found = why(folder)
    return found.kind, found.ranks, found.operation, found.step

"""Traces of a made-up DDP job, event by event as Kineto writes them: every time in them is known beforehand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

HOOK = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


@dataclass
class Bucket:
    """Microseconds since backward began: its gradients are ready, and its kernel runs from start to end."""

    nbytes: int
    ready: float
    start: float
    end: float


@dataclass
class Step:
    """One training step of one rank. buckets: in order. backward: until when backward's kernels run.

    others: (name, offset, duration, bytes) of collectives before backward, on the communication stream.
    """

    buckets: list[Bucket]
    backward: float
    others: list[tuple[str, float, float, int]] = field(default_factory=list)
    forward: float = 1000.0
    tail: float = 500.0  # after the last event
    late: float = 0.0  # the step begins that much later


def gpu_trace(rank: int, ranks: int, steps: list[Step], first: int = 10) -> dict:
    """A whole trace; steps are numbered from `first`."""
    events: list[dict] = []
    correlation = 0

    def add(name: str, cat: str, ts: float, dur: float, tid: int, **args) -> None:
        pid = 0 if cat.startswith(("kernel", "gpu")) else 100
        events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args})

    def launch(ts: float, name: str, start: float, end: float, stream: int, tid: int, **args) -> None:
        nonlocal correlation
        correlation += 1
        add("cudaLaunchKernel", "cuda_runtime", ts, 0.5, tid, correlation=correlation)
        add(name, "kernel", start, end - start, stream, stream=stream, correlation=correlation, **args)

    def collective(ts: float, name: str, start: float, end: float, nbytes: int, tid: int) -> None:
        kernel = f"ncclDevKernel_{name}_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        args = {"Collective name": name.lower(), "In msg nelems": nbytes // 4, "Out msg nelems": nbytes // 4}
        group = {"dtype": "Float", "Group size": ranks, "Process Group Name": "0"}
        group["Process Group Ranks"] = str(list(range(ranks)))
        launch(ts, kernel, start, end, 20, tid, **args, **group)

    clock = 1000.0
    for number, step in enumerate(steps, first):
        begin = clock + step.late
        go = begin + step.forward  # of backward, on the GPU
        cpu = begin + 10  # the CPU runs ahead
        add("DistributedDataParallel.forward", "user_annotation", cpu, 40, 1)
        launch(cpu + 10, "void gemm(float)", begin + 50, go - 10, 7, 1)
        for name, offset, duration, nbytes in step.others:
            collective(cpu + 20, name, begin + offset, begin + offset + duration, nbytes, 1)
        cpu += 100
        done = 0.0
        for bucket in step.buckets:
            add("autograd::engine::evaluate_function: MmBackward0", "cpu_op", cpu, 10, 2)
            if bucket.ready > done:
                launch(cpu + 2, "void gemm_backward(float)", go + done, go + bucket.ready, 7, 2)
                done = bucket.ready
            add(HOOK, "cpu_op", cpu + 12, 20, 2)
            add("c10d::allreduce_", "cpu_op", cpu + 14, 10, 2)
            collective(cpu + 16, "AllReduce", go + bucket.start, go + bucket.end, bucket.nbytes, 2)
            cpu += 40
        add("autograd::engine::evaluate_function: MmBackward0", "cpu_op", cpu, 10, 2)
        if step.backward > done:
            launch(cpu + 2, "void gemm_backward(float)", go + done, go + step.backward, 7, 2)
        end = go + max([step.backward, *(b.end for b in step.buckets)]) + step.tail
        add(f"ProfilerStep#{number}", "user_annotation", begin, end - begin - 1, 1)
        clock = end
    info = {"backend": "nccl", "rank": rank, "world_size": ranks}
    return {"schemaVersion": 1, "distributedInfo": info, "baseTimeNanoseconds": 0, "traceEvents": events}


def write(folder: Path, traces: list[dict]) -> Path:
    """One file a rank, and the folder back."""
    folder.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        (folder / f"rank{trace['distributedInfo']['rank']}.pt.trace.json").write_text(json.dumps(trace))
    return folder


MIB = 2**20


def healthy(steps: int = 4) -> list[Step]:
    """DDP as it should be: 1 and 25 MiB buckets that leave during backward, two small broadcasts a step."""
    sizes = [MIB, 25 * MIB, 26 * MIB, 9 * MIB]
    times = [(2000, 2012, 2300), (9000, 9012, 13000), (17000, 17012, 21100), (24000, 24012, 25500)]
    buckets = [Bucket(n, *t) for n, t in zip(sizes, times, strict=True)]
    return [Step(buckets, 24000.0, [("Broadcast", 20, 30, 212480), ("Broadcast", 55, 8, 424)]) for _ in range(steps)]

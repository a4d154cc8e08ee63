"""The same timeline, measured: torch's DDP with a communication hook that looks at the clock."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ddplab.profile import Profile, between, clock
from ddplab.steptimes import BucketTimes, Timeline
from ddplab.transfers import count, number

if TYPE_CHECKING:
    from ddplab.hosts import Hosts

HOOKS = ("none", "fp16")


def measure_timeline(
    model: Profile | Callable[[], Any],
    ranks: int | None = None,
    hosts: Hosts | None = None,
    bucket_cap_mb: float | None = None,
    hook: str | Callable[[Any, Any], Any] = "none",
    steps: int = 5,
    warmup: int = 2,
    lanes: int | None = None,
    device: str = "auto",
    timeout: float = 120.0,
    realtime: bool = False,
    **ddp_options: Any,
) -> Timeline:
    """Train `steps` steps with torch's DDP on every rank and look at the clock: a `Timeline` like the predicted one.

    model: a `Profile`, which is played by `ddplab.paced`; or a function that returns (module, closure), where
        closure(ddp) runs forward on a batch and returns the loss, and is called once a step.
    hook: "none" (torch's allreduce_hook), "fp16" (torch's fp16_compress_hook), a hook of your own, state None, or a
        function without arguments that makes (state, hook) on each rank, such as `ddplab.onebit`. It is wrapped, and
        its future's completion is the bucket's end.
    steps, warmup: timed steps, and steps before them, at least 2 since DDP rebuilds its buckets after the first.
    ddp_options: passed to DistributedDataParallel.  ranks, hosts, device, timeout, realtime: as for `launch`.

    Every time is the median over steps of the slowest rank's. ready_s: the hook was called. end_s: its future is
    complete. start_s is not visible from a hook; it is the first moment since ready_s at which fewer than `lanes`
    buckets (gloo 2, NCCL 1) were under way. compute_end_s: the last bucket was handed over. `about["steps_s"]` holds
    the timed steps, slowest rank each.
    """
    from ddplab.launch import launch

    if not isinstance(model, Profile) and (not callable(model) or hasattr(model, "state_dict")):
        raise TypeError(f"model is a ddplab.Profile or a function that returns (module, closure), not {model!r}")
    count(steps, "steps", error=ValueError), count(warmup, "warmup", least=2, error=ValueError)
    if bucket_cap_mb is not None:
        number(bucket_cap_mb, "bucket_cap_mb, in MiB,", above=True)
    if hook not in HOOKS if isinstance(hook, str) else not callable(hook):
        raise ValueError(
            f"hook is {', '.join(HOOKS)}, a function (state, bucket) -> Future, or one without arguments that makes "
            f"(state, hook), not {hook!r}"
        )
    if lanes is not None:
        count(lanes, "lanes", error=ValueError)
    seen = launch(
        _train, model, bucket_cap_mb, hook, steps, warmup, ddp_options,
        ranks=ranks, hosts=hosts, device=device, timeout=timeout, realtime=realtime,
    )  # fmt: skip
    # (ranks, steps, ...) -> the slowest rank's, then the median step
    middle = {
        key: np.median(np.max([one[key] for one in seen], axis=0), axis=0)
        for key in ("forward", "compute", "done", "optimizer", "ready", "end")
    }
    lanes = lanes or (1 if seen[0]["backend"] == "nccl" else 2)
    buckets, free = [], [0.0] * lanes
    for i, nbytes in enumerate(seen[0]["sizes"]):
        ready, end = float(middle["ready"][i]), float(middle["end"][i])
        free.sort()
        start = min(max(ready, free[0]), end)
        free[0] = end
        buckets.append(BucketTimes(i, nbytes, ready, start, end, tuple(seen[0]["names"][i])))
    every = np.max([np.sum([one[k] for k in ("forward", "done", "optimizer")], axis=0) for one in seen], axis=0)
    return Timeline(
        tuple(buckets),
        *(float(middle[key]) for key in ("forward", "compute", "done", "optimizer")),
        basis="paced" if isinstance(model, Profile) else "measured",
        about={
            "ranks": len(seen),
            "link": str(hosts.link) if hosts else "this machine's loopback",
            "bucket_cap_mb": bucket_cap_mb,
            "compression": hook if isinstance(hook, str) else getattr(hook, "__name__", "hook"),
            "steps_s": [float(s) for s in every],
        },
    )


def made(hook: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """(state, hook): of a function without required arguments what it returns, of a hook itself with state None."""
    try:
        inspect.signature(hook).bind()
    except TypeError:
        return None, hook
    return hook()


def _train(
    model: Any, cap: float | None, hook: Any, steps: int, warmup: int, ddp_options: dict[str, Any]
) -> dict[str, Any]:
    """Inside a rank: times of each timed step, seconds since its backward began, and the buckets of the last one."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    from ddplab.paced import paced

    if isinstance(model, Profile):
        module = paced(model)
        closure, optimizer_step = (lambda ddp: ddp()), module.optimizer_step
    else:
        module, closure = model()
        optimizer_step = None
    cuda = next(module.parameters()).is_cuda
    ddp = DistributedDataParallel(module, bucket_cap_mb=cap, **ddp_options)
    names = {id(p): name for name, p in module.named_parameters()}
    known = {"none": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}
    hook_state, inner = (None, known[hook]) if isinstance(hook, str) else made(hook)
    ready: list[Any] = []
    end: dict[int, Any] = {}
    last: list[tuple[int, list[str]]] = []

    def watched(state, bucket):  # no annotations: torch wants exactly its own there, and ours are text
        index = bucket.index()
        ready.append(clock(cuda))
        last.append((bucket.buffer().nbytes, [names[id(p)] for p in bucket.parameters()]))

        def note(future: Any) -> Any:
            end[index] = clock(cuda)
            return future.value()

        return inner(hook_state, bucket).then(note)

    ddp.register_comm_hook(None, watched)
    out: dict[str, list] = {key: [] for key in ("forward", "compute", "done", "optimizer", "ready", "end")}
    for step in range(warmup + steps):
        ddp.zero_grad()
        ready.clear(), end.clear(), last.clear()
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        begin = clock(cuda)
        loss = closure(ddp)
        middle = clock(cuda)
        loss.backward()
        done = clock(cuda)
        if optimizer_step:
            optimizer_step()
        over = clock(cuda)
        if cuda:
            torch.cuda.synchronize()
        if step >= warmup:
            out["forward"].append(between(begin, middle))
            out["compute"].append(between(middle, ready[-1]))
            out["done"].append(between(middle, done))
            out["optimizer"].append(between(done, over))
            out["ready"].append([between(middle, mark) for mark in ready])
            out["end"].append([between(middle, end[i]) for i in range(len(ready))])
    return {**out, "sizes": [n for n, _ in last], "names": [m for _, m in last], "backend": dist.get_backend()}

"""DataParallel against DistributedDataParallel, measured: seconds, bytes and links of one training step.

With two or more GPUs `dp_nccl` is the real `torch.nn.DataParallel`. Elsewhere DataParallel does nothing (on CPUs it
only calls the module), so the traffic that it would put on the links runs between ranks; every row says which it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddplab.transfers import count, number

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from ddplab.hosts import Hosts
    from ddplab.profile import Profile

ROWS = ("dp_star", "dp_nccl", "ddp", "ddp_no_overlap")
BACKWARD_S = 0.4  # of a paced model that is named or given as a module: stated, see `ddplab.paced`

Batch = Callable[[int], tuple[Any, ...]]


def compare(
    model: str | Profile | Callable[[], nn.Module] = "resnet18",
    ranks: int | None = None,
    hosts: Hosts | None = None,
    schemes: Sequence[str] = ROWS,
    batch: int = 32,
    pace: bool = True,
    backward_s: float = BACKWARD_S,
    bucket_cap_mb: float | None = None,
    steps: int = 5,
    warmup: int = 2,
    device: str = "auto",
    timeout: float = 300.0,
    realtime: bool = False,
) -> pd.DataFrame:
    """One row a scheme, medians over `steps` steps of the slowest rank.

    Args:
        model: name of a torchvision classifier, a `Profile` (paced), or a function that builds a module which takes
            one batch of images, float32 (batch, 3, 64, 64), and returns logits of 10 or more classes.
        ranks: processes; default: as many as `hosts` has, or 4.
        hosts: emulated hosts; then the kernel counts the bytes of each link.
        schemes: of "dp_star", "dp_nccl", "ddp", "ddp_no_overlap".
        batch: samples a rank and step; counts for samples_per_s, and is the size of the images' batch if not paced.
        pace: play the model's sizes with a backward that waits on the clock (see `paced`), the default because ranks
            that outnumber the cores fight for them, which GPUs do not. False computes for real.
        backward_s: seconds of the paced backward; forward takes half. A `Profile` brings its own times.
        bucket_cap_mb: of torch's DDP.   steps, warmup: timed and untimed steps (DDP rebuilds its buckets in the first).
        device, timeout, realtime: as for `launch`.

    Returns:
        scheme, ranks, compute_ms (a step of one rank alone, same pinning), communication_ms (at least one collective
        under way), exposed_ms (step - compute), step_ms, sent_min_B and sent_max_B (a rank's bytes a step by the
        kernel's count; <NA> without hosts), busiest_over_mean (bytes on the busiest direction of a host's link over the
        mean of all), samples_per_s, efficiency_pct (of ranks times one rank alone), basis ("paced" or "measured"),
        how (what ran). `dp_star` and `dp_nccl` are emulated between ranks unless `how` says otherwise.

    Raises:
        ValueError, TypeError: an unknown scheme or model, or numbers that make no sense; before any rank starts.
    """
    import pandas as pd

    from ddplab.launch import count_ranks, resolve_backend
    from ddplab.profile import Profile

    if "RANK" in os.environ:
        raise ValueError("compare starts ranks of its own, also a single one to compare with: run it without torchrun")
    schemes = [schemes] if isinstance(schemes, str) else list(schemes)
    unknown = [name for name in schemes if name not in ROWS]
    if unknown or not schemes:
        raise ValueError(f"schemes are {', '.join(ROWS)}, not {unknown or schemes!r}")
    for name, value, least in (("batch", batch, 1), ("steps", steps, 1), ("warmup", warmup, 2)):
        count(value, name, least, ValueError)
    number(backward_s, "backward_s, in seconds,")
    if bucket_cap_mb is not None:
        number(bucket_cap_mb, "bucket_cap_mb, in MiB,", above=True)
    if isinstance(model, str):
        from ddplab.assumed import torchvision_model

        torchvision_model(model)  # an unknown name is refused here, not in a rank
    elif not isinstance(model, Profile) and (not callable(model) or _is_module(model)):
        kind = type(model).__name__
        raise TypeError(f"model is a name, a ddplab.Profile or a function that builds a module, not a {kind}")
    if hosts is not None and not hasattr(hosts, "namespaces"):
        raise TypeError(f"hosts is a ddplab.Hosts that is up, not {hosts!r}")
    n = count_ranks(ranks, hosts)
    paced = pace or isinstance(model, Profile)
    order = (model, batch, paced, backward_s, bucket_cap_mb, steps, warmup)
    options = {"timeout": timeout, "realtime": realtime}
    backend = "gloo" if hosts is not None else resolve_backend(n, device)[0]
    alone = _launch("alone", order, 1, None, device, options)
    rows = []
    for name in schemes:
        if name == "dp_nccl" and backend == "nccl" and n > 1 and not paced:
            seen, how = _launch("DataParallel", (*order, n), 1, None, "cuda", options), "torch.nn.DataParallel"
        else:
            seen = _launch(name, order, n, hosts, device, options)
            how = "DataParallel's traffic, emulated between ranks" if name.startswith("dp_") else "real"
        compute = float(np.median(alone[0]["step_s"])) * 1e3
        rows.append(
            {
                "scheme": name,
                "ranks": n,
                **_figures(seen, compute, hosts is not None),
                "samples_per_s": 0.0,
                "efficiency_pct": 0.0,
                "basis": "paced" if paced else "measured",
                "how": f"{how}, {backend}" if how != "torch.nn.DataParallel" else how,
            }
        )
    frame = pd.DataFrame(rows).astype({"sent_min_B": "Int64", "sent_max_B": "Int64"})
    frame["samples_per_s"] = n * batch / frame.step_ms * 1e3
    frame["efficiency_pct"] = frame.compute_ms / frame.step_ms * 100
    frame.attrs = {"link": str(hosts.link) if hosts else "loopback of this machine", "batch": batch, "steps": steps}
    return frame


def _is_module(model: Any) -> bool:
    """Whether this is a module already, asked without torch; a class of modules is a function that builds one."""
    return hasattr(model, "state_dict") and not isinstance(model, type)


def _launch(
    scheme: str, order: tuple, ranks: int, hosts: Hosts | None, device: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    from ddplab.launch import launch

    run = _data_parallel if scheme == "DataParallel" else _steps
    arguments = order if scheme == "DataParallel" else (scheme, *order)
    return launch(run, *arguments, ranks=ranks, hosts=hosts, device=device, **options)


def _figures(seen: list[dict[str, Any]], compute_ms: float, on_hosts: bool) -> dict[str, Any]:
    """Per step the slowest rank; over steps the median."""
    step = float(np.median(np.max([one["step_s"] for one in seen], axis=0))) * 1e3
    communication = float(np.median(np.max([one["communication_s"] for one in seen], axis=0))) * 1e3
    sent, received = (np.median([one[key] for one in seen], axis=1) for key in ("sent", "received"))
    loads = np.concatenate([sent, received])
    return {
        "compute_ms": compute_ms,
        "communication_ms": communication,
        "exposed_ms": step - compute_ms,
        "step_ms": step,
        "sent_min_B": round(float(sent.min())) if on_hosts else None,
        "sent_max_B": round(float(sent.max())) if on_hosts else None,
        "busiest_over_mean": float(loads.max() / loads.mean()) if on_hosts and loads.any() else float("nan"),
    }


def _build(model: Any, batch: int, paced: bool, backward_s: float) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """(module, loss of one step), in a rank. Replicas start equal; each rank draws its own batch."""
    import torch
    import torch.distributed as dist

    from ddplab.assumed import torchvision_model
    from ddplab.paced import paced as play
    from ddplab.profile import Profile

    device = torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")
    if isinstance(model, Profile):
        return play(model).to(device), lambda module: module()
    rng = torch.get_rng_state()
    torch.manual_seed(0)
    if paced:
        module = play(torchvision_model(model) if isinstance(model, str) else model(), backward_s)
        return module.to(device), lambda module: module()
    if isinstance(model, str):
        import torchvision

        module = torchvision.models.get_model(model)
    else:
        module = model()
    torch.set_rng_state(rng)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    images = torch.randn(batch, 3, 64, 64, generator=generator).to(device)
    labels = torch.randint(10, (batch,), generator=generator).to(device)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"the function that builds the model returned {type(module).__name__}, not a torch module")
    return module.to(device), lambda module: torch.nn.functional.cross_entropy(module(images), labels)


def _steps(
    scheme: str, model: Any, batch: int, paced: bool, backward_s: float, cap: float | None, steps: int, warmup: int
) -> dict[str, Any]:
    """Inside a rank: every timed step's seconds, seconds of communication, bytes out and in."""
    import torch
    import torch.distributed as dist

    from ddplab._schemes import SCHEMES
    from ddplab.hosts import link_bytes

    module, loss = _build(model, batch, paced, backward_s)
    options = {"bucket_cap_mb": cap} if scheme == "ddp" else {}
    runner = SCHEMES[scheme](module, lr=0.01, **options)
    out: dict[str, Any] = {"step_s": [], "communication_s": [], "sent": [], "received": []}
    for step in range(warmup + steps):
        before = link_bytes()
        dist.barrier()
        runner.spans.clear()
        start = time.perf_counter()
        runner.step(loss)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        dist.barrier()
        after = link_bytes()
        if step >= warmup:
            out["step_s"].append(took)
            out["communication_s"].append(union_seconds(runner.spans))
            out["sent"].append(after.sent - before.sent)
            out["received"].append(after.received - before.received)
    runner.settle()
    out["parameters"] = [float(p.detach().double().sum()) for p in module.parameters()]
    return out


def _data_parallel(
    model: Any, batch: int, paced: bool, backward_s: float, cap: float | None, steps: int, warmup: int, gpus: int
) -> dict[str, Any]:
    """The real `nn.DataParallel` over `gpus` GPUs in one process; its links are not counted. Not run on GPUs yet."""
    import torch

    module, loss = _build(model, batch * gpus, paced, backward_s)
    parallel = torch.nn.DataParallel(module, device_ids=list(range(gpus)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    seconds = []
    for _ in range(warmup + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(parallel).backward()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    nothing = [0.0] * steps
    return {"step_s": seconds[warmup:], "communication_s": [float("nan")] * steps, "sent": nothing, "received": nothing}


def union_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one span is under way."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total

"""Each strategy as torch builds it, on real ranks: what a rank keeps, and what its collectives send."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ddplab.strategies import strategies
from ddplab.transfers import count

if TYPE_CHECKING:
    import pandas as pd

BUILT = ("DDP", "ZeroRedundancyOptimizer", "FSDP2, parameters kept", "FSDP2", "HSDP")


def measure_strategies(ranks: int = 4, ranks_per_host: int = 2, width: int = 64, blocks: int = 4) -> pd.DataFrame:
    """Build each strategy that torch has, train a few steps, and count: bytes that a rank keeps, bytes that it sends.

    The model is `blocks` square layers of `width`; Adam; fp32. kept_B: parameters, gradients and optimizer state of
    rank 0, without `extra`. sent_B: what the step's collectives send if each is a ring, from the sizes that the
    profiler saw. predicted_*: `strategies`. Runs on gloo, also where there are GPUs: the counts depend on no device.
    """
    from pandas import DataFrame

    from ddplab.launch import launch

    for name, value, least in (("ranks", ranks, 2), ("ranks_per_host", ranks_per_host, 1), ("width", width, 1)):
        count(value, name, least=least, error=ValueError)
    count(blocks, "blocks", error=ValueError)
    if ranks % ranks_per_host or (width * width) % ranks:
        raise ValueError(
            f"ranks ({ranks}) must be a multiple of ranks_per_host ({ranks_per_host}) and divide "
            f"width * width ({width}^2)"
        )
    hosts = ranks // ranks_per_host
    expected = {
        one.name: one
        for one in strategies(blocks * width**2, hosts=hosts, ranks_per_host=ranks_per_host, blocks=blocks)
    }
    quiet = {"KINETO_LOG_LEVEL": "99"}
    found = launch(_all, ranks_per_host, width, blocks, ranks=ranks, device="cpu", env=quiet, show=False, timeout=120)[
        0
    ]
    rows = []
    for name, (kept, sent) in found.items():
        one = expected[name]
        rows.append((name, kept, one.params + one.grads + one.state, sent, one.sent))
    return DataFrame(rows, columns=["strategy", "kept_B", "predicted_kept_B", "sent_B", "predicted_sent_B"])


def _all(ranks_per_host: int, width: int, blocks: int) -> dict[str, tuple[int, float]]:
    """In a rank: every strategy in turn."""
    return {name: _one(name, ranks_per_host, width, blocks) for name in BUILT}


def _one(name: str, ranks_per_host: int, width: int, blocks: int) -> tuple[int, float]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)  # all ranks begin alike
    net = nn.Sequential(*(part for _ in range(blocks) for part in (nn.Linear(width, width, bias=False), nn.ReLU())))
    model, optimizer = _built(name, net, ranks_per_host)
    inputs = torch.randn(8, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(3):  # DDP's buckets settle, Adam's state appears
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        step()
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeroRedundancyOptimizer has one of its own inside
    state = (t for entry in states for t in entry.values() if torch.is_tensor(t) and t.dim())
    kept = sum(map(_bytes, [*model.parameters(), *(p.grad for p in model.parameters()), *state]))
    return kept, _sent(recorded.events(), dist.get_world_size(), ranks_per_host if name == "HSDP" else None)


def _built(name: str, net: Any, ranks_per_host: int) -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    ranks = dist.get_world_size()
    if name == "DDP":
        return (model := DistributedDataParallel(net)), torch.optim.Adam(model.parameters())
    if name == "ZeroRedundancyOptimizer":
        model = DistributedDataParallel(net)
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam)
    if name == "HSDP":
        mesh = init_device_mesh("cpu", (ranks // ranks_per_host, ranks_per_host), mesh_dim_names=("inter", "intra"))
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    for layer in list(net)[::2]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=name != "FSDP2, parameters kept")
    model = fully_shard(net, mesh=mesh)
    return model, torch.optim.Adam(model.parameters())


def _bytes(tensor: Any) -> int:
    """Of this rank's own part."""
    mine = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return mine.numel() * mine.element_size()


def _sent(events: Iterable[Any], ranks: int, shard_ranks: int | None) -> float:
    """Bytes that a rank of a ring sends for these float32 collectives. shard_ranks: of a sharding group; None: all."""
    from math import prod

    once: dict[str, list[int]] = {
        "gloo:all_reduce": [],
        "c10d::_allgather_base_": [],
        "c10d::_reduce_scatter_base_": [],
    }
    once["gloo:broadcast"] = []
    for event in events:
        if event.name in once:
            at = 1 if event.name == "c10d::_reduce_scatter_base_" else 0  # (output, input): the input is the whole
            once[event.name].append(4 * prod(event.input_shapes[at]))
    for size in once["c10d::_reduce_scatter_base_"]:  # gloo does it by an all-reduce of the whole input
        once["gloo:all_reduce"].remove(size)
    sharding, replicas = shard_ranks or ranks, ranks // shard_ranks if shard_ranks else ranks

    def ring(n: int, volume: float) -> float:
        return (n - 1) / n * volume

    sharded = sum(once["c10d::_allgather_base_"]) + sum(once["c10d::_reduce_scatter_base_"])
    return ring(sharding, sharded + sum(once["gloo:broadcast"])) + ring(replicas, 2 * sum(once["gloo:all_reduce"]))

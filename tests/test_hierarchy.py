"""Two-level all-reduce: against closed forms, against the flat all-reduce, and against the kernel's byte counters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddplab as dl
from ddplab import twolevel
from ddplab.launch import launch
from ddplab.schedule import Schedule
from ddplab.twolevel import Sent, half_ring

PARTITIONS_OF_4 = [
    [[0, 1, 2, 3]],
    [[0], [1], [2], [3]],
    [[0, 1], [2, 3]],
    [[0, 2], [3, 1]],
    [[0], [1, 2, 3]],
    [[1, 0, 3], [2]],
    [[0, 3], [1], [2]],
]
PARTITIONS_OF_6 = [[[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[5, 0, 2, 1], [3, 4]]]


def flat_sum(inputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([t.double() for t in inputs]).sum(dim=0)


def partitions(all_of_them: list) -> list[str]:
    """In a rank: the mean of 0 to n - 1, and sums of random numbers of many sizes; returns what went wrong."""
    rank, n, wrong = dist.get_rank(), dist.get_world_size(), []
    for hosts in all_of_them:
        levels = dl.Hierarchy(hosts)
        mean = dl.hierarchical_all_reduce(torch.full((5,), float(rank)), levels, op="mean")
        if not torch.allclose(mean, torch.full((5,), (n - 1) / 2)):
            wrong.append(f"{hosts}: mean {mean.tolist()}")
        for size, part_bytes in ((0, 64), (1, 64), (2, 64), (n - 1, 1 << 20), (n + 1, 1 << 20), (33, 64), (1000, 900)):
            twolevel.PART_BYTES = part_bytes  # one part, or several of uneven length
            inputs = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(n)]
            ours = inputs[rank].clone()
            if dl.hierarchical_all_reduce(ours, levels, check=size == 33) is not ours:
                wrong.append(f"{hosts} {size}: not in place")
            if not torch.allclose(ours.double(), flat_sum(inputs), atol=1e-5):
                wrong.append(f"{hosts} {size}: off by {(ours.double() - flat_sum(inputs)).abs().max()}")
            everyones = [torch.empty_like(ours) for _ in range(n)]
            dist.all_gather(everyones, ours)
            if not all(torch.equal(ours, other) for other in everyones):
                wrong.append(f"{hosts} {size}: ranks differ")
    return wrong


@pytest.mark.parametrize("hosts", [PARTITIONS_OF_4, PARTITIONS_OF_6], ids=["4 ranks", "6 ranks"])
def test_every_partition(hosts: list) -> None:
    """Uneven ones too, where the mean of the hosts' means is not the mean: 0 on one host and 1, 2, 3 on another."""
    ranks = sum(map(len, hosts[0]))
    assert launch(partitions, hosts, ranks=ranks, timeout=300, device="cpu") == [[]] * ranks


def native(sizes: list[int]) -> list[float]:
    """In a rank: the road for NCCL, which pads, on gloo, whose reduce-scatter gives the right values, if slowly."""
    levels, apart = dl.Hierarchy([[0, 1, 2], [3, 4, 5]]), []
    for size in sizes:
        inputs = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(6)]
        ours = inputs[dist.get_rank()].clone()
        twolevel.PART_BYTES = 128
        twolevel._in_parts(ours, levels, twolevel._Native(levels))
        apart.append(float((ours.double() - flat_sum(inputs)).abs().max()))
    return apart


def test_the_native_road_pads() -> None:
    rows = launch(native, [1, 2, 3, 97, 99, 100], ranks=6, timeout=300, device="cpu")
    assert max(itertools.chain(*rows)) < 1e-5


def on_a_mesh() -> dict[str, Any]:
    """In a rank of four: what a mesh gives, tensors of every kind, and what is refused."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, found = dist.get_rank(), {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    base = torch.tensor([[0.0, 1], [2, 3]]) + 10 * rank
    column = base[:, 0]
    dl.hierarchical_all_reduce(column, mesh)
    found["column"] = (column.tolist(), base[:, 1].tolist())
    found["scalar"] = dl.hierarchical_all_reduce(torch.tensor(1.0 + rank), mesh).item()
    found["empty"] = tuple(dl.hierarchical_all_reduce(torch.empty(2, 0, 3), mesh).shape)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.uint8, torch.int32, torch.int64):
        whole = torch.arange(7).to(dtype) * (rank + 1)
        found[str(dtype)] = dl.hierarchical_all_reduce(whole, mesh).tolist()
    large = torch.full((3,), 40000.0, dtype=torch.float16)
    found["fp16 mean"] = dl.hierarchical_all_reduce(large, mesh, op="mean").tolist()
    needs_grad = torch.ones(2, requires_grad=True)
    found["grad"] = dl.hierarchical_all_reduce(needs_grad, mesh).tolist()

    other_names = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "gpus"))
    ragged = torch.ones(2 + rank % 2)
    for name, call in {
        "mean of integers": lambda: dl.hierarchical_all_reduce(torch.ones(3, dtype=torch.int32), mesh, op="mean"),
        "int16": lambda: dl.hierarchical_all_reduce(torch.ones(3, dtype=torch.int16), mesh),
        "op": lambda: dl.hierarchical_all_reduce(torch.ones(3), mesh, op="max"),
        "names": lambda: dl.hierarchical_all_reduce(torch.ones(3), other_names),
        "no mesh": lambda: dl.hierarchical_all_reduce(torch.ones(3), "mesh"),
        "shapes": lambda: dl.hierarchical_all_reduce(ragged, mesh),
        "hosts differ": lambda: dl.Hierarchy([[0, 1], [2, 3]] if rank else [[0], [1, 2, 3]]),
        "rank missing": lambda: dl.Hierarchy([[0, 1], [2]]),
        "rank twice": lambda: dl.Hierarchy([[0, 1], [1, 2, 3]]),
        "empty host": lambda: dl.Hierarchy([[0, 1, 2, 3], []]),
        "not ranks": lambda: dl.Hierarchy([["a", "b"], [2, 3]]),
        "number": lambda: dl.Hierarchy(2),
    }.items():
        try:
            call()
            found[name] = "nothing"
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def mesh_of_four() -> list[dict[str, Any]]:
    return launch(on_a_mesh, ranks=4, timeout=300, device="cpu")


def test_views_scalars_and_dtypes(mesh_of_four: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(mesh_of_four):
        assert found["column"] == ([60.0, 68.0], [1.0 + 10 * rank, 3.0 + 10 * rank])
        assert found["scalar"] == 10 and found["empty"] == (2, 0, 3)
        for dtype in ("float16", "bfloat16", "float64", "complex64", "uint8", "int32", "int64"):
            assert found[f"torch.{dtype}"] == [10 * i for i in range(7)]
        assert found["fp16 mean"] == [40000.0] * 3  # a sum of four would be infinite
        assert found["grad"] == [4.0, 4.0]


def test_what_is_refused_is_refused_on_every_rank(mesh_of_four: list[dict[str, Any]]) -> None:
    for found in mesh_of_four:
        assert found["mean of integers"].startswith("TypeError") and "int32" in found["mean of integers"]
        assert found["int16"].startswith("TypeError") and "int16" in found["int16"]
        assert '"sum" or "mean"' in found["op"] and "'max'" in found["op"]
        assert "('hosts', 'gpus')" in found["names"] and 'mesh_dim_names=("inter", "intra")' in found["names"]
        assert "not 'mesh'" in found["no mesh"]
        assert "rank 0: (2,) float32" in found["shapes"] and "rank 1: (3,) float32" in found["shapes"]
        assert "different hosts" in found["hosts differ"] and "rank 0: [[0], [1, 2, 3]]" in found["hosts differ"]
        for name in ("rank missing", "rank twice", "empty host"):
            assert found[name].startswith("ValueError: hosts must name each of the ranks [0, 1, 2, 3] once"), name
        for name in ("not ranks", "number"):
            assert found[name].startswith("TypeError: hosts are lists of ranks"), name


# ---- the schedule behind it


@pytest.mark.parametrize(("ranks", "blocks"), [(1, 1), (2, 2), (4, 4), (4, 1), (5, 3)])
def test_the_halves_of_a_host_make_an_all_reduce(ranks: int, blocks: int) -> None:
    """Reduce-scatter, then all-gather, is an all-reduce of the host; in between block b is complete on rank b."""
    first, second = half_ring(ranks, blocks, gather=False), half_ring(ranks, blocks, gather=True)
    later = [(t.step + first.steps, *t[1:]) for t in second.transfers]
    whole = Schedule.from_rows("both", ranks, blocks, [*first.transfers, *later])
    whole.verify()
    everyone = tuple(range(ranks))
    held = whole.states()[first.steps]
    assert all(held[b][b] == everyone for b in range(blocks))


# ---- where it runs and what it sends


def sends(nbytes: int, hosts: list | None) -> tuple[Any, Sent, int, list]:
    """In a rank on an emulated host: the hosts that it finds, what it says it sent, and what the kernel counted."""
    levels = dl.Hierarchy(hosts)
    tensor = torch.full((nbytes // 4,), float(dist.get_rank()))
    dist.barrier()
    before = dl.link_bytes().sent
    sent = twolevel.reduce_in_place(tensor, levels, "sum")
    dist.barrier()
    return levels.hosts, sent, dl.link_bytes().sent - before, tensor.unique().tolist()


def test_the_kernel_counts_the_bytes_that_leave_a_host() -> None:
    k, g = 3, 2
    if problem := dl.hosts_problem():
        pytest.skip(problem)
    nbytes = 2_400_000
    with dl.Hosts(k, link="10gbit", ranks_per_host=g) as hosts:
        rows = launch(sends, nbytes, None, hosts=hosts, timeout=300)
    for host in range(k):
        mine = rows[host * g : (host + 1) * g]
        assert sum(sent.across for _, sent, _, _ in mine) == 2 * (k - 1) * nbytes // k
        assert mine[0][2] == pytest.approx(2 * (k - 1) / k * nbytes, rel=0.01)
    for found, sent, _, values in rows:
        assert found == tuple(tuple(range(h * g, (h + 1) * g)) for h in range(k))  # nobody told it
        assert sent.inside == 2 * (g - 1) * nbytes // g
        assert values == [sum(range(k * g))]


def test_a_rail_for_every_rank_of_the_smallest_host() -> None:
    """Uneven hosts: the spare ranks of a large one give and get, and send nothing across."""
    rows = launch(sends, 1200, [[0, 1], [2, 3, 4]], ranks=5, timeout=300, device="cpu")
    assert [sent.across for _, sent, _, _ in rows] == [600, 600, 600, 600, 0]
    # of the larger host rank 0 sends all but its own block, then all but the one that it gets last; and so on
    assert [sent.inside for _, sent, _, _ in rows] == [1200, 1200, 1200, 1800, 1800]
    assert all(values == [10.0] for *_, values in rows)


# ---- as a communication hook


WAYS = [(None, False), ([[0, 1], [2, 3]], False), ([[0], [1, 2, 3]], True)]  # hosts, and whether the DDP is ours


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def trained(hosts: list | None, ours: bool, steps: int) -> dict[str, Any]:
    """In a rank: a model trained with the hook beside the same one without, and what the state says of it."""
    from torch.nn.parallel import DistributedDataParallel

    def wrapped() -> Any:
        torch.manual_seed(0)
        return (dl.BucketedDDP if ours else DistributedDataParallel)(Small(), bucket_cap_mb=0.001)

    plain, hooked = wrapped(), wrapped()
    state = dl.Hierarchical(hosts)
    hooked.register_comm_hook(state, dl.hierarchical_hook)
    torch.manual_seed(100 + dist.get_rank())
    apart = 0.0
    for _ in range(steps):
        x = torch.randn(4, 13)
        for ddp in (plain, hooked):
            ddp.zero_grad()
            ddp(x).square().sum().backward()
        for a, b in zip(plain.parameters(), hooked.parameters(), strict=True):
            apart = max(apart, float((a.grad - b.grad).abs().max()))
            a.data -= 0.1 * a.grad
            b.data -= 0.1 * b.grad
    dl.assert_grads_in_sync(hooked)
    saved = state.state_dict()
    again = dl.Hierarchical(hosts)
    again.load_state_dict(saved)
    numbers = (state.wire_bytes, state.across_bytes, again.wire_bytes, again.across_bytes, state.residual_norm())
    poisoned = ""
    if not ours:
        x = torch.randn(4, 13)
        x[0, 0] = float("nan") if dist.get_rank() == 1 else 0.0
        try:
            hooked(x).sum().backward()
        except ValueError as error:
            poisoned = str(error)
    state.close()
    again.close()
    return {"apart": apart, "numbers": numbers, "poisoned": poisoned}


def trained_in_three_ways(steps: int) -> list[dict[str, Any]]:
    return [trained(hosts, ours, steps) for hosts, ours in WAYS]


def test_ddp_trains_as_without_it() -> None:
    steps, numel = 4, 7 * 14 * 13
    rows = launch(trained_in_three_ways, steps, ranks=4, timeout=300, device="cpu")
    for (hosts, ours), ranks in zip(WAYS, zip(*rows, strict=True), strict=True):
        assert max(row["apart"] for row in ranks) < 1e-6
        for wire, across, wire_again, across_again, norm in (row["numbers"] for row in ranks):
            assert wire == wire_again and across == across_again and norm == 0.0
        across, k = sum(row["numbers"][1] for row in ranks), len(hosts or [0])
        assert across == pytest.approx(steps * 2 * (k - 1) * numel * 4, rel=0.01)  # all hosts; buckets round down
        assert ours or all("rank 1" in row["poisoned"] for row in ranks)


def groups_of_torch() -> dict[str, str]:
    """In a rank of four: what torch's own ways to groups do on a CPU."""
    from torch.distributed.device_mesh import init_device_mesh

    found = {}
    try:
        dist.new_subgroups()
        found["new_subgroups()"] = "made"
    except Exception as error:
        found["new_subgroups()"] = type(error).__name__
    mine, _ = dist.new_subgroups(group_size=2)
    found["new_subgroups(2)"] = str(dist.get_process_group_ranks(mine))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    found["intra"] = str(dist.get_process_group_ranks(mesh.get_group("intra")))
    found["inter"] = str(dist.get_process_group_ranks(mesh.get_group("inter")))
    return found


def test_torchs_own_groups() -> None:
    rows = launch(groups_of_torch, ranks=4, timeout=300, device="cpu")
    for rank, found in enumerate(rows):
        assert found["new_subgroups()"] != "made"  # it wants to know the number of GPUs
        host = rank // 2 * 2
        assert found["new_subgroups(2)"] == found["intra"] == str([host, host + 1])
        assert found["inter"] == str([rank % 2, rank % 2 + 2])

"""Our four DDPs against torch's DDP and against one process on the whole batch.

A launch costs more than a check, so each launch does many and returns what it found.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from ddp_cases import OURS, batch, outcome, toy
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab.accumulate import assert_grads_in_sync
from ddplab.ddp import BucketedDDP, FlatDDP, NaiveDDP
from ddplab.launch import launch
from ddplab.schedule import ring, star

SMALL = {"small buckets": lambda m: BucketedDDP(m, bucket_cap_mb=0.0005)}
EVERY = {**OURS, **SMALL}


# -- models ------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, and a frozen layer between."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        tokens = (x[:, 0].abs() * 1000).long() % 11
        return self.out(torch.tanh(self.frozen(self.mix(self.embed(tokens)))))


class Mixed(nn.Module):
    """Three dtypes, a parameter without elements, one that nobody uses, and a scalar."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7, dtype=torch.float32)
        self.second = nn.Linear(7, 6, dtype=torch.float64)
        self.third = nn.Linear(6, 3, dtype=torch.bfloat16)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = torch.tanh(self.first(x.float())).double()
        x = torch.tanh(self.second(x)).bfloat16()
        return self.third(x).float() * self.scale + self.empty.sum()


@functools.cache
def resnet_for(seed: int) -> nn.Module:
    from torchvision.models import resnet18

    torch.manual_seed(seed)
    return resnet18(num_classes=10).eval()  # BatchNorm in eval: then the mean over ranks is the big batch exactly


def resnet() -> nn.Module:
    """As if built from the current seed, but initialised only once: that takes longer than a step."""
    return copy.deepcopy(resnet_for(torch.initial_seed()))


# -- training, and distances -------------------------------------------------------------------------------------------


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out.sin() ** 2).mean()


def flat_params(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def train(wrap, make, shape, dtype, steps, rows=4, lr=0.05):
    """Train from a different seed per rank. Returns (parameters after, gradients of the first and last step, model)."""
    torch.manual_seed(dist.get_rank())
    module = make().to(dtype) if dtype is not None else make()
    ddp = wrap(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp(batch(dist.get_rank(), step, rows, shape, dtype or torch.float32))).backward()
        getattr(ddp, "finish", lambda: None)()
        if step in (0, steps - 1):
            seen.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
    return flat_params(module), seen, module


def one_process(make, shape, dtype, steps, rows=4):
    """The same training in one process on all ranks' batches, from rank 0's seed."""
    torch.manual_seed(0)
    module = make().to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.cat([batch(r, step, rows, shape, dtype) for r in range(dist.get_world_size())])
        loss_of(module(x)).backward()
        seen.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
    return flat_params(module), seen, module


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    x, y = (torch.cat([t.double().flatten() for t in g.values()]) for g in (a, b))
    return float((x - y).norm() / y.norm())


def of_dtype(grads: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: g for name, g in grads.items() if g.dtype == dtype}


def ulps(a: nn.Module, b: nn.Module) -> int:
    """Largest distance in bf16 units in the last place: neighbours in the ordered integers behind the floats."""

    def ordered(m):
        bits = torch.cat([p.detach().flatten() for p in m.parameters()]).view(torch.int16).int()
        return torch.where(bits < 0, -32768 - bits, bits)

    return int((ordered(a) - ordered(b)).abs().max())


def torch_ddp(m):
    return TorchDDP(m, find_unused_parameters=True)


# -- equivalence -------------------------------------------------------------------------------------------------------


def equivalence():
    """Errors of each of our DDPs against torch's and against one process."""
    n = dist.get_world_size()
    ours = dict(EVERY)
    ours["ring"] = lambda m: BucketedDDP(m, schedule=ring(n))
    ours["star"] = lambda m: NaiveDDP(m, schedule=star(n))
    found = {}
    for model, make in {"toy": toy, "tied": Tied}.items():
        steps = 20 if model == "toy" else 5
        runs = {"float64": (make, (5,), torch.float64, steps), "float32": (make, (5,), torch.float32, 1)}
        right = {kind: (train(torch_ddp, *run), one_process(*run)) for kind, run in runs.items()}
        for name, wrap in ours.items():
            mine = {kind: train(wrap, *run) for kind, run in runs.items()}
            assert_grads_in_sync(mine["float64"][2])
            found[model, name] = dict(
                float64=max(float((mine["float64"][0] - other[0]).abs().max()) for other in right["float64"]),
                float32=max(relative(mine["float32"][1][0], other[1][0]) for other in right["float32"]),
            )
    bf16 = train(torch_ddp, toy, (5,), torch.bfloat16, 1)[2]
    mixed_bf16 = train(torch_ddp, Mixed, (5,), None, 1)[2].third
    mixed = train(torch_ddp, Mixed, (5,), None, 3, lr=0.0)[1]
    for name, wrap in ours.items():
        found["toy", name]["bf16_ulps"] = ulps(train(wrap, toy, (5,), torch.bfloat16, 1)[2], bf16)
        model = train(wrap, Mixed, (5,), None, 1)[2]
        grads = train(wrap, Mixed, (5,), None, 3, lr=0.0)[1]  # before and after the buckets are rebuilt
        found["mixed", name] = dict(
            bf16_ulps=ulps(model.third, mixed_bf16),
            errors={
                str(dtype): max(
                    relative(of_dtype(a, dtype), of_dtype(b, dtype)) for a, b in zip(grads, mixed, strict=True)
                )
                for dtype in (torch.float32, torch.float64)
            },
            unused_grad=model.unused.grad,
            empty=tuple(model.empty.grad.shape),
            dtypes=all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters()),
        )
    return found


def resnet_equivalence():
    shape, found = (3, 32, 32), {}
    torch64, solo64 = (f(resnet, shape, torch.float64, 2, 1)[0] for f in (lambda *a: train(TorchDDP, *a), one_process))
    solo32 = one_process(resnet, shape, torch.float32, 1, 2)[1][0]
    for name, wrap in OURS.items():
        mine = train(wrap, resnet, shape, torch.float64, 2, 1)[0]
        first = train(wrap, resnet, shape, torch.float32, 1, 2)[1][0]
        found[name] = (
            max(float((mine - other).abs().max()) for other in (torch64, solo64)),
            relative(first, solo32),
        )
    return found


@pytest.fixture(scope="module", params=[2, 3, 4])
def errors(request):
    return launch(equivalence, ranks=request.param, timeout=180, device="cpu")


@pytest.mark.parametrize("name", [*EVERY, "ring", "star"])
def test_equals_torch_and_one_process(errors, name):
    for found in errors:
        for model in ("toy", "tied"):
            assert found[model, name]["float64"] < 1e-10
            assert found[model, name]["float32"] < 1e-6
        assert found["toy", name]["bf16_ulps"] <= 1
        mixed = found["mixed", name]
        assert mixed["errors"]["torch.float32"] < 1e-6 and mixed["errors"]["torch.float64"] < 1e-10
        assert mixed["bf16_ulps"] <= 1
        assert mixed["unused_grad"] is None and mixed["empty"] == (0, 3) and mixed["dtypes"]


def test_resnet18_in_eval_equals_torch_and_one_process():
    for found in launch(resnet_equivalence, ranks=2, timeout=180, device="cpu"):
        assert found.keys() == OURS.keys()
        for float64, float32 in found.values():
            assert float64 < 1e-10 and float32 < 1e-6


# -- rounding, groups, bad arguments -----------------------------------------------------------------------------------


def on_four_ranks():
    """Rounding: the same bytes on all ranks, whatever the order of the sum; and a group of two of the four."""
    r = dist.get_rank()
    ddp = BucketedDDP(nn.Linear(4096, 1, bias=False), schedule=ring(4))
    found = {}
    for name, values in {"rounding": (2.0**25, 1.0, -(2.0**25), 0.0), "integers": (1.0, 2.0, 3.0, 6.0)}.items():
        ddp.zero_grad()
        ddp(torch.full((1, 4096), values[r])).sum().backward()
        assert_grads_in_sync(ddp)
        found[name] = sorted(set(ddp.module.weight.grad.flatten().tolist()))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for name, schedule in {"backend": None, "ring": ring(2)}.items():
        torch.manual_seed(r)
        pair = BucketedDDP(nn.Linear(2, 1, bias=False), schedule=schedule, process_group=pairs[r // 2])
        pair(torch.full((1, 2), float(r))).sum().backward()
        found[name] = pair.module.weight.grad.tolist()
    found["weights"] = pair.module.weight.tolist()
    found["outside"] = outcome(lambda: BucketedDDP(nn.Linear(2, 1), process_group=pairs[1 - r // 2]))
    return found


def test_ranks_agree_bit_for_bit_and_groups_are_kept_apart():
    results = launch(on_four_ranks, ranks=4, timeout=60, device="cpu")
    for r, found in enumerate(results):
        assert found["rounding"] == results[0]["rounding"] and set(found["rounding"]) <= {0.0, 0.25}
        assert found["integers"] == [3.0]
        assert found["backend"] == found["ring"] == [[0.5, 0.5]] * 1 if r < 2 else [[2.5, 2.5]]
        assert found["weights"] == results[r // 2 * 2]["weights"]
        assert found["outside"].startswith(("RuntimeError: rank", "ValueError"))


def test_bad_arguments_in_a_plain_process():
    with pytest.raises(RuntimeError, match="ddplab.launch or torchrun"):
        NaiveDDP(nn.Linear(2, 2))
    for bad in (0, -1, float("nan"), float("inf"), "25", True):
        with pytest.raises(ValueError, match="bucket_cap_mb, in MiB, is a positive number"):
            BucketedDDP(nn.Linear(2, 2), bucket_cap_mb=bad)
    with pytest.raises(TypeError, match="FlatDDP wraps a torch module, not None"):
        FlatDDP(None)
    with pytest.raises(TypeError, match=r"schedule is a ddplab.Schedule, such as .*, or None, not 'ring'"):
        NaiveDDP(nn.Linear(2, 2), schedule="ring")

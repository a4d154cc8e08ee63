"""Buckets of our DDPs against torch's reducer: which, in which order, through which hook, laid out how.

A launch costs more than a check, so each launch does many and returns what it found.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from ddp_cases import EACH, OURS, batch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab._buckets import assign_buckets
from ddplab.accumulate import assert_grads_in_sync
from ddplab.ddp import BucketedDDP, OverlappedDDP
from ddplab.launch import launch


def test_bucket_assignment_equals_torchs_reducer():
    g = torch.Generator().manual_seed(0)
    for trial in range(50):
        kinds = (torch.float32, torch.float64, torch.bfloat16)[: 1 + trial % 3]
        sizes = torch.randint(0, 4000, (30,), generator=g).tolist()
        params = [nn.Parameter(torch.zeros(s, dtype=kinds[i % len(kinds)])) for i, s in enumerate(sizes)]
        limits = [1000 * (1 + trial % 7), 1000 * (1 + trial % 11)]
        expected = dist._compute_bucket_assignment_by_size(params, limits, [False] * 30, list(range(30)))[0]
        place = {p: i for i, p in enumerate(params)}
        ours = [[place[p] for p in bucket] for bucket in assign_buckets(params, *limits)]
        assert ours[: len(ours) - len(kinds)] == expected[: len(ours) - len(kinds)]
        assert sorted(ours) == sorted(expected)  # torch leaves the order of half-full buckets to a hash table


def bucket_sizes(model: str, cap):
    import torchvision

    torch.manual_seed(0)
    make = getattr(torchvision.models, model)
    theirs, ours = TorchDDP(make(), bucket_cap_mb=cap), BucketedDDP(make(), bucket_cap_mb=cap)
    before = ours.bucket_sizes()
    x = torch.randn(2, 3, 32, 32)
    ours(x).sum().backward()
    for _ in range(3):  # torch rebuilds at the second forward and logs it at the third
        theirs(x).sum().backward()
    said = theirs._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return [int(s) for s in said.split(",")], ours.bucket_sizes(), before


@pytest.mark.parametrize("model, cap", [("resnet18", None), ("resnet18", 5), ("resnet18", 25), ("resnet50", None)])
def test_buckets_are_those_of_torch(model, cap):
    (theirs, ours, before) = launch(bucket_sizes, model, cap, ranks=1, timeout=120, device="cpu")[0]
    assert ours == theirs
    assert sum(before) == sum(ours)
    if cap is None:  # torch's default: a small first bucket
        assert before[0] == ours[0] == {"resnet18": (512 + 1) * 4000, "resnet50": (2048 + 1) * 4000}[model]


# -- what the ranks do -------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Each rank runs the layers in another order, so gradients become ready in another order."""

    def __init__(self, forward_first: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.forward_first = forward_first

    def forward(self, x):
        for layer in self.layers if self.forward_first else reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def different_order(wrap):
    """Order in which the buckets left, per rank and step; the summed gradients are checked against a gather."""
    r, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ddp = wrap(Branches(forward_first=r % 2 == 0).double())
    names, order, right = {p: name for name, p in ddp.module.named_parameters()}, [], []

    def hook(state, bucket):
        order.append([names[p] for p in bucket.parameters()])
        buffer = bucket.buffer().div_(n)
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    for step in range(3):
        x = batch(r, step, 3, (6,), torch.float64)
        local = torch.autograd.grad(ddp.module(x).sum(), list(ddp.module.parameters()))
        ddp.zero_grad()
        ddp(x).sum().backward()
        ddp.finish()
        for p, g in zip(ddp.module.parameters(), local, strict=True):
            dist.all_reduce(g)
            right.append(torch.allclose(p.grad, g / n, rtol=0, atol=1e-14))
    return order, all(right)


def hooks(wrap):
    """Largest difference between torch's own hooks on ours and the same hooks on torch's DDP."""

    def run(register, steps=4, wrap=wrap):
        torch.manual_seed(0)
        ddp = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        register(ddp)
        for _ in range(steps):
            ddp.zero_grad()
            (ddp(torch.ones(1, 4)).sum() * (1 + dist.get_rank())).backward()
            getattr(ddp, "finish", lambda: None)()
        assert_grads_in_sync(ddp)
        return [p.grad.clone() for p in ddp.parameters()]

    found = {}
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):

        def register(ddp, hook=hook):
            ddp.register_comm_hook(None, hook)

        ours, theirs = run(register), run(register, wrap=TorchDDP)
        found[hook.__name__] = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    if wrap is OverlappedDDP:
        return found  # PowerSGD communicates from callbacks: with several buckets in flight, gloo ranks lock each other
    plain = run(lambda ddp: None)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1)
    power = run(lambda ddp: ddp.register_comm_hook(state, powerSGD_hook))
    found["powerSGD"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(power, plain, strict=True))
    return found


class Casting(nn.Sequential):
    """Layers of different dtypes in a row."""

    def forward(self, x):
        for layer in self:
            x = layer(x.to(layer.weight.dtype))
        return x


def state_by_parameter(wrap):
    """A hook's state that is keyed by parameter, while the buckets are rebuilt after step 1. Returns threes."""
    layers = [nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8).double(), nn.Linear(8, 2).bfloat16()]
    ddp = wrap(Casting(*layers))
    residual, totals, kinds, indices = {}, [], set(), []

    def hook(state, bucket):
        for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
            residual.setdefault(p, torch.zeros_like(p)).add_(g)  # fails if g had another parameter's shape
            kinds.add((p.dtype, bucket.buffer().dtype))
        indices.append((bucket.index(), bucket.is_last()))
        bucket.set_buffer(torch.full_like(bucket.buffer(), 3))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        ddp.zero_grad()
        indices.clear()
        ddp(torch.ones(1, 8)).sum().backward()
        ddp.finish()
        totals.append(sum(r.numel() for r in residual.values()))
        assert all((p.grad == 3).all() for p in ddp.parameters())
    return totals, kinds, indices


def buffers(wrap):
    """BatchNorm's statistics after training on different data, the norm's own seed per rank."""
    r = dist.get_rank()
    torch.manual_seed(r)
    norm = nn.BatchNorm1d(3)
    norm.running_mean.normal_()
    ddp = wrap(nn.Sequential(norm, nn.Linear(3, 1)))
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(r, step, 5, (3,), torch.float32)).sum().backward()
        getattr(ddp, "finish", lambda: None)()
    with torch.no_grad():
        ddp(batch(r, 9, 5, (3,), torch.float32))
    return [b.tolist() for b in norm.buffers()] + [p.tolist() for p in ddp.parameters()]


def channels_last(wrap):
    """Gradients of a channels_last convolution after two steps without clearing, their strides, and warnings."""
    r, conv = dist.get_rank(), nn.Conv2d(3, 4, 3, bias=False).double().to(memory_format=torch.channels_last)
    nn.init.ones_(conv.weight)
    ddp = wrap(conv)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in (1, 2):
            x = batch(r, step, 2, (3, 8, 8), torch.float64).to(memory_format=torch.channels_last)
            ddp(x).square().sum().backward()
            getattr(ddp, "finish", lambda: None)()
    return conv.weight.grad, conv.weight.grad.stride(), conv.weight.stride(), [str(w.message) for w in warned]


def collectives(wrap):
    """How many collectives the process group counts in a forward and backward, with two buckets and three buffers."""
    ddp = wrap(nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 300), nn.Linear(300, 3)))
    count = dist.group.WORLD._get_sequence_number_for_group
    counts = []
    for _ in range(4):
        before = count()
        ddp(torch.randn(4, 300)).sum().backward()
        counts.append(count() - before)
    return counts[-1]


def on_two_ranks():
    each = different_order, hooks, state_by_parameter, buffers, channels_last
    found = {f.__name__: {name: f(wrap) for name, wrap in OURS.items()} for f in each}
    found["buffers"]["torch"] = buffers(TorchDDP)
    found["channels_last"]["torch"] = channels_last(TorchDDP)
    cap = dict(bucket_cap_mb=0.3)
    found["collectives"] = [collectives(lambda m, w=w: w(m, **cap)) for w in (TorchDDP, BucketedDDP)]
    return found


@pytest.fixture(scope="module")
def two():
    return launch(on_two_ranks, ranks=2, timeout=120, device="cpu")


# -- the checks --------------------------------------------------------------------------------------------------------


@EACH
def test_buckets_leave_in_the_same_order_on_every_rank(two, name):
    (order, right), (other, other_right) = (found["different_order"][name] for found in two)
    assert right and other_right
    assert order == other and order


@EACH
def test_torchs_hooks_run(two, name):
    for found in two:
        errors = found["hooks"][name]
        assert errors.pop("powerSGD", 0) < 1e-5
        assert errors == dict.fromkeys(errors, 0.0)  # elementwise, so the layout of buckets does not matter


@EACH
def test_hook_state_by_parameter_survives_the_rebuild(two, name):
    total = 8 * 64 + 64 + 64 * 64 + 64 + 64 * 8 + 8 + 8 * 2 + 2
    for found in two:
        totals, kinds, indices = found["state_by_parameter"][name]
        assert totals == [total] * 3
        assert kinds == {(d, d) for d in (torch.float32, torch.float64, torch.bfloat16)}
        assert indices == [(i, i == len(indices) - 1) for i in range(len(indices))]


@EACH
def test_gradients_are_laid_out_as_their_parameters(two, name):
    for found in two:
        grad, strides, of_parameter, warned = found["channels_last"][name]
        assert torch.allclose(grad, found["channels_last"]["torch"][0], rtol=1e-12)
        assert strides == of_parameter == (27, 1, 9, 3) and warned == []


@EACH
def test_buffers_follow_the_first_rank_as_in_torch(two, name):
    for found in two:
        assert found["buffers"][name] == found["buffers"]["torch"]


def test_as_many_collectives_as_torch(two):
    for found in two:
        assert found["collectives"] == [4, 4]  # two buckets; float and integer buffers are broadcast before forward

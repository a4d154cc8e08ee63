"""Our four DDPs against torch's DDP and against one process on the whole batch; buckets against torch's reducer.

A launch costs more than a check, so each launch does many and returns what it found.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from ddplab._buckets import assign_buckets
from ddplab.accumulate import assert_grads_in_sync
from ddplab.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from ddplab.launch import launch
from ddplab.schedule import ring, star

OURS = {"naive": NaiveDDP, "flat": FlatDDP, "overlapped": OverlappedDDP, "bucketed": BucketedDDP}
SMALL = {"small buckets": lambda m: BucketedDDP(m, bucket_cap_mb=0.0005)}
EVERY = {**OURS, **SMALL}
EACH = pytest.mark.parametrize("name", OURS)


# -- models -----------------------------------------------------------------------------------------------------------


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


def toy():
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3))


@functools.cache
def resnet_for(seed: int) -> nn.Module:
    from torchvision.models import resnet18

    torch.manual_seed(seed)
    return resnet18(num_classes=10).eval()  # BatchNorm in eval: then the mean over ranks is the big batch exactly


def resnet() -> nn.Module:
    """As if built from the current seed, but initialised only once: that takes longer than a step."""
    return copy.deepcopy(resnet_for(torch.initial_seed()))


def batch(rank: int, step: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(10_000 + 100 * step + rank)
    return torch.randn(rows, *shape, generator=g, dtype=torch.float64).to(dtype)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out.sin() ** 2).mean()


def flat_params(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


# -- equivalence ------------------------------------------------------------------------------------------------------


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


def equivalence():
    """Errors of each of our DDPs against torch's and against one process."""
    n = dist.get_world_size()
    ours = dict(EVERY)
    ours["ring"] = lambda m: BucketedDDP(m, schedule=ring(n))
    ours["star"] = lambda m: NaiveDDP(m, schedule=star(n))
    found = {}
    for model, make in {"toy": toy, "tied": Tied}.items():
        runs = {"float64": (make, (5,), torch.float64, 20), "float32": (make, (5,), torch.float32, 1)}
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


# -- buckets ----------------------------------------------------------------------------------------------------------


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


# -- order, hooks, errors ---------------------------------------------------------------------------------------------


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


class Checkpointed(nn.Module):
    """The last layer is recomputed in a backward inside backward, so the first gradients come from in there."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, reentrant):
        return {"out": checkpoint(self.c, self.b(self.a(x)), use_reentrant=reentrant)}


def unusual_backwards(wrap):
    """Checkpointing, and a penalty on the gradient with respect to the input."""
    r = dist.get_rank()

    def train(wrap, reentrant, penalty):
        torch.manual_seed(0)
        ddp = wrap(Checkpointed().double())
        for step in range(2):
            ddp.zero_grad()
            x = batch(r, step, 4, (3,), torch.float64).requires_grad_(penalty)
            loss = (ddp(x, reentrant)["out"] ** 2).mean()
            if penalty:
                loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
            loss.backward()
            getattr(ddp, "finish", lambda: None)()
        return torch.cat([p.grad.flatten() for p in ddp.parameters()])

    kinds = (False, False), (True, False), (False, True)
    return [float((train(wrap, *kind) - train(TorchDDP, *kind)).abs().max()) for kind in kinds]


def outcome(fn):
    try:
        return fn()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


class Heads(nn.Module):
    """Uses only the heads it is told to use."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 1, bias=False) for _ in range(3))

    def forward(self, x, heads):
        return sum(getattr(self, h)(x) for h in heads)


def one_step(ddp, heads):
    ddp.zero_grad()
    ddp(torch.ones(1, 3) * (1 + dist.get_rank()), heads).sum().backward()
    getattr(ddp, "finish", lambda: None)()
    return [None if p.grad is None else p.grad[0, 0].item() for p in ddp.parameters()]


def unused(wrap):
    """Parameters that some rank does not use, at first and later, with and without find_unused_parameters."""
    r = dist.get_rank()
    found = {"step 1": outcome(lambda: one_step(wrap(Heads()), "ab"[: 2 - r]))}
    ddp = wrap(Heads())
    found["agreed"] = outcome(lambda: one_step(ddp, "ab"))
    found["lost"] = outcome(lambda: one_step(ddp, "ab"[: 2 - r]))
    ddp = wrap(Heads())
    one_step(ddp, "ab")
    found["new"] = outcome(lambda: one_step(ddp, "abc"))
    for name, make in (("ours", wrap), ("torch", TorchDDP)):
        ddp = make(Heads(), find_unused_parameters=True)
        found[name] = [one_step(ddp, heads) for heads in ("ab"[: 2 - r], "c", "abc")]
    return found


def changed(wrap):
    """Trainable parameters that change after wrapping."""

    def freeze(m):
        m[0].bias.requires_grad_(False)

    def unfreeze(m):
        m[4].bias.requires_grad_(True)

    def replace(m):
        m[2] = nn.Linear(9, 4)

    def add(m):
        m.append(nn.Linear(3, 3))

    def convert(m):
        m.double()

    found = {}
    for change in (freeze, unfreeze, replace, add, convert):
        model = toy()
        model[4].bias.requires_grad_(False)
        ddp = wrap(model)
        ddp(torch.ones(1, 5)).sum().backward()
        ddp.finish()
        change(model)
        found[change.__name__] = outcome(lambda d=ddp: d(torch.ones(1, 5)))
    return found


def misuse(wrap):
    r = dist.get_rank()
    found = {"frozen": outcome(lambda: wrap(toy().requires_grad_(False)))}
    found["differ"] = outcome(lambda: wrap(nn.Linear(3, 2 + r)))
    found["differ in buffers"] = outcome(lambda: wrap(nn.BatchNorm1d(3, track_running_stats=r == 0)))
    found["lazy"] = outcome(lambda: wrap(nn.LazyLinear(3)))
    found["schedule"] = outcome(lambda: wrap(toy(), schedule=ring(5)))
    ddp = wrap(toy())
    ddp(torch.ones(1, 5))
    found["no backward"] = outcome(ddp.finish)
    ddp = wrap(nn.Embedding(4, 2, sparse=True))
    found["sparse"] = outcome(lambda: ddp(torch.tensor([r])).sum().backward())
    ddp = wrap(toy())
    found["hook"] = outcome(lambda: ddp.register_comm_hook(None, "allreduce"))
    ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    found["second hook"] = outcome(lambda: ddp.register_comm_hook(None, default_hooks.allreduce_hook))

    def no_future():
        ddp(torch.ones(1, 5)).sum().backward()
        ddp.finish()

    found["no future"] = outcome(no_future)

    def hook_gives(value):
        ddp, future = wrap(toy()), torch.futures.Future()
        future.set_result(value)
        ddp.register_comm_hook(None, lambda state, bucket: future)
        ddp(torch.ones(1, 5)).sum().backward()
        ddp.finish()

    found["hook gives"] = [outcome(lambda v=v: hook_gives(v)) for v in (None, torch.zeros(1), [])]
    found["copy"] = [outcome(lambda f=f: f(wrap(toy()))) for f in (copy.deepcopy, pickle.dumps)]
    other = torch.channels_last if r else torch.contiguous_format
    found["differ in layout"] = outcome(lambda: wrap(nn.Conv2d(2, 2, 3).to(memory_format=other)))
    if wrap in (NaiveDDP, FlatDDP):
        ddp = wrap(toy())
        ddp(torch.ones(1, 5)).sum().backward()
        found["no finish"] = outcome(lambda: ddp(torch.ones(1, 5)))
    return found


def housekeeping(wrap):
    """finish twice, nested no_sync that is left by an exception, gradients kept or zeroed in place, collection."""
    r, found = dist.get_rank(), {}
    ddp = wrap(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), 1.0 + r)
    with pytest.raises(KeyError), ddp.no_sync():
        with ddp.no_sync():
            pass
        inner = ddp.require_backward_grad_sync
        raise KeyError
    found["flags"] = (inner, ddp.require_backward_grad_sync)
    for _ in range(3):
        ddp.zero_grad(set_to_none=False)
        ddp(x).sum().backward()
        ddp.finish()
        ddp.finish()
    found["zeroed in place"] = ddp.module.weight.grad.tolist()
    ddp(x).sum().backward()
    ddp.finish()
    found["not zeroed"] = ddp.module.weight.grad.tolist()
    with torch.no_grad():
        ddp(x)
    ddp.finish()
    found["after no_grad"] = ddp.module.weight.grad.tolist()
    model, gone = ddp.module, weakref.ref(ddp)
    del ddp
    gc.collect()
    found["collected"] = gone() is None
    model(x).sum().backward()
    return found


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
    each = different_order, hooks, state_by_parameter, unusual_backwards, unused, changed, misuse, housekeeping, buffers
    each += (channels_last,)
    found = {f.__name__: {name: f(wrap) for name, wrap in OURS.items()} for f in each}
    found["buffers"]["torch"] = buffers(TorchDDP)
    found["channels_last"]["torch"] = channels_last(TorchDDP)
    cap = dict(bucket_cap_mb=0.3)
    found["collectives"] = [collectives(lambda m, w=w: w(m, **cap)) for w in (TorchDDP, BucketedDDP)]
    return found


@pytest.fixture(scope="module")
def two():
    return launch(on_two_ranks, ranks=2, timeout=120, device="cpu")


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
def test_backward_inside_backward_and_double_backward(two, name):
    for found in two:
        assert max(found["unusual_backwards"][name]) < 1e-12


@EACH
def test_unused_parameters(two, name):
    for r, found in enumerate(two):
        said = found["unused"][name]
        assert "parameter 'b.weight' got a gradient on some ranks and none on rank 1 in step 1" in said["step 1"]
        assert said["agreed"] == [1.5, 1.5, None]
        if r == 1:
            assert said["lost"].startswith("RuntimeError: rank 1, step 2") and "'b.weight' got none" in said["lost"]
        else:
            assert said["lost"] == [1.5, 0.5, None]  # nobody hangs; the rank that departed has raised
        assert "'c.weight' got one for the first time" in said["new"]
        assert said["ours"] == said["torch"] == [[1.5, 0.5, None], [None, None, 1.5], [1.5, 1.5, 1.5]]


@EACH
def test_changed_parameters_are_named(two, name):
    names = {"freeze": "0.bias", "unfreeze": "4.bias", "replace": "2.bias", "add": "5.bias", "convert": "0.bias"}
    for found in two:
        for change, said in found["changed"][name].items():
            assert said.startswith("RuntimeError: the trainable parameters changed") and repr(names[change]) in said


@EACH
def test_misuse_is_explained(two, name):
    for found in two:
        said = found["misuse"][name]
        assert said["frozen"].startswith("ValueError: no parameter of this model requires a gradient")
        assert "'weight' is (2, 3) torch.float32 trainable on rank 0, (3, 3)" in said["differ"]
        assert "'running_mean' is (3,) torch.float32 buffer on rank 0, missing on rank 1" in said["differ in buffers"]
        assert said["lazy"].startswith("ValueError") and "run one forward first" in said["lazy"]
        assert said["schedule"].startswith("ValueError") and "5 ranks" in said["schedule"]
        assert "call backward() before finish()" in said["no backward"]
        assert said["sparse"].startswith("TypeError: sparse gradients not supported: parameter 'weight'")
        assert said["hook"].startswith("TypeError: hook must be callable")
        assert said["second hook"] == "RuntimeError: register_comm_hook can only be called once"
        for given, found_ in zip(("None", "a tensor of 1", "[]"), said["hook gives"], strict=True):
            assert found_.startswith("RuntimeError: the communication hook's future for bucket 0 holds " + given + ";")
        assert all("copy or save ddp.module" in found_ for found_ in said["copy"])
        assert "'weight' is (2, 2, 3, 3) torch.float32 trainable on rank 0" in said["differ in layout"]
        assert "trainable, strides (18, 1, 6, 2) on rank 1" in said["differ in layout"]
        assert said["no future"] == "TypeError: a communication hook returns a torch.futures.Future, not Tensor"
        if name in ("naive", "flat"):
            assert "finish() was not called" in said["no finish"]


@EACH
def test_flags_finish_and_gradients_in_place(two, name):
    for found in two:
        assert found["housekeeping"][name] == {
            "flags": (False, True),
            "zeroed in place": [[1.5, 1.5]],
            "not zeroed": [[3.0, 3.0]],
            "after no_grad": [[3.0, 3.0]],
            "collected": True,
        }


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

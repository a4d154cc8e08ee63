"""Our DDPs off the beaten track: backward in backward, parameters unused or changed, misuse, leaving early.

A launch costs more than a check, so each launch does many and returns what it found.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from ddp_cases import EACH, OURS, batch, outcome, toy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from ddplab.ddp import FlatDDP, NaiveDDP
from ddplab.launch import launch
from ddplab.schedule import ring

# -- what the ranks do -------------------------------------------------------------------------------------------------


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


def on_two_ranks():
    each = unusual_backwards, unused, changed, misuse, housekeeping
    return {f.__name__: {name: f(wrap) for name, wrap in OURS.items()} for f in each}


@pytest.fixture(scope="module")
def two():
    return launch(on_two_ranks, ranks=2, timeout=120, device="cpu")


# -- the checks --------------------------------------------------------------------------------------------------------


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

"""Gradient accumulation against closed forms and one process on the big batch, under torch's DDP and ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accumulate_cases import (
    EACH,
    OURS,
    RAGGED,
    WRAPPERS,
    Times,
    TwoLayers,
    big_batch,
    counted,
    finish,
    grads,
    mine,
    net,
    outcome,
    samples,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab._microbatch import batch_size
from ddplab.accumulate import accumulate, assert_grads_in_sync
from ddplab.ddp import BucketedDDP
from ddplab.launch import launch

# -- what the ranks do -------------------------------------------------------------------------------------------------


def right_window(wrap):
    """Middle gradient, final gradient and bucket reductions of two windows with an optimizer step between them."""
    ddp, calls = counted(wrap(Times()))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    seen = []
    for step in accumulate(ddp, mine() * 2, every=2, mean_over=None):
        with step:
            step.backward(ddp(step.batch))
        seen.append((ddp.module.w.grad.item(), calls[0], step.syncs))
        if step.syncs:
            step.update(optimizer)
    return seen


def forward_outside(wrap):
    ddp, calls = counted(wrap(Times()))
    seen = []
    for x in mine():
        loss = ddp(x)
        with ddp.no_sync():
            loss.backward()
        finish(ddp)
        seen.append((ddp.module.w.grad.item(), calls[0]))
    return seen


def flag_flipped_after_forward(wrap):
    ddp = wrap(Times())
    for x in mine():
        ddp.require_backward_grad_sync = False
        loss = ddp(x)
        ddp.require_backward_grad_sync = True
        loss.backward()
        finish(ddp)
    return grads(ddp), outcome(lambda: assert_grads_in_sync(ddp))


def last_forward_in_no_sync(wrap):
    ddp = wrap(Times())
    for x in mine():
        with ddp.no_sync():
            loss = ddp(x)
        loss.backward()
        finish(ddp)
    return grads(ddp)


def window_gradients(n, every, **options):
    """Which micro-batches synchronise, and the gradients at those points; both ranks see 1, 2, 3, ..."""
    ddp = BucketedDDP(Times())
    run = accumulate(ddp, [float(i) for i in range(1, n + 1)], every, **options)
    synced, found = [], []
    for step in run:
        with step:
            step.backward(ddp(step.batch))
        if step.syncs:
            synced.append(step.index)
            found.append(ddp.module.w.grad.item())
    return synced, found, run.dropped


def used_only_before_the_sync(wrap):
    """Layer a only in the local pass, layer b only in the synchronised one."""
    ddp = wrap(TwoLayers())
    with ddp.no_sync():
        ddp(mine()[0], "a").backward()
    ddp(mine()[1], "b").backward()
    finish(ddp)
    return grads(ddp)


def unused_everywhere(wrap):
    ddp = wrap(TwoLayers())
    ddp(mine()[0], "a").backward()
    finish(ddp)
    return ddp.module.a.w.grad.item(), outcome(lambda: assert_grads_in_sync(ddp))


def unequal_batches(reduction, mean_over):
    """Rank 0 holds the samples 1, 2, 3 and rank 1 holds 10."""
    ddp = BucketedDDP(Times())
    batch = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])][dist.get_rank()]
    for step in accumulate(ddp, [batch], every=1, mean_over=mean_over):
        with step:
            step.backward(getattr(ddp(step.batch), reduction)())
    return ddp.module.w.grad.item()


def accumulated(wrap, batches, every, scaler=None, max_norm=None, **options):
    ddp, calls = counted(wrap(net()))
    found, counts, norms = [], [], []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    for step in accumulate(ddp, batches, every, scaler=scaler, **options):
        with step:
            x, y = step.batch
            step.backward(nn.functional.mse_loss(ddp(x), y))
        if step.syncs:
            assert_grads_in_sync(ddp)
            scale = 1.0 if scaler is None else scaler.get_scale()
            found.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]) / scale)
            counts.append(calls[0])
            norms.append(step.update(optimizer, max_norm=max_norm))
    return found, counts, norms


def against_big_batch(wrap):
    everybody = [samples(r, RAGGED) for r in range(dist.get_world_size())]
    found, counts, norms = accumulated(wrap, everybody[dist.get_rank()], every=4, max_norm=1e-3)
    right = big_batch(everybody, [(0, 4), (4, 8), (8, 11)])
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))
    norm_error = max(abs(float(n / b.norm()) - 1) for n, b in zip(norms, right, strict=True))
    return error, norm_error, counts


def joined(wrap):
    everybody = [samples(0, [4] * 8), samples(1, [4, 2] * 4 + [5])]
    found, _, _ = accumulated(wrap, iter(everybody[dist.get_rank()]), every=4, uneven="join")
    right = big_batch(everybody, [(0, 4), (4, 8), (8, 9)])
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))


def scaled():
    """With a GradScaler: the same gradients; an overflow on one rank makes both ranks skip the step."""
    batches = samples(dist.get_rank(), RAGGED)
    plain, _, norms = accumulated(TorchDDP, batches, every=4, max_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with_scaler, _, unscaled = accumulated(TorchDDP, batches, 4, scaler, max_norm=1.0)
    same = max(float((a - b).abs().max()) for a, b in zip(plain, with_scaler, strict=True))
    same_norm = max(abs(float(a - b)) for a, b in zip(norms, unscaled, strict=True))
    ddp = BucketedDDP(Times())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    for step in accumulate(ddp, [3e38 if dist.get_rank() else 1.0], 1, scaler=scaler, check_finite=False):
        with step:
            step.backward(ddp(step.batch))
        step.update(optimizer)
    return same, same_norm, ddp.module.w.item(), scaler.get_scale()


def on_rank():
    each = right_window, forward_outside, flag_flipped_after_forward, last_forward_in_no_sync
    each += against_big_batch, joined
    found = {f.__name__: {name: outcome(lambda f=f, w=w: f(w)) for name, w in WRAPPERS.items()} for f in each}
    unused = {"torch": lambda m: TorchDDP(m, find_unused_parameters=True), **OURS}
    found["used_only_before_the_sync"] = {name: used_only_before_the_sync(w) for name, w in unused.items()}
    found["unused_everywhere"] = {name: unused_everywhere(w) for name, w in {"torch": TorchDDP, **OURS}.items()}
    kinds = [("mean", "samples"), ("mean", None), ("sum", None)]
    found["unequal"] = {kind: unequal_batches(*kind) for kind in kinds}
    found["windows"] = {(n, k): window_gradients(n, k) for n, k in ((4, 2), (5, 2), (3, 1), (2, 5))}
    found["drop_last"] = window_gradients(5, 2, drop_last=True)
    found["scaled"] = outcome(scaled)
    return found


@pytest.fixture(scope="module")
def ranks():
    return launch(on_rank, ranks=2, timeout=120, device="cpu")


# -- the checks --------------------------------------------------------------------------------------------------------


@EACH
def test_one_reduction_per_window_and_no_leftovers(ranks, name):
    for r, found in enumerate(ranks):
        first = [(1.0 + r, 0, False), (16.5, 1, True)]
        assert found["right_window"][name] == first + [(x, n + 1, s) for x, n, s in first]


@EACH
def test_forward_outside_no_sync_saves_nothing(ranks, name):
    for found in ranks:
        assert found["forward_outside"][name] == [(1.5, 1), (16.5, 2)]


@EACH
def test_flag_after_forward_is_too_late_and_the_check_says_so(ranks, name):
    for r, found in enumerate(ranks):
        grad, complaint = found["flag_flipped_after_forward"][name]
        assert grad == found["last_forward_in_no_sync"][name] == [[11.0], [22.0]][r]
        assert complaint.startswith(
            "AssertionError: gradients differ between ranks: w: rank 0 has 11.0, rank 1 has 22.0"
        )


def test_window_boundaries_and_the_tail(ranks):
    for found in ranks:
        synced = {key: value[0] for key, value in found["windows"].items()}
        assert synced == {(4, 2): [1, 3], (5, 2): [1, 3, 4], (3, 1): [0, 1, 2], (2, 5): [1]}
        assert found["windows"][5, 2][1] == [1.5, 3.5, 5.0]
        assert found["drop_last"] == ([1, 3], [1.5, 3.5], 1)


@pytest.mark.parametrize("name", ["torch", *OURS])
def test_used_in_a_local_pass_only(ranks, name):
    assert [found["used_only_before_the_sync"][name] for found in ranks] == [[1.5, 15.0]] * 2


def test_torch_skips_a_reduction_silently_and_the_check_names_it_in_step_1(ranks):
    for r, found in enumerate(ranks):
        grad, complaint = found["unused_everywhere"]["torch"]
        assert grad == 1.0 + r
        assert "a.w: rank 0 has 1.0, rank 1 has 2.0" in complaint
        for name in OURS:
            assert found["unused_everywhere"][name] == (1.5, None)


def test_unequal_batches(ranks):
    for found in ranks:
        assert found["unequal"] == {("mean", "samples"): 4.0, ("mean", None): 6.0, ("sum", None): 8.0}


@EACH
def test_equals_the_big_batch(ranks, name):
    for found in ranks:
        error, norm_error, counts = found["against_big_batch"][name]
        assert error < 1e-12 and norm_error < 1e-12
        assert counts == [n * counts[0] for n in (1, 2, 3)]  # one set of reductions a window
    assert found["joined"][name] < 1e-12


def test_grad_scaler(ranks):
    for found in ranks:
        same, same_norm, w, scale = found["scaled"]
        assert same < 1e-12 and same_norm < 1e-12
        assert (w, scale) == (1.0, 512.0)  # step skipped and scale halved on both ranks


def test_the_size_of_a_batch():
    x, array = torch.zeros(3, 2), np.zeros((5, 2))
    kinds = {3: [x, (x, array), {"x": x}, [[x]]], 5: [array, (array, x)], 1: [1.0, torch.tensor(2.0), np.float64(3)]}
    for samples_, batches in kinds.items():
        assert [batch_size(batch) for batch in batches] == [samples_] * len(batches)
    for batch in ("text", ["text"], None, (), {}):
        with pytest.raises(TypeError, match="pass size="):
            batch_size(batch)


def test_one_process_without_a_group():
    model = net()
    assert assert_grads_in_sync(model) is None
    batches = samples(0, [3, 3, 1])
    for step in accumulate(model, batches, every=2):
        with step:
            x, y = step.batch
            step.backward(nn.functional.mse_loss(model(x), y))
        if step.syncs:
            lo, hi = step.index - (1 if step.window == 0 else 0), step.index + 1
            right = big_batch([batches], [(lo, hi)])[0]
            torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), right)

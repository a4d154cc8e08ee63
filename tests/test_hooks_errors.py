"""Communication hooks when something is wrong: an error on every rank, no hang, no trace in the state."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ddp_cases import OURS, outcome
from hook_cases import CASTS, CORE, EVERY, FEEDBACK, Given, equal, hooked, same_on_all_ranks, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab.hooks.base import NonFiniteGradient, comm_hook
from ddplab.hooks.onebit import OneBit
from ddplab.hooks.twophase import TwoPhase
from ddplab.launch import launch

# -- gradients that are not finite, sparse or complex ------------------------------------------------------------------


def poisoned(make, wrap):
    """Two good steps, one in which rank 1's fourth parameter has a NaN, two good ones: what happened."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    shapes = [(4, 3), (5,), (7, 2), (3,), (6,)]
    module = Given(*shapes)
    ddp, state = hooked(make, module, wrap, module=module)
    good = lambda: step(ddp, *(torch.randn(shape, generator=generator) for shape in shapes))  # noqa: E731
    good(), good()
    before, bad = state.state_dict(), [torch.ones(shape) for shape in shapes]
    if rank == 1:
        bad[3][1] = math.nan
    raised = outcome(lambda: step(ddp, *bad))
    after = state.state_dict()
    unchanged = all(equal(before[k], after[k]) for k in before if k not in ("wire_bytes",))
    same = [same_on_all_ranks(good()) for _ in range(2)]
    state.close()
    return raised, unchanged, same


class Embedded(nn.Module):
    """A sparse gradient beside a dense one."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)

    def forward(self, i):
        return self.out(self.table(i)).sum()


def unsupported():
    rank, found = dist.get_rank(), {}
    for method, make in EVERY.items():
        ddp, state = hooked(make, Embedded())
        found[method, "sparse"] = outcome(lambda d=ddp: step(d, torch.tensor([rank, 2])))
        state.close()
        ddp, state = hooked(make, Given((2,), dtype=torch.complex64))
        ones = torch.ones(2, dtype=torch.complex64)
        found[method, "complex"] = outcome(lambda d=ddp, x=ones: d(x).abs().backward())
        state.close()
    return found


SMALL = {
    "torch": lambda m: TorchDDP(m, bucket_cap_mb=2e-5),
    "ours": lambda m: OURS["bucketed"](m, 2e-5),
    "flat": OURS["flat"],
}


def scaled():
    """A GradScaler whose third step overflows on rank 1: all skip it, and the residual follows the scale."""
    rank, found = dist.get_rank(), {}
    for method, make in CORE.items():
        module = Given((3,), (5,))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        ddp, state = hooked(make, module, SMALL["torch"], scaler=scaler)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        scales, norms, weights = [], [], []
        for k in range(4):  # the buckets are rebuilt after the first
            optimizer.zero_grad()
            loss = ddp(torch.tensor([1.0, 2.0, -3.0]), torch.ones(5) * (math.inf if k == 2 and rank == 1 else 1.0))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            norms.append(state.residual_norm())
            weights.append([p.detach().clone() for p in module.parameters()])
        found[method] = dict(
            scales=scales,
            norms=norms,
            skipped=equal(dict(enumerate(weights[1])), dict(enumerate(weights[2]))),
            same=same_on_all_ranks(weights[3]),
            finite=all(bool(torch.isfinite(w).all()) for w in weights[3]),
        )
        state.close()
    return found


def mistakes():
    """What a caller may get wrong, and TwoPhase by itself."""
    found = {}
    ddp = TorchDDP(Given(()))
    ddp.register_comm_hook(None, comm_hook)
    found["two methods"] = outcome(lambda: list(CASTS.values())[dist.get_rank()]())
    found["no state"] = outcome(lambda: step(ddp, torch.tensor(1.0)))
    ddp, state = hooked(CORE["onebit"], Given(()))
    state.close()
    found["closed"] = outcome(lambda: step(ddp, torch.tensor(1.0)))
    two = TwoPhase(OneBit.codec())
    flat = torch.full((100,), math.nan if dist.get_rank() == 1 else 1.0)
    worker, server = torch.ones(100), torch.ones(two.shard(100).stop - two.shard(100).start)
    found["two"] = outcome(lambda: two.mean(flat, worker, server))
    found["untouched"] = bool((worker == 1).all() and (server == 1).all() and (flat == 1).sum() in (0, 100))
    flat = torch.randn(1003, generator=torch.Generator().manual_seed(dist.get_rank()))
    before = flat.clone()
    worker, server = torch.zeros(1003), torch.zeros(two.shard(1003).stop - two.shard(1003).start)
    mean = two.mean(flat, worker, server)
    whole = torch.zeros(1003)
    whole[two.shard(1003)] = server
    true, back = before, worker + 2 * whole
    for t in (true, back):
        dist.all_reduce(t)
    found["kept"] = float((mean + back / 2 - true / 2).abs().max())
    found["in place"] = mean.data_ptr() == flat.data_ptr() and same_on_all_ranks([mean])
    found["bytes"] = two.wire_bytes
    return found


@pytest.fixture(scope="module")
def wrong():
    def run():
        poison = {(m, w): poisoned(make, wrap) for m, make in CORE.items() for w, wrap in SMALL.items()}
        return dict(poison=poison, unsupported=unsupported(), scaled=scaled(), mistakes=mistakes())

    return launch(run, ranks=2, timeout=300)


@pytest.mark.parametrize("method", CORE)
@pytest.mark.parametrize("wrap", SMALL)
def test_nan_is_reported_on_every_rank_and_leaves_no_trace(wrong, method, wrap):
    texts = set()
    for raised, unchanged, same in (found["poison"][method, wrap] for found in wrong):
        assert raised.startswith(f"{NonFiniteGradient.__name__}: ") and issubclass(NonFiniteGradient, ValueError)
        assert "on rank 1, bucket " in raised and "parameter 'weights.3', shape (3,)" in raised
        assert unchanged and all(same)
        texts.add(raised)
    assert len(texts) == 1


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_sparse_and_complex_gradients_are_refused(wrong, method, kind):
    for found in wrong:
        assert found["unsupported"][method, kind].startswith(f"TypeError: {kind} gradients not supported: bucket ")


@pytest.mark.parametrize("method", CORE)
def test_with_a_scaler_every_rank_skips_the_step(wrong, method):
    for found in (found["scaled"][method] for found in wrong):
        assert found["scales"] == [8.0, 8.0, 4.0, 4.0]
        assert found["skipped"] and found["same"] and found["finite"]
        if method in FEEDBACK:
            assert found["norms"][2] == found["norms"][1] > 0, "a skipped step holds nothing back"


def test_mistakes_get_sentences(wrong):
    for found in (found["mistakes"] for found in wrong):
        assert "A communication hook's method must be the same on all ranks: rank 0: Fp16" in found["two methods"]
        assert "the hook's state is one of ddplab's" in found["no state"]
        assert "this hook state is closed" in found["closed"]
        assert found["two"].startswith("ValueError: NaN or infinity in the values of rank 1")
        assert found["untouched"] and found["in place"] and found["kept"] < 1e-6
        # A row has a flag (8 bytes) and a shard: 4 bytes of scale and 1/8 an element, filled up to a multiple of 8.
        # Phase 1 of 100 elements (shards of 56), which ends there; then both phases of 1003 (shards of 504).
        assert found["bytes"] == (8 + 16) + (8 + 72) + 72

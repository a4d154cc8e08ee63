"""Communication hooks: means, what a cast can hold, what error feedback keeps. One launch does many checks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from ddp_cases import OURS, batch, outcome
from hook_cases import CASTS, CORE, FEEDBACK, WRAPPERS, Given, hooked, same_on_all_ranks, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab.hooks.base import HookState
from ddplab.hooks.cast import fp16
from ddplab.launch import launch


def value(make, mine, wrap=TorchDDP, **options):
    """The reduced gradient of one scalar parameter, and the state."""
    ddp, state = hooked(make, Given(()), wrap, **options)
    got = step(ddp, torch.tensor(float(mine)))[0].item()
    state.close()
    return got, state


# -- means ---------------------------------------------------------------------------------------------------------


def means():
    rank, found = dist.get_rank(), {}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([r]) for r in range(4)]
    for method, make in CORE.items():
        # fp16 (an all-reduce) and 1-bit (two phases, residuals) everywhere, their kin on torch's DDP
        for name, wrap in WRAPPERS.items() if method in ("fp16", "onebit") else [("torch", TorchDDP)]:
            found[method, name] = value(make, 1.0 + rank, wrap)[0]
        pair = pairs[rank // 2]
        for name, wrap in {"pair": TorchDDP, "pair, ours": OURS["bucketed"]}.items():
            group = dict(process_group=pair)
            found[method, name] = value(make, 1.0 + rank % 2, lambda m, w=wrap, g=group: w(m, **g), **group)[0]
        group = dict(process_group=alone[rank])
        got, state = value(make, 0.1 + rank, lambda m, g=group: TorchDDP(m, **g), **group)
        found[method, "alone"] = (got, state.wire_bytes)
    return found


def test_every_hook_returns_the_mean_over_its_own_group():
    for rank, found in enumerate(launch(means, ranks=4, timeout=300)):
        for (method, name), got in found.items():
            if name == "alone":
                assert got == (torch.tensor(0.1 + rank).item(), 0), "one rank: nothing changes, nothing is sent"
            else:
                expected = 1.5 if name.startswith("pair") else 2.5
                assert got == pytest.approx(expected, abs=1e-6), (method, name)


# -- what a cast can hold --------------------------------------------------------------------------------------------

HELD = {  # gradients of two ranks -> what fp16 and bf16 make of the mean
    (7e4, 0.0): (35008.0, 35072.0),
    (1e5, 0.0): (49984.0, 49920.0),
    (4e4, 4e4): (40000.0, 39936.0),
    (1e-8, 1e-8): (0.0, 1.0012e-8),
    (2e-8, 2e-8): (0.0, 2.0023e-8),
    (1e5, 1e5): (math.inf, 99840.0),
}


def casts():
    rank, found = dist.get_rank(), {}
    for gradients in HELD:
        for method in CASTS:
            got, state = value(CASTS[method], gradients[rank], count_underflows=True)
            found[gradients, method] = got, state.overflows, state.underflows
    found["unasked"] = value(fp16, 2e-8)[1].underflows
    found["raised"] = outcome(lambda: value(fp16, 1e5, on_overflow="raise"))
    found["half overflows"] = [outcome(lambda m=m: value(CORE[m], 1e5 * rank + 1e5)[1].overflows) for m in CORE]
    found["bad option"] = outcome(lambda: fp16(on_overflow="ignore"))
    return found


def test_casts_divide_first_and_count_what_they_cannot_hold():
    for found in launch(casts, ranks=2, timeout=300):
        for gradients, expected in HELD.items():
            for method, wanted in zip(CASTS, expected, strict=True):
                got, overflows, underflows = found[gradients, method]
                assert got == pytest.approx(wanted, rel=1e-4), (gradients, method)
                assert overflows == int(math.isinf(wanted))
                assert underflows == int(wanted == 0)
        assert found["unasked"] == 0
        assert found["raised"].startswith("OverflowError: ") and "bucket 0" in found["raised"]
        assert found["half overflows"] == [1, 0, 0]
        assert found["bad option"].startswith("ValueError: on_overflow")


# -- error feedback over steps, buckets and failures -------------------------------------------------------------------


class Odd(nn.Module):
    """Odd sizes, three dtypes, a scalar, a parameter without elements, a frozen one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 37), nn.Linear(37, 11, dtype=torch.float64)
        self.third = nn.Linear(11, 3, dtype=torch.bfloat16)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x)).double()))
        return self.third(x.bfloat16()).float() * self.scale + self.empty.sum()


def held_back(state: HookState) -> dict[int, torch.Tensor]:
    """By a parameter's place: what the ranks together hold back of the mean, from worker and server residuals."""
    saved = state.state_dict()
    places = {int(place): residual.double() / state.world_size for place, residual in saved["residuals"].items()}
    for server in saved["servers"].values():
        at, layout, now = 0, server["layout"].tolist(), server["now"].double()
        part = state.two.shard(sum(size for _, size in layout))
        for place, size in layout:
            start, stop = max(at, part.start), min(at + size, part.stop)
            if start < stop:
                places[place][start - at : stop - at] += now[start - part.start : stop - part.start]
            at += size
    for residual in places.values():
        dist.all_reduce(residual)
    return places


def feedback(method, wrap_name):
    """Errors of `handed out + held back = mean gradients` at every step, across the rebuild of the buckets."""
    rank, n = dist.get_rank(), dist.get_world_size()
    wrap = {"torch": lambda m: TorchDDP(m, bucket_cap_mb=3e-4), "ours": lambda m: OURS["bucketed"](m, 3e-4)}[wrap_name]
    torch.manual_seed(0)
    module = Odd()
    local = copy.deepcopy(module)
    layouts, first = [], []
    ddp = wrap(module)
    state, hook = CORE[method](module=module)

    def watching(state, bucket):
        where = {id(p): i for i, p in enumerate(module.parameters())}
        layouts[-1].append(tuple(where[id(p)] for p in bucket.parameters()))
        assert bucket.buffer().dtype == bucket.parameters()[0].dtype
        return hook(state, bucket)

    ddp.register_comm_hook(state, watching)
    out = {p: torch.zeros_like(p, dtype=torch.float64) for p in module.parameters()}
    true = {p: torch.zeros_like(p, dtype=torch.float64) for p in module.parameters()}
    errors, sizes, norms, same = [], [], [], []
    for k in range(12):
        layouts.append([])
        x = batch(rank, k, 4, (5,), torch.float32)
        ddp.zero_grad(), local.zero_grad()
        (ddp(x).sin() ** 2).mean().backward()
        getattr(ddp, "finish", lambda: None)()
        (local(x).sin() ** 2).mean().backward()
        first = first or [i for bucket in layouts[0] for i in bucket]
        params = list(module.parameters())
        back = held_back(state)
        for p, q in zip(params, local.parameters(), strict=True):
            if not p.requires_grad:
                assert p.grad is None
                continue
            assert p.grad.dtype == p.dtype and p.grad.shape == p.shape
            mean = q.grad.double()
            dist.all_reduce(mean)
            true[p] += mean / n
            out[p] += p.grad.double()
        error = max(
            float((out[params[i]].flatten() + back[place] - true[params[i]].flatten()).norm())
            for place, i in enumerate(first)
            if params[i].dtype != torch.bfloat16  # whose mean is rounded again, to bfloat16, after the hook
        )
        errors.append(error / float(torch.cat([t.flatten() for t in true.values()]).norm()))
        sizes.append(sum(t.numel() for t in state.state_dict()["residuals"].values()))
        norms.append(state.residual_norm())
        same.append(same_on_all_ranks(p.grad for p in params if p.grad is not None))
    state.close()
    total = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return dict(errors=errors, sizes=set(sizes), total=total, norms=norms, same=all(same), layouts=layouts)


@pytest.fixture(scope="module")
def fed():
    def run():
        return {(m, w): feedback(m, w) for m in FEEDBACK for w in ("torch", "ours")}

    return launch(run, ranks=3, timeout=300)


@pytest.mark.parametrize("method", FEEDBACK)
@pytest.mark.parametrize("wrap", ["torch", "ours"])
def test_residuals_lose_nothing_when_buckets_are_rebuilt(fed, method, wrap):
    for found in (result[method, wrap] for result in fed):
        assert found["layouts"][0] != found["layouts"][1] and len(found["layouts"][1]) >= 3
        assert max(found["errors"]) < 1e-5
        assert found["sizes"] == {found["total"]}
        assert found["same"] and min(found["norms"]) > 0

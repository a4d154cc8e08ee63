"""1-bit Adam against torch's Adam, against the paper's formulas played in one process, and against its own promises."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from optimizer_cases import batch, equal_everywhere, gradients, net, outcome, values
from torch import nn

from ddplab.hosts import Hosts, hosts_problem, link_bytes
from ddplab.launch import launch
from ddplab.onebit_adam import OneBitAdam

RANKS = 3


class Exact:
    """The identity in place of the compressor: the mean as it is."""

    wire_bytes = 0

    def shard(self, n):
        return slice(0, 1)

    def mean(self, flat, worker, server):
        dist.all_reduce(flat := flat / dist.get_world_size())
        return flat


def train(model, optimizer, steps, start=0):
    for k in range(start, start + steps):
        gradients(model, k, dist.get_rank())
        optimizer.step()


def grouped(model: nn.Module) -> list[dict]:
    first, last = list(model[0].parameters()), list(model[2].parameters())
    return [{"params": first, "lr": 0.02}, {"params": last, "betas": (0.8, 0.95), "weight_decay": 0.0}]


# -- what the ranks do -------------------------------------------------------------------------------------------------


def warm_up_beside_adam():
    """Ours on two ranks, and torch.optim.Adam in each rank on the mean of both ranks' gradients."""
    found = {}
    for name, dtype, options in (
        ("plain", torch.float32, {}),
        ("bf16", torch.bfloat16, {}),
        ("f64", torch.float64, {}),
        ("groups", torch.float32, {"weight_decay": 0.1, "eps": 1e-6}),
        ("decoupled", torch.float32, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ):
        ours, theirs = net(dtype=dtype), net(dtype=dtype)
        optimizer = OneBitAdam(grouped(ours), lr=0.01, warmup=6, stable=None, exchange=Exact(), **options)
        adam = torch.optim.Adam(grouped(theirs), lr=0.01, foreach=False, **options)
        train(ours, optimizer, 6)
        for k in range(6):
            sums = []
            for rank in range(2):
                gradients(theirs, k, rank)
                sums.append([p.grad / 2 for p in theirs.parameters()])
            for p, a, b in zip(theirs.parameters(), *sums, strict=True):
                p.grad = a + b
            adam.step()
        same = all(
            torch.equal(optimizer.state[p][key], adam.state[q][key])
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
            for key in ("step", "exp_avg", "exp_avg_sq")
        )
        found[name] = torch.equal(values(ours), values(theirs)), same
    return found


def exact_momenta(corrected, decoupled, preconditioned):
    model = net()
    optimizer = OneBitAdam(
        grouped(model),
        lr=0.01,
        weight_decay=0.1,
        decoupled_weight_decay=decoupled,
        warmup=4,
        bias_correction=corrected,
        stable=None,
        preconditioned=preconditioned,
        floor=0.0,
        exchange=Exact(),
    )
    train(model, optimizer, 10)
    return values(model)


def exact_runs():
    return {case: exact_momenta(*case) for case in ((True, False, True), (False, True, False))}


def formulas(corrected, decoupled, preconditioned, warmup=4, steps=10):
    """The paper's algorithm in one process, in float64, the compressor being the identity (in whatever units)."""
    model = net(dtype=torch.float64)
    options = [{"lr": 0.02, "betas": (0.9, 0.999), "decay": 0.1}, {"lr": 0.01, "betas": (0.8, 0.95), "decay": 0.0}]
    options = [options[0], options[0], options[1], options[1]]
    m, v = ([torch.zeros_like(p) for p in model.parameters()] for _ in range(2))
    for t in range(1, steps + 1):
        each = []
        for rank in range(RANKS):
            gradients(model, t - 1, rank)
            each.append([p.grad for p in model.parameters()])
        for i, p in enumerate(model.parameters()):
            lr, (beta1, beta2), decay = options[i].values()
            x = p.data
            g = [grad[i] + (0 if decoupled else decay * x) for grad in each]
            mean = sum(g) / RANKS
            if t <= warmup:
                m[i] = beta1 * m[i] + (1 - beta1) * mean
                v[i] = beta2 * v[i] + (1 - beta2) * mean**2
            else:
                m[i] = sum(beta1 * m[i] + (1 - beta1) * g_i for g_i in g) / RANKS
            last = min(t, warmup)
            top = m[i] / (1 - beta1**t) if corrected else m[i]
            below = v[i] / (1 - beta2**last) if corrected else v[i]
            if decoupled:
                x = x - lr * decay * x
            p.data = x - lr * top / (below.sqrt() + 1e-8)
    return values(model)


def lock_step():
    """Are all ranks equal after every step; do residuals come and stay; what travels?"""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = net(dtype=dtype)
        optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup=3, stable=None)
        for k in range(7):
            before = optimizer.wire_bytes
            train(model, optimizer, 1, start=k)
            state = [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
            same = equal_everywhere(*model.parameters(), *state)
            found.append((same, optimizer.compressing, optimizer.residual_norm(), optimizer.wire_bytes - before))
    return found


def without_feedback():
    model = net()
    optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup=3, stable=None, error_feedback=False)
    train(model, optimizer, 6)
    first = values(model)
    model = net()
    train(model, OneBitAdam(model.parameters(), lr=0.01, warmup=3, stable=None), 6)
    return first, values(model)


def floors():
    """The frozen variances of a parameter, for a floor of 0 and of one half of the mean."""
    found = []
    for floor in (0.0, 0.5):
        model = net()
        optimizer = OneBitAdam(model.parameters(), warmup=3, stable=None, floor=floor)
        train(model, optimizer, 4)
        found.append(optimizer.state[model[0].weight]["exp_avg_sq"])
    return found


def resumed(cut):
    """Straight through, and cut in two by a checkpoint that goes through torch.save and weights_only."""

    def make():
        model = net()
        return model, OneBitAdam(model.named_parameters(), lr=0.01, weight_decay=0.1, warmup=4)

    straight, optimizer = make()
    train(straight, optimizer, 9)
    first, before = make()
    train(first, before, cut)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": before.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second, after = make()
    second.load_state_dict(saved["model"])
    after.load_state_dict(saved["optimizer"])
    kept = copy.deepcopy(saved["optimizer"])
    train(second, after, 9 - cut, start=cut)
    untouched = all(
        torch.equal(a[key], b[key])
        for a, b in zip(kept["state"].values(), saved["optimizer"]["state"].values(), strict=True)
        for key in a
    )
    same = torch.equal(values(straight), values(second)) and optimizer.residual_norm() == after.residual_norm()
    return same, untouched, after.steps


def all_resumes():
    return [resumed(cut) for cut in (2, 4, 7)]


class Parts(nn.Module):
    """Parameters that are used by some ranks, in some steps, in part, never; frozen and empty ones."""

    def __init__(self):
        super().__init__()
        self.always, self.some_ranks = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        self.later, self.never = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.part = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, step: int, rank: int):
        noise = torch.randn(3, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (self.always * noise).sum() + (self.part[:2] * noise[:2]).sum() + self.empty.sum()
        if rank == 0:
            loss = loss + (self.some_ranks * noise[:2]).sum()
        if step >= 6:
            loss = loss + (self.later * noise[:2]).sum() + (self.part[2:] * noise[:2]).sum()
        return loss


def odd_parameters():
    model, rank = Parts(), dist.get_rank()
    optimizer = OneBitAdam(
        model.named_parameters(), weight_decay=0.1, decoupled_weight_decay=True, warmup=4, stable=None
    )
    said = []
    for k in range(8):
        model.zero_grad()
        model(k, rank).backward()
        said.append(outcome(optimizer.step))
    moved = {name: (p.detach() != 1).tolist() for name, p in model.named_parameters()}
    return moved, said, equal_everywhere(*model.parameters())


def under_ddp():
    from torch.nn.parallel import DistributedDataParallel

    def run(wrap, local):
        model = net()
        ddp = wrap(model)
        optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup=3, stable=None)
        for k in range(6):
            x, y = batch(k, dist.get_rank())
            model.zero_grad()
            with ddp.no_sync() if local else torch.enable_grad():
                nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        return values(model)

    plain = run(lambda model: model, local=False)
    inside = run(DistributedDataParallel, local=True)
    return torch.equal(plain, inside), outcome(lambda: run(DistributedDataParallel, local=False))


def stability():
    """The variance of steady gradients is stable, that of growing ones is not."""

    def run(factor, **options):
        p = nn.Parameter(torch.zeros(50))
        optimizer = OneBitAdam([p], betas=(0.9, 0.9), warmup=40, exchange=Exact(), **options)
        made = torch.Generator().manual_seed(dist.get_rank())
        for k in range(40):
            p.grad = torch.where(torch.rand(50, generator=made) < 0.5, -1.0, 1.0) * factor**k
            p.grad[:40] = factor**k  # shared by the ranks, so that the mean is known
            optimizer.step()

    return {
        "steady": outcome(lambda: run(1.0)),
        "growing": outcome(lambda: run(1.1)),
        "shrinking": outcome(lambda: run(0.9)),
        "unasked": outcome(lambda: run(1.1, stable=None)),
    }


def mistakes():
    rank = dist.get_rank()

    def made(**options):
        model = net()
        return model, OneBitAdam(model.named_parameters(), **{"lr": 0.01, "warmup": 2, "stable": None} | options)

    def run(steps=4, **options):
        train(*made(**options), steps)

    def nan_at(step):
        model, optimizer = made()
        train(model, optimizer, step)
        before = values(model), optimizer.residual_norm()
        gradients(model, step, rank)
        if rank == 1:
            model[2].weight.grad[0, 1] = math.inf
        said = outcome(optimizer.step)
        unchanged = torch.equal(before[0], values(model)) and before[1] == optimizer.residual_norm()
        train(model, optimizer, 1, start=step)  # and life goes on
        return said, unchanged, equal_everywhere(*model.parameters())

    def huge():
        model, optimizer = made()
        gradients(model, 0, rank)
        for p in model.parameters():
            p.grad.fill_(3e38 if rank else 2e38)  # finite; their sum is not
        optimizer.step()
        return bool(values(model).isfinite().all())

    def sparse():
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = OneBitAdam(model.parameters(), warmup=2)
        model(torch.tensor([rank])).sum().backward()
        optimizer.step()

    def out_of_step():
        model, optimizer = made()
        optimizer.steps += rank == 2
        train(model, optimizer, 1)

    def apart():
        model = net(seed=rank)
        train(model, OneBitAdam(model.parameters(), warmup=2), 1)

    def drifted():
        model, optimizer = made()
        train(model, optimizer, 2)
        with torch.no_grad():
            model[0].bias += rank
        train(model, optimizer, 1, start=2)

    def other_model():
        model = net() if rank else nn.Sequential(nn.Linear(5, 2))
        train(model, OneBitAdam(model.named_parameters(), warmup=2), 1)

    def late_group():
        model, optimizer = made()
        train(model, optimizer, 3)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    def early_group():
        model, extra = net(), nn.Parameter(torch.ones(2))
        optimizer = OneBitAdam(model.parameters(), warmup=2, stable=None)
        train(model, optimizer, 1)
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
        for k in range(1, 4):
            gradients(model, k, rank)
            extra.grad = torch.ones(2) * (rank + k)
            optimizer.step()
        return bool((extra != 1).all()), equal_everywhere(extra)

    def states():
        model, optimizer = made()
        train(model, optimizer, 3)
        state = optimizer.state_dict()
        other = state | {"onebit": state["onebit"] | {"rank": (rank + 1) % RANKS}}
        fresh, empty = made()
        fresh.load_state_dict(model.state_dict())
        said = outcome(lambda: empty.load_state_dict(other)), outcome(lambda: empty.load_state_dict({"state": {}}))
        empty.load_state_dict(other, residuals=False)
        norm = empty.residual_norm()
        train(fresh, empty, 1, start=3)
        return *said, norm, equal_everywhere(*fresh.parameters())

    def closure():
        model, optimizer = made()
        return optimizer.step(lambda: gradients(model, 0, rank) or 1.5)

    return {
        "nan in warm-up": nan_at(1),
        "nan after it": nan_at(3),
        "huge": outcome(huge),
        "sparse": outcome(sparse),
        "out of step": outcome(out_of_step),
        "rates": outcome(lambda: run(lr=0.01 * (1 + rank))),
        "apart": outcome(apart),
        "drifted": outcome(drifted),
        "other model": outcome(other_model),
        "late group": outcome(late_group),
        "early group": outcome(early_group),
        "states": states(),
        "closure": outcome(closure),
        "copy": outcome(lambda: copy.deepcopy(made()[1])),
        "module": outcome(lambda: OneBitAdam(net(), warmup=1)),
        "group": outcome(lambda: OneBitAdam([{"params": net().parameters(), "lr": float("nan")}], warmup=1)),
        "complex": outcome(lambda: OneBitAdam([nn.Parameter(torch.ones(2, dtype=torch.complex64))], warmup=1)),
        "no gradient": outcome(lambda: [o.step() for o in [made()[1]] for _ in range(3)]),
        "bad": [
            outcome(lambda: made(**bad))  # noqa: B023
            for bad in (
                {"warmup": 0},
                {"lr": -1.0},
                {"betas": (0.9, 1.0)},
                {"eps": -1.0},
                {"stable": 2.0},
                {"floor": 2.0},
            )
        ],
    }


def one_rank():
    """Alone there is nobody to talk to: momentum SGD with Adam's frozen variance, and no bytes."""
    model = net()
    optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup=2, stable=None)
    train(model, optimizer, 5)
    return optimizer.wire_bytes, optimizer.residual_norm(), bool(values(model).isfinite().all())


def traffic():
    """(ours, the kernel's) bytes of one step in the warm-up and of four after it; the switch is in between."""
    torch.manual_seed(0)
    model = nn.Linear(2000, 800)
    optimizer = OneBitAdam(model.parameters(), warmup=2, stable=None)
    made = torch.Generator().manual_seed(dist.get_rank())

    def steps(count):
        dist.barrier()
        ours, kernel = optimizer.wire_bytes, link_bytes().sent
        for _ in range(count):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=made)
            optimizer.step()
        return optimizer.wire_bytes - ours, link_bytes().sent - kernel

    return [steps(count) for count in (1, 1, 1, 4)][1::2]


def on_three():
    """All that needs three ranks, in one launch."""
    parts = (exact_runs, lock_step, all_resumes, odd_parameters, mistakes)
    return {part.__name__: part() for part in parts}


def on_two():
    parts = (warm_up_beside_adam, without_feedback, floors, under_ddp, stability)
    return {part.__name__: part() for part in parts}


@pytest.fixture(scope="module")
def three():
    return launch(on_three, ranks=RANKS, device="cpu", timeout=300)


@pytest.fixture(scope="module")
def two():
    return launch(on_two, ranks=2, device="cpu", timeout=300)


# -- what is right -----------------------------------------------------------------------------------------------------


def test_the_warm_up_is_torchs_adam_to_the_bit(two):
    for row in (row["warm_up_beside_adam"] for row in two):
        assert row == {name: (True, True) for name in ("plain", "bf16", "f64", "groups", "decoupled")}


def test_with_an_exact_exchange_it_is_momentum_sgd_over_the_frozen_variance(three):
    for row in (row["exact_runs"] for row in three):
        for case, found in row.items():
            torch.testing.assert_close(found, formulas(*case), rtol=0, atol=1e-6)


def test_all_ranks_are_equal_after_every_step(three):
    for row in (row["lock_step"] for row in three):
        assert len(row) == 21
        for k, (same, compressing, norm, sent) in enumerate(row):
            assert same and sent > 0
            assert compressing is (norm > 0) is (k % 7 >= 3)


def test_error_feedback_can_be_switched_off(two):
    for off, on in (row["without_feedback"] for row in two):
        assert not torch.equal(off, on)


def test_the_variance_is_frozen_no_lower_than_its_floor(two):
    for as_it_is, lifted in (row["floors"] for row in two):
        assert bool((as_it_is < 0.5 * as_it_is.mean()).any())
        assert torch.equal(lifted, as_it_is.clamp(min=0.5 * as_it_is.mean().item()))


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(three):
    for row in (row["all_resumes"] for row in three):
        assert row == [(True, True, 9)] * 3


def test_what_has_no_variance_stays_as_it_is(three):
    for moved, said, same in (row["odd_parameters"] for row in three):
        assert same
        assert all(moved["always"]) and all(moved["some_ranks"])
        assert not any(moved["later"] + moved["never"] + moved["frozen"])
        assert said[:6] == said[7:] * 6 == ["None"] * 6
        assert "step 7: 4 values get their first gradient after the warm-up of 4 steps" in said[6]


def test_under_a_ddp_only_inside_no_sync(two):
    for same, refused in (row["under_ddp"] for row in two):
        assert same
        assert refused.startswith("RuntimeError: step 1: all ranks hold the same gradients. If a DDP averages them")


def test_the_switch_warns_of_a_variance_that_is_not_stable(two):
    for rank, row in enumerate(row["stability"] for row in two):
        assert row["steady"] == row["unasked"] == "None"
        if rank:
            assert row["growing"] == row["shrinking"] == "None"  # one rank speaks for all
            continue
        # 40 of 50 values have g^2 = f^(2k): in 10 steps their v grows by f^20, once the start is forgotten
        assert row["growing"].startswith("None; RuntimeWarning: 1-bit Adam freezes a variance that is not stable")
        assert "after the 40 steps of the warm-up its L1 norm is 6." in row["growing"]
        assert "times that of 10 steps before (0.96 to 1.04 were asked for)" in row["growing"]
        assert "RuntimeWarning" in row["shrinking"]


def test_mistakes_are_sentences_on_every_rank(three):
    for rank, row in enumerate(row["mistakes"] for row in three):
        for case, step in (("nan in warm-up", 2), ("nan after it", 4)):
            said, unchanged, same = row[case]
            assert said.startswith(f"ValueError: rank 1, step {step}: the gradient of '2.weight' holds NaN or infinity")
            assert unchanged and same
        assert row["huge"] == "True"
        assert row["sparse"].startswith("TypeError: sparse gradients not supported: parameter 0 of group 0 on rank 0")
        assert row["out of step"].startswith("RuntimeError: the ranks are out of step: rank 0 is in step 1, rank 1 is")
        assert row["rates"].startswith("ValueError: the ranks' options differ: rank 0 has {'warmup': 2")
        assert row["apart"].startswith("ValueError: the ranks hold different parameters before the first step")
        assert row["drifted"].startswith("ValueError: the ranks hold different parameters at the switch")
        assert row["other model"].startswith("ValueError: the ranks' parameters differ: rank 0 has '0.weight' (2, 5)")
        assert row["late group"].startswith("RuntimeError: the variance is frozen")
        assert row["early group"] == "(True, True)"
        other, foreign, norm, same = row["states"]
        assert other.startswith(f"ValueError: this is the checkpoint of rank {(rank + 1) % RANKS} of 3, loaded on rank")
        assert foreign == "ValueError: this is no checkpoint of OneBitAdam: it has no entry 'onebit'"
        assert norm == 0 and same
        assert row["closure"] == "1.5"
        assert row["copy"].startswith("TypeError: OneBitAdam belongs to the ranks of its group")
        assert row["module"].startswith("TypeError: OneBitAdam takes parameters")
        assert row["group"] == "ValueError: lr is a number, 0 or more, not nan"
        assert row["complex"] == "TypeError: OneBitAdam trains real parameters, not torch.complex64"
        assert row["no gradient"].startswith("RuntimeError: no parameter had a gradient on any rank during the warm-up")
        assert row["bad"][0] == "ValueError: warmup is a whole number of steps, 1 or more, not 0"
        assert all(said.startswith("ValueError: ") for said in row["bad"])
    with pytest.raises(RuntimeError, match="OneBitAdam needs torch.distributed: use ddplab.launch or torchrun"):
        OneBitAdam(net().parameters(), warmup=1)


def test_alone_it_sends_nothing():
    assert launch(one_rank, ranks=1, device="cpu", timeout=300) == [(0, 0.0, True)]


def test_the_kernel_counts_one_bit_a_value():
    if problem := hosts_problem():
        pytest.skip(problem)
    n, size = 4, (2000 * 800 + 800) * 4
    ring = 2 * (n - 1) / n * size
    with Hosts(n, link="10gbit") as hosts:
        for (warm, warm_kernel), (bits, bits_kernel) in launch(traffic, ranks=n, hosts=hosts, timeout=300):
            assert warm == pytest.approx(ring, rel=0.001)
            assert warm_kernel == pytest.approx(warm, rel=0.03)
            assert 1 / 32 * ring < bits / 4 <= 0.035 * ring
            assert bits_kernel == pytest.approx(bits, rel=0.05)  # acknowledgements weigh more beside few bytes

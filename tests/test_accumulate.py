"""Gradient accumulation against closed forms and one process on the big batch, under torch's DDP and ours.

The recurring model is w * x with a scalar w, so that the gradient is x: rank 0 sees 1, 10 and rank 1 sees 2, 20. The
sum over a window of two, averaged over the ranks, is ((1 + 10) + (2 + 20)) / 2 = 16.5.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab._microbatch import batch_size
from ddplab.accumulate import accumulate, assert_grads_in_sync
from ddplab.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from ddplab.launch import launch

OURS = {"naive": NaiveDDP, "flat": FlatDDP, "overlapped": OverlappedDDP, "bucketed": BucketedDDP}
WRAPPERS = {
    "torch": TorchDDP,
    "torch, views": lambda m: TorchDDP(m, gradient_as_bucket_view=True),
    **OURS,
}
EACH = pytest.mark.parametrize("name", WRAPPERS)


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.w * x


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Times(), Times()

    def forward(self, x, which):
        return getattr(self, which)(x)


def counted(ddp):
    """Count buckets reduced, on any DDP with torch's hook interface."""
    calls = [0]

    def hook(state, bucket):
        calls[0] += 1
        buffer = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    return ddp, calls


def finish(ddp):
    getattr(ddp, "finish", lambda: None)()


def outcome(fn):
    """What `fn` returns, or what it complained of."""
    try:
        return fn()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"


def grads(ddp):
    return [p.grad.item() for p in ddp.parameters()]


# -- what the ranks do ------------------------------------------------------------------------------------------------


def mine():
    return [(1.0, 10.0), (2.0, 20.0)][dist.get_rank()]


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


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def samples(rank, sizes):
    g = torch.Generator().manual_seed(100 + rank)
    shape = lambda n, d: torch.randn(n, d, generator=g, dtype=torch.float64)  # noqa: E731
    return [(shape(n, 6), shape(n, 3)) for n in sizes]


RAGGED = [4] * 10 + [3]


def big_batch(batches_per_rank, windows):
    """One process: the gradient of the mean over all samples of each window, whoever held them."""
    model, found = net(), []
    for lo, hi in windows:
        model.zero_grad()
        rows = [b for batches in batches_per_rank for b in batches[lo:hi]]
        x, y = (torch.cat(parts) for parts in zip(*rows, strict=True))
        nn.functional.mse_loss(model(x), y).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


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


def uneven(sized):
    """8 micro-batches on rank 0 and 9 on rank 1: the complaint, and how many forwards ran before it."""
    ddp = BucketedDDP(Times())
    batches = [1.0] * (8 + dist.get_rank())
    ran = [0]

    def go():
        for step in accumulate(ddp, batches if sized else iter(batches), every=4):
            with step:
                step.backward(ddp(step.batch))
            ran[0] += 1

    return outcome(go), ran[0]


def run_all(model, batches, every=2, **options):
    for step in accumulate(model, batches, every, **options):
        with step:
            step.backward(model(step.batch))


def nan_on_rank_1(wrap):
    ddp = wrap(Times())
    batches = [1.0, 1.0, 1.0, 1.0]
    if dist.get_rank() == 1:
        batches[2] = float("nan")
    return outcome(lambda: run_all(ddp, batches))


def left_by_break(wrap):
    """Leave inside the context, with the iterator still alive; then an ordinary step must synchronise."""
    ddp = wrap(Times())
    steps = iter(accumulate(ddp, [7.0] * 4, every=4))
    for step in steps:
        with step:
            step.backward(ddp(step.batch))
            break
    sync = ddp.require_backward_grad_sync
    with pytest.raises(KeyError), next(steps):
        raise KeyError
    after_error = ddp.require_backward_grad_sync
    ddp.zero_grad()
    ddp(mine()[0]).backward()
    finish(ddp)
    return sync, after_error, grads(ddp)


def misuse():
    ddp = BucketedDDP(Times())

    def step():
        return next(iter(accumulate(ddp, [1.0, 2.0], 2)))

    def outside():
        s = step()
        loss = ddp(1.0)
        with s:
            s.backward(loss)

    def no_context():
        step().backward(ddp(1.0))

    def twice():
        s = step()
        with s:
            loss = ddp(1.0)
            s.backward(loss)
            s.backward(loss)

    def forgot():
        for s in accumulate(ddp, [1.0, 2.0], 2):
            with s:
                ddp(s.batch).backward()

    def early_update():
        s = step()
        with s:
            s.backward(ddp(1.0))
        s.update(torch.optim.SGD(ddp.parameters(), lr=1.0))

    def vector():
        s = step()
        with s:
            s.backward(ddp(torch.ones(3)))

    def held():
        with ddp.no_sync():
            run_all(ddp, [1.0, 2.0], 2)

    def number():
        s = step()
        with s:
            s.backward(ddp(1.0).item())

    def detached():
        s = step()
        with s:
            s.backward(ddp(1.0).detach())

    def clipped(max_norm):
        s = next(iter(accumulate(ddp, [1.0], 1)))
        with s:
            s.backward(ddp(1.0))
        s.update(torch.optim.SGD(ddp.parameters(), lr=1.0), max_norm=max_norm)

    cases = outside, no_context, twice, forgot, early_update, vector, number, detached, held
    clips = {f"max_norm={norm!r}": outcome(lambda norm=norm: clipped(norm)) for norm in (0, -1.0, float("nan"), "1")}
    return clips | {case.__name__: outcome(case) for case in cases}


def bad_input():
    r = dist.get_rank()
    ddp = BucketedDDP(Times())
    static = TorchDDP(Times(), static_graph=True)
    found = {
        f"every={e!r}": outcome(lambda e=e: accumulate(ddp, [1.0], e)) for e in (0, -3, 2.5, "4", True, None, 2**70)
    }
    found["static"] = outcome(lambda: accumulate(static, [1.0, 2.0], 2))
    found["static, every=1"] = outcome(lambda: run_all(static, [1.0, 2.0], 1))
    found["no batches"] = outcome(lambda: run_all(ddp, []))
    found["none on rank 1"] = outcome(lambda: run_all(ddp, [1.0] * (1 - r)))
    found["none on rank 1, join"] = outcome(lambda: run_all(ddp, [1.0] * (1 - r), uneven="join"))
    found["every differs"] = outcome(lambda: run_all(ddp, [1.0] * 6, 2 + r))
    found["unwrapped"] = outcome(lambda: run_all(Times(), [1.0]))
    found["strings"] = outcome(lambda: run_all(ddp, ["a", "b"]))
    found["size"] = outcome(lambda: run_all(ddp, [1.0, 2.0], size=lambda batch: 0.5))
    found["mean_over"] = outcome(lambda: run_all(ddp, [1.0], mean_over="tokens"))
    found["uneven"] = outcome(lambda: run_all(ddp, [1.0], uneven="drop"))
    return found


def article_loop(wrap):
    """The article's loop: synchronise and step when i % 4 == 0, loss not divided, 11 batches, two epochs."""
    ddp, calls = counted(wrap(net()))
    batches = samples(dist.get_rank(), [8] * 11)
    windows, pending, grad = [], 0, None
    for _ in range(2):
        for i, (x, y) in enumerate(batches):
            before = calls[0]
            context = ddp.no_sync() if i % 4 != 0 else torch.enable_grad()
            with context:
                nn.functional.mse_loss(ddp(x), y).backward()
            pending += 1
            if i % 4 == 0:
                finish(ddp)
                windows.append((pending, calls[0] - before))
                if len(windows) == 2:
                    grad = torch.cat([p.grad.flatten() for p in ddp.parameters()])
                ddp.zero_grad()
                pending = 0
    everybody = [samples(r, [8] * 11) for r in range(2)]
    ratio = grad / big_batch(everybody, [(1, 5)])[0]
    return windows, pending, float(ratio.min()), float(ratio.max())


def check_sync_reports():
    """`assert_grads_in_sync` on gradients set by hand."""
    r = dist.get_rank()

    def model(**grad):
        m = nn.Module()
        for name, g in grad.items():
            m.register_parameter(name, nn.Parameter(torch.zeros_like(g) if g is not None else torch.zeros(1)))
            getattr(m, name).grad = g
        return m

    same = torch.tensor([1.0, float("nan"), 0.0 if r else -0.0])
    return {
        "same": outcome(lambda: assert_grads_in_sync(model(p=same, q=None))),
        "element": outcome(lambda: assert_grads_in_sync(model(p=same, q=torch.tensor([[0.0, 1.0], [2.0 + r, 3.0]])))),
        "none": outcome(lambda: assert_grads_in_sync(model(p=None if r else same))),
        "name": outcome(lambda: assert_grads_in_sync(model(**{"pq"[r]: same}))),
        "bf16": outcome(lambda: assert_grads_in_sync(model(p=torch.tensor([1.0 + r], dtype=torch.bfloat16)))),
        "empty": outcome(lambda: assert_grads_in_sync(model(p=torch.zeros(0, 3)))),
    }


def on_rank():
    each = right_window, forward_outside, flag_flipped_after_forward, last_forward_in_no_sync
    each += against_big_batch, nan_on_rank_1, left_by_break, article_loop, joined
    found = {f.__name__: {name: outcome(lambda f=f, w=w: f(w)) for name, w in WRAPPERS.items()} for f in each}
    unused = {"torch": lambda m: TorchDDP(m, find_unused_parameters=True), **OURS}
    found["used_only_before_the_sync"] = {name: used_only_before_the_sync(w) for name, w in unused.items()}
    found["unused_everywhere"] = {name: unused_everywhere(w) for name, w in {"torch": TorchDDP, **OURS}.items()}
    kinds = [("mean", "samples"), ("mean", None), ("sum", None)]
    found["unequal"] = {kind: unequal_batches(*kind) for kind in kinds}
    found["windows"] = {(n, k): window_gradients(n, k) for n, k in ((4, 2), (5, 2), (3, 1), (2, 5))}
    found["drop_last"] = window_gradients(5, 2, drop_last=True)
    found["uneven"] = uneven(True), uneven(False)
    found["scaled"], found["misuse"], found["bad"] = outcome(scaled), misuse(), bad_input()
    found["reports"] = check_sync_reports()
    return found


@pytest.fixture(scope="module")
def ranks():
    return launch(on_rank, ranks=2, timeout=120, device="cpu")


# -- the checks -------------------------------------------------------------------------------------------------------


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


def test_uneven_batches_are_an_error_before_anybody_waits(ranks):
    for found in ranks:
        (known, ran), (unknown, ran_unknown) = found["uneven"]
        assert "rank 0: 8, rank 1: 9)" in known and ran == 0
        assert "rank 0: 8, rank 1: 9 or more)" in unknown and ran_unknown == 8


@EACH
def test_nan_is_named_on_every_rank(ranks, name):
    for found in ranks:
        assert found["nan_on_rank_1"][name] == (
            "FloatingPointError: the loss is not a finite number (rank 1, micro-batch 2: nan); no gradient was reduced"
        )


@EACH
def test_break_and_exceptions_leave_sync_on(ranks, name):
    for found in ranks:
        assert found["left_by_break"][name] == (True, True, [1.5])


@EACH
def test_the_articles_loop(ranks, name):
    for found in ranks:
        windows, left, low, high = found["article_loop"][name]
        assert [n for n, _ in windows] == [1, 4, 4, 3, 4, 4] and left == 2
        assert len({buckets for _, buckets in windows}) == 1
        assert low == pytest.approx(4, abs=1e-9) and high == pytest.approx(4, abs=1e-9)


def test_misuse_is_explained(ranks):
    for found in ranks:
        said = found["misuse"]
        assert "forward outside" in said["outside"]
        assert "inside `with step:`" in said["no_context"]
        assert "second backward" in said["twice"]
        assert "micro-batch 0 ended without step.backward" in said["forgot"]
        assert "do not agree yet" in said["early_update"]
        assert "one number" in said["vector"] and "(3,)" in said["vector"]
        assert said["number"].startswith("TypeError: the loss must be a tensor") and ".item()" in said["number"]
        assert "micro-batch 1 ends its window, but its forward ran under a no_sync() of yours" in said["held"]
        assert said["detached"].startswith("ValueError: the loss has no gradient")
        for norm in ("0", "-1.0", "nan", "'1'"):  # a negative one would turn the gradient round
            assert said[f"max_norm={norm}"] == f"ValueError: max_norm must be a positive number or None, not {norm}"


def test_bad_input(ranks):
    for found in ranks:
        said = found["bad"]
        for value in ("0", "-3", "2.5", "'4'", "True", "None", str(2**70)):
            assert said[f"every={value}"].startswith("ValueError") and f"every={value}" in said[f"every={value}"]
        assert said["static"].startswith("ValueError: static_graph=True with every=2 is not supported")
        assert said["static, every=1"] is None
        assert said["no batches"] == "ValueError: no batches on any rank"
        assert "rank 0: 1, rank 1: 0" in said["none on rank 1"]
        assert said["none on rank 1, join"] == "ValueError: no batches on rank 1"
        assert said["every differs"] == "ValueError: every differs between ranks: rank 0: 2, rank 1: 3"
        assert "wrap it" in said["unwrapped"]
        assert "pass size=" in said["strings"]
        assert "0.5" in said["size"] and "tokens" in said["mean_over"] and "drop" in said["uneven"]


def test_sync_check_names_parameter_ranks_and_values(ranks):
    for found in ranks:
        said = found["reports"]
        assert said["same"] is said["empty"] is None
        assert said["element"].endswith("q[1, 0]: rank 0 has 2.0, rank 1 has 3.0 (1 of 4 elements)")
        assert said["none"].endswith("p: a gradient on rank 0, none on rank 1")
        assert said["name"].endswith("p: a gradient on rank 0, none on rank 1; 1 more differ: q")
        assert "rank 0 has 1.0, rank 1 has 2.0" in said["bf16"]


def test_what_is_no_model_no_batches_no_scaler_is_named_at_once():
    for call, words in [
        (lambda: accumulate([1.0], net(), 4), "the wrapped model first, then its batches, not list"),
        (lambda: accumulate(None, [1.0], 4), "not NoneType"),
        (lambda: accumulate(net(), None, 4), "batches is something to iterate over, such as a DataLoader, not None"),
        (lambda: accumulate(net(), [1.0], 4, scaler=True), "scaler is a torch.amp.GradScaler, not True"),
        (lambda: assert_grads_in_sync([net()]), "takes a model, wrapped or not, not list"),
    ]:
        with pytest.raises(TypeError, match=words):
            call()


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

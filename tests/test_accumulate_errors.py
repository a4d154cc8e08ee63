"""Gradient accumulation that goes wrong: the article's loop, uneven batches, NaN, leaving early, misuse, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from accumulate_cases import EACH, WRAPPERS, Times, big_batch, counted, finish, grads, mine, net, outcome, samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab.accumulate import accumulate, assert_grads_in_sync
from ddplab.ddp import BucketedDDP
from ddplab.launch import launch

# -- what the ranks do -------------------------------------------------------------------------------------------------


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
    each = article_loop, nan_on_rank_1, left_by_break
    found = {f.__name__: {name: outcome(lambda f=f, w=w: f(w)) for name, w in WRAPPERS.items()} for f in each}
    found["uneven"] = uneven(True), uneven(False)
    found["misuse"], found["bad"], found["reports"] = misuse(), bad_input(), check_sync_reports()
    return found


@pytest.fixture(scope="module")
def ranks():
    return launch(on_rank, ranks=2, timeout=120, device="cpu")


# -- the checks --------------------------------------------------------------------------------------------------------


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

"""Error feedback: what every method sends, plus what it holds back, is what it was given; at every one of 200 steps.

One job of three ranks runs all methods, with and without error feedback, on gradients that all ranks have in common
plus noise. After the first step the parameters move into other buckets, as they do under DDP.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ddplab as dl
from ddplab._buckets import Bucket
from ddplab.hooks.base import NonFiniteGradient
from ddplab.hooks.codec import Int8Codec, SignCodec
from ddplab.hooks.powersgd import orthonormal
from ddplab.hooks.sparse import drawn, kept, largest

RANKS, STEPS, FEW = 3, 200, 40
SHAPES = [(12, 16), (7,), (5, 3), (0, 3), (), (13,)]
SIZES = [torch.Size(shape).numel() for shape in SHAPES]
METHODS = {
    "onebit": dl.onebit,
    "int8": dl.int8,
    "topk": functools.partial(dl.topk, 0.1),
    "randomk": functools.partial(dl.randomk, 0.1),
    "powersgd": functools.partial(dl.powersgd, 1),
    "powersgd, cold": functools.partial(dl.powersgd, 1, warm_start=False),
}


def gradient(rank, step):
    """One rank's gradient in one step: noise, of elements that differ tenfold in size, and a tenth as much in common.

    As in a usual step of SGD. (With as much in common as noise 1-bit takes longer than 200 steps to settle: what it
    holds back grows until the mean magnitude of all elements is that of the largest common one.)
    """
    common = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(1))
    noise = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(1000 * (1 + rank) + step))
    return (common / 10 + noise) * torch.logspace(-0.5, 0.5, sum(SIZES))


def mean_gradients(steps, dtype=torch.float32):
    """What DDP would compute, in float64: shape (steps, elements)."""
    rows = [[gradient(r, t).to(dtype).double() for r in range(RANKS)] for t in range(steps)]
    return torch.stack([torch.stack(row).mean(0) for row in rows])


class Job:
    """A hook's state, parameters, and the order in which they travel."""

    def __init__(self, make, dtype=torch.float32):
        self.state, self.hook = make()
        self.params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        self.steps = 0

    def step(self, flat):
        """The means of one step, flat and in the order of the parameters."""
        groups = [[5, 4, 3, 2, 1, 0]] if self.steps == 0 else [[2, 3, 5], [0, 1, 4]]
        pieces, means, waiting = flat.split(SIZES), [None] * len(SIZES), []
        for index, group in enumerate(groups):
            bucket = Bucket([self.params[i] for i in group], index, index == len(groups) - 1)
            bucket.buffer().copy_(torch.cat([pieces[i] for i in group]))
            waiting.append((group, self.hook(self.state, bucket)))
        for group, future in waiting:
            for i, piece in zip(group, future.wait().split([SIZES[i] for i in group]), strict=True):
                means[i] = piece.clone()
        self.steps += 1
        return torch.cat(means)

    def held_back(self):
        """This rank's residuals as a worker and as a server, float64, in the order of the parameters."""
        saved, n = self.state.state_dict(), len(SHAPES)
        worker = [saved["residuals"].get(str(place), torch.zeros(SIZES[n - 1 - place])) for place in range(n)]
        server = [torch.zeros(SIZES[n - 1 - place]) for place in range(n)]  # place 0 is the last parameter
        for flat in saved.get("servers", {}).values():
            sizes = flat["layout"][:, 1].tolist()
            whole = torch.zeros(sum(sizes))
            whole[self.state.two.shard(len(whole))] = flat["now"]
            for place, piece in zip(flat["layout"][:, 0].tolist(), whole.split(sizes), strict=True):
                server[place] = server[place] + piece
        return [torch.cat([v.view(-1) for v in reversed(values)]).double() for values in (worker, server)]


def run(make, steps, dtype=torch.float32):
    """(means, worker residuals, server residuals), each of shape (steps, elements), of this rank."""
    job, seen = Job(make, dtype), []
    for t in range(steps):
        mean = job.step(gradient(dist.get_rank(), t).to(dtype))
        assert mean.dtype == dtype
        seen.append([mean.double(), *job.held_back()])
    job.state.close()
    return [torch.stack(column) for column in zip(*seen, strict=True)]


def poison(make):
    """A gradient of rank 1 that is not finite, in the second bucket of the third step; what each rank says, and whether
    what is held back is as before and the next step is as if nothing had happened."""
    rank, found = dist.get_rank(), []
    for bad in (float("nan"), float("inf")):
        job, other = Job(make), Job(make)
        for t in range(2):
            job.step(gradient(rank, t)), other.step(gradient(rank, t))
        before, poisoned = job.held_back(), gradient(rank, 2)
        if rank == 1:
            poisoned[SIZES[0] + 2] = bad  # the 1-D parameter of 7
        try:
            job.step(poisoned)
        except NonFiniteGradient as problem:
            found.append((problem.rank, problem.bucket, problem.parameter))
        found.append(all(torch.equal(a, b) for a, b in zip(before, job.held_back(), strict=True)))
        job.steps = 3
        after = job.step(gradient(rank, 3))
        found.append(bool(after.isfinite().all()))
    return found


@pytest.fixture(scope="module")
def ranks():
    """Every rank's runs, by (method, what)."""

    def everything():
        found = {}
        for name, make in METHODS.items():
            found[name, True] = run(make, STEPS)
            found[name, False] = run(functools.partial(make, error_feedback=False), STEPS)
            found[name, torch.bfloat16] = run(make, FEW, torch.bfloat16)
            found[name, "poison"] = poison(make)
        return found

    return dl.launch(everything, ranks=RANKS, show=False, timeout=300)


def total(ranks, key):
    """Means (equal on all ranks), mean worker residual, sum of server residuals."""
    means, workers, servers = zip(*(r[key] for r in ranks), strict=True)
    assert all(torch.equal(means[0], m) for m in means)
    return means[0], torch.stack(workers).mean(0), torch.stack(servers).sum(0)


@pytest.mark.parametrize("method", METHODS)
def test_sent_plus_held_back_is_the_sum_of_the_gradients(ranks, method):
    means, worker, server = total(ranks, (method, True))
    expected = mean_gradients(STEPS).cumsum(0)
    error = (means.cumsum(0) + worker + server - expected).norm(dim=1) / expected.norm(dim=1)
    assert len(error) == STEPS and error.max() < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_bf16_gradients_are_accounted_for_too(ranks, method):
    means, worker, server = total(ranks, (method, torch.bfloat16))
    expected = mean_gradients(FEW, torch.bfloat16).cumsum(0)
    error = (means.cumsum(0) + worker + server - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 1e-5


def growth(norms):
    """How much larger than in the second quarter of the steps in the last quarter: sqrt(7/3) = 1.53 for a random walk,
    7/3 = 2.33 for what adds up step by step."""
    return float(norms[STEPS * 3 // 4 :].mean() / norms[STEPS // 4 : STEPS // 2].mean())


@pytest.mark.parametrize("method", METHODS)
def test_the_error_stops_growing_with_error_feedback_and_goes_on_without(ranks, method):
    expected = mean_gradients(STEPS).cumsum(0)
    fed = (total(ranks, (method, True))[0].cumsum(0) - expected).norm(dim=1)
    bare = (total(ranks, (method, False))[0].cumsum(0) - expected).norm(dim=1)
    held = [growth(worker.norm(dim=1)) for _, worker, _ in (r[method, True] for r in ranks)]
    assert growth(fed) < 1.15 and max(held) < 1.15
    assert growth(bare) > 1.35 and bare[-1] > 2 * fed[-1]
    assert all(r[method, False][1].abs().max() == 0 for r in ranks)


@pytest.mark.parametrize("method", METHODS)
def test_every_step_keeps_its_bound(ranks, method):
    """What a rank holds back of its gradient and what it held back before: for top-k at most 1 - k/n of the square, for
    int8 half a step, for the others never more than there was."""
    most = 1 - min(kept(n, 0.1) / n for n in (28, 200)) if method == "topk" else 1.0  # buckets of 28 and 200 elements
    for rank, found in enumerate(ranks):
        _, worker, _ = found[method, True]
        for t in range(2, STEPS):
            x = worker[t - 1] + gradient(rank, t).double()
            assert worker[t].square().sum() <= most * x.square().sum() * (1 + 1e-6)
            if method == "int8":
                assert worker[t].abs().max() <= x.abs().max() / 254 * (1 + 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_is_reported_with_rank_and_bucket(ranks, method):
    for found in ranks:
        said, kept_back, finite = found[method, "poison"][:3]
        assert said == (1, 1, "parameter 1 of it, shape (7,)")
        assert found[method, "poison"] == [said, True, True] * 2 and kept_back and finite


# -- one step, by itself -------------------------------------------------------------------------------------------

numbers = st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=60)


def left_by(codec, x):
    new = torch.empty_like(x)
    codec.encode(x, torch.empty(codec.nbytes(len(x)), dtype=torch.uint8), None, new)
    return new.double()


@settings(max_examples=80, deadline=None)
@given(numbers)
def test_signs_leave_what_the_paper_says(values):
    """Karimireddy et al. 2019 (arXiv:1901.09847): scaled sign leaves 1 - ||x||_1^2 / (n ||x||_2^2), exactly."""
    x = torch.tensor(values)
    one, two = x.double().abs().sum(), x.double().square().sum()
    left = left_by(SignCodec(), x).square().sum()
    assert left == pytest.approx(float(two - one**2 / len(x)), rel=1e-4, abs=1e-5 * float(two) + 1e-30)


@settings(max_examples=80, deadline=None)
@given(numbers)
def test_eight_bits_leave_half_a_step(values):
    x = torch.tensor(values)
    step = x.abs().max().item() / 127
    assert left_by(Int8Codec(), x).abs().max() <= step / 2 * (1 + 1e-4) + 1e-37


@settings(max_examples=80, deadline=None)
@given(numbers, st.floats(0.01, 1))
def test_top_k_leaves_at_most_its_share(values, ratio):
    """Stich, Cordonnier and Jaggi 2018 (arXiv:1809.07599): at most 1 - k/n."""
    x = torch.tensor(values)
    k, rest = kept(len(x), ratio), x.double()
    rest[largest(x, k)] = 0
    assert rest.square().sum() <= (1 - k / len(x)) * x.double().square().sum() * (1 + 1e-12)


def test_random_k_leaves_its_share_on_average():
    x = torch.randn(20, generator=torch.Generator().manual_seed(0)).double()
    k, draws, left = 6, 3000, []
    for draw in range(draws):
        rest = x.clone()
        rest[drawn(20, k, 0, draw)] = 0
        left.append(rest.square().sum() / x.square().sum())
    left = torch.stack(left)
    assert left.max() <= 1
    assert abs(left.mean() - (1 - k / 20)) < 4 * left.std() / draws**0.5  # 4 standard errors; the seed is fixed


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.integers(2, 12), st.integers(1, 4), st.integers(0, 1000))
def test_low_rank_leaves_a_projection(rows, columns, r, seed):
    """Never more than x, never less than the best approximation of that rank leaves (Eckart and Young)."""
    gen = torch.Generator().manual_seed(seed)
    m, r = torch.randn(rows, columns, generator=gen), min(r, rows, columns)
    p = orthonormal(m @ torch.randn(columns, r, generator=gen))
    left = float((m - p @ (p.T @ m)).double().norm())
    best = float(torch.linalg.svdvals(m.double())[r:].square().sum().sqrt())
    assert best - 1e-4 <= left <= float(m.double().norm()) * (1 + 1e-6)

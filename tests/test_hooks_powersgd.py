"""PowerSGD: what a low-rank approximation must reproduce, what travels as it is, and which inputs break others."""

import pytest
import torch
import torch.distributed as dist
from hook_cases import delay
from torch import nn

import ddplab as dl
from ddplab._buckets import Bucket
from ddplab.hooks.powersgd import factor_rank, matrix_shape, orthonormal


def test_gradients_as_matrices():
    assert matrix_shape(torch.Size([64, 3, 7, 7])) == (64, 147)
    assert matrix_shape(torch.Size([10])) == (10, 1) and matrix_shape(torch.Size([])) == (1, 1)
    assert matrix_shape(torch.Size([0, 3])) == (0, 3) and matrix_shape(torch.Size([4, 0])) == (4, 0)


@pytest.mark.parametrize(
    "shape, rank, r",
    [
        ((512, 4608), 4, 4),
        ((10,), 4, 0),
        ((), 1, 0),
        ((0, 3), 2, 0),
        ((5, 0), 2, 0),
        ((40, 3), 4, 0),
        ((40, 40), 10, 10),
    ],
)
def test_who_is_compressed(shape, rank, r):
    assert factor_rank(torch.Size(shape), rank) == r


def test_what_is_too_small_to_gain_is_not_compressed():
    for rows in range(0, 30, 3):
        for columns in range(0, 30, 3):
            for rank in (1, 2, 5):
                r = factor_rank(torch.Size([rows, columns]), rank)
                assert 2 * r * (rows + columns) <= rows * columns and r <= min(rows, columns, rank)
                if r == 0 and rows * columns:
                    assert 2 * min(rank, rows, columns) * (rows + columns) > rows * columns


@pytest.mark.parametrize("kind", ["random", "zero", "equal columns", "one column", "tiny", "huge"])
def test_bases_are_orthonormal_whatever_the_columns_are(kind):
    m = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    m = {
        "random": m,
        "zero": m * 0,
        "equal columns": m[:, :1].repeat(1, 4),
        "one column": m * torch.tensor([0.0, 0, 1, 0]),
        "tiny": m * 1e-30,
        "huge": m * 1e30,
    }[kind]
    q = orthonormal(m).double()
    assert torch.allclose(q.T @ q, torch.eye(4).double(), atol=1e-6)
    assert torch.allclose(q @ (q.T @ m.double()), m.double(), rtol=1e-5, atol=1e-5 * float(m.abs().max()))


def gradient_steps(params, gradients, state, hook, index=0):
    """The means that the hook gives for one bucket of `params`, step after step, flat."""
    seen = []
    for gradient in gradients:
        bucket = Bucket(params, index, True)
        bucket.buffer().copy_(gradient.view(-1))
        seen.append(hook(state, bucket).wait().clone())
    return seen


def test_low_rank_gradients_arrive_whole_and_warm_starts_find_large_directions():
    """A mean of rank 2 is sent exactly in one step at rank 2. Of a matrix of full rank warm starts come to send its two
    largest directions: the best that rank 2 can do (Eckart and Young)."""

    def matrices():
        gen = torch.Generator().manual_seed(0)
        left, right = torch.randn(60, 2, generator=gen), torch.randn(50, 2, generator=gen)
        u, v = orthonormal(torch.randn(60, 50, generator=gen)), orthonormal(torch.randn(50, 50, generator=gen))
        full = u @ torch.diag(0.7 ** torch.arange(50.0)) @ v.T
        return left @ right.T, full

    def steps():
        low, full = matrices()
        share = [0.5, 1.5][dist.get_rank()]  # ranks differ; the mean is the matrix
        p = [nn.Parameter(torch.zeros(60, 50))]
        out = {"exact": gradient_steps(p, [low * share], *dl.powersgd(2))[0]}
        out["bits"] = out["exact"].clone().view(torch.int32)
        for warm in (True, False):
            state, hook = dl.powersgd(2, error_feedback=False, warm_start=warm)
            out[warm] = gradient_steps(p, [full * share] * 12, state, hook)
        # Gradients of no size at all, then of some: an all-zero step must not end the search for directions.
        state, hook = dl.powersgd(2)
        out["after zero"] = gradient_steps(p, [low * 0, low * 1e-30, low * share], state, hook)[-1]
        return out

    low, full = matrices()
    best = torch.linalg.svdvals(full)[2:].square().sum().sqrt()
    ranks = dl.launch(steps, ranks=2, timeout=300, show=False)
    for out in ranks:
        assert torch.allclose(out["exact"].view(60, 50), low, atol=1e-4)
        assert torch.allclose(out["after zero"].view(60, 50), low, atol=1e-4)
        error = {warm: [float((g.view(60, 50) - full).norm()) for g in out[warm]] for warm in (True, False)}
        assert best * 0.999 < error[True][-1] < best * 1.01
        assert max(error[False]) <= full.norm() * 1.0001 and error[True][-1] < min(error[False])
    assert torch.equal(ranks[0]["bits"], ranks[1]["bits"])


def test_models_that_break_others():
    """Only 1-D, only 2-D, an empty parameter, a number, bf16: under torch's DDP, gradients 1 and 2 on two ranks."""

    class Model(nn.Module):
        def __init__(self, *shapes, dtype=torch.float32):
            super().__init__()
            self.params = nn.ParameterList([nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes])

        def forward(self, x):
            return sum((p * x.to(p.dtype)).sum() for p in self.params)

    def steps():
        x, out = torch.tensor([1.0, 2.0][dist.get_rank()]), {}
        kinds = {
            "1-D": ((5,), (7,)),
            "2-D": ((20, 30), (40, 20)),
            "all": ((), (0, 3), (20, 30), (7,), (3, 3), (8, 4, 3, 3), (40, 20), (5, 0)),
        }
        for name, shapes in kinds.items():
            for dtype in (torch.float32, torch.bfloat16):
                model = Model(*shapes, dtype=dtype)
                ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
                state, hook = dl.powersgd(1)
                ddp.register_comm_hook(state, hook)
                for _ in range(3):
                    ddp.zero_grad()
                    ddp(x).backward()
                out[name, dtype] = [(p.grad.shape, p.grad.dtype, p.grad.unique().tolist()) for p in model.params]
                assert [p.grad.shape for p in model.params] == [p.shape for p in model.params]
        return out

    for out in dl.launch(steps, ranks=2, timeout=300, show=False):
        for (_, dtype), grads in out.items():
            for shape, seen, values in grads:
                assert seen == dtype
                assert values == pytest.approx([1.5] * min(shape.numel(), len(values)), abs=1e-6), (
                    shape,
                    dtype,
                    values,
                )


def test_bytes_and_what_comes_of_one_rank_alone():
    def steps():
        p = [nn.Parameter(torch.zeros(60, 50)), nn.Parameter(torch.zeros(9))]
        state, hook = dl.powersgd(4)
        before = state.wire_bytes
        gradient_steps(p, [torch.ones(3009)], state, hook)
        return state.wire_bytes - before

    n = 3
    first, second = 4 * (60 * 4 + 9 + 1), 4 * 50 * 4  # P, the 1-D parameter and the flag; Q
    expected = 2 * (n - 1) * first // n + 2 * (n - 1) * second // n
    assert dl.launch(steps, ranks=n, timeout=300, show=False) == [expected] * n
    assert dl.launch(steps, ranks=1, timeout=300, show=False) == [0]


def test_a_hook_goes_on_where_it_was_saved_and_forgets_a_failed_step(tmp_path):
    def steps():
        rank, out = dist.get_rank(), []
        gradients = torch.randn(6, 900, generator=torch.Generator().manual_seed(rank))
        p = [nn.Parameter(torch.zeros(30, 30))]
        for warm in (True, False):
            straight = gradient_steps(p, gradients, *dl.powersgd(2, warm_start=warm))
            first, second, third = (dl.powersgd(2, warm_start=warm) for _ in range(3))
            gradient_steps(p, gradients[:3], *first)
            file = tmp_path / f"{warm}{rank}.pt"
            torch.save(first[0].state_dict(), file)
            second[0].load_state_dict(torch.load(file, weights_only=True))
            resumed = gradient_steps([nn.Parameter(torch.zeros(30, 30))], gradients[3:], *second)
            out.append(all(torch.equal(a, b) for a, b in zip(straight[3:], resumed, strict=True)))
        gradient_steps(p, gradients[:3], *third)
        kept = third[0].state_dict()
        try:
            gradient_steps(p, [gradients[0] * (float("nan") if rank == 1 else 1)], *third)
        except ValueError as problem:
            out.append(str(problem))
        after = third[0].state_dict()
        out.append(torch.equal(kept["factors"]["0"], after["factors"]["0"]))
        out.append(torch.equal(kept["residuals"]["0"], after["residuals"]["0"]))
        try:
            gradient_steps(p, [torch.full((900,), 1e38)], *third)
        except ArithmeticError as problem:
            out.append(str(problem))
        try:
            dl.powersgd(1)[0].load_state_dict(kept)
        except ValueError as problem:
            out.append(str(problem))
        return out

    for out in dl.launch(steps, ranks=2, timeout=300, show=False):
        same, same_cold, nan, factors, residuals, overflow, rank = out
        assert rank.startswith("PowerSGD's rank was 2 when this state was saved and is 1 now")
        assert same and same_cold and factors and residuals
        assert "rank 1, bucket 0, parameter 0 of it, shape (30, 30)" in nan
        assert overflow == "gradients of bucket 0 are too large: a product or sum of them left float32's range"


def test_what_ranks_differ_by_does_not_pile_up():
    """What is held back on a rank stops growing. torch's hook subtracts the ranks' mean, so it also keeps what ranks
    differ by inside the span of P, which nobody ever sends: a random walk, sqrt(T) long after T steps."""

    def steps():
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

        gen = torch.Generator().manual_seed(dist.get_rank())
        ours, hook = dl.powersgd(2)
        p = [nn.Parameter(torch.zeros(20, 20))]
        state = theirs.PowerSGDState(None, 2, start_powerSGD_iter=2)
        state.iter = 2
        norms = [[], []]
        for _ in range(200):
            gradient = torch.randn(20, 20, generator=gen)
            gradient_steps(p, [gradient], ours, hook)
            norms[0].append(ours.residual_norm())
            bucket = Bucket(p, 0, True)
            bucket.buffer().copy_(gradient.view(-1))
            theirs.powerSGD_hook(state, bucket).wait()
            norms[1].append(float(state.error_dict[0].norm()))
        return [sum(n[150:]) / sum(n[50:100]) for n in norms]

    for ours, theirs in dl.launch(steps, ranks=2, timeout=300, show=False):
        assert ours < 1.1 and theirs > 1.4  # a random walk: sqrt(175 / 75) = 1.53


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 1.5}, {"rank": True}, {"seed": -1}])
def test_options_that_make_no_sense(options):
    with pytest.raises(ValueError, match="must be a whole number of at least"):
        dl.powersgd(**options)


def test_ranks_that_disagree_are_told():
    def differ():
        try:
            dl.powersgd(rank=1 + dist.get_rank())
        except ValueError as problem:
            return str(problem)

    said = "PowerSGD's rank must be the same on all ranks: rank 0: 1, rank 1: 2"
    assert dl.launch(differ, ranks=2, timeout=300, show=False) == [said] * 2


def test_buckets_in_flight_with_random_delays_give_the_same_bits():
    """PowerSGD, top-k and random-k under torch's DDP with at least 6 buckets: late lanes change nothing."""

    def train(make, seed, unused):
        torch.manual_seed(0)
        model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Tanh())])
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-5, find_unused_parameters=unused)
        state, hook = make()
        seen = set()

        def counting(state, bucket):
            seen.add(bucket.index())
            return hook(state, bucket)

        ddp.register_comm_hook(state, counting)
        if seed:
            delay(state, seed + dist.get_rank(), 0.004)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(4):
            optimizer.zero_grad()
            ddp(torch.randn(3, 12, generator=generator)).square().sum().backward()
            optimizer.step()
        state.close()
        return len(seen), torch.cat([p.detach().view(-1) for p in model.parameters()])

    def steps():
        makers = (lambda: dl.powersgd(1), lambda: dl.topk(0.1), lambda: dl.randomk(0.1))
        return [[train(make, seed, unused) for seed in (0, 100)] for make in makers for unused in (False, True)]

    ranks = dl.launch(steps, ranks=3, show=False, timeout=180)
    for runs in zip(*ranks, strict=True):
        (buckets, first), *others = [run for rank in runs for run in rank]
        assert buckets >= 6 and first.isfinite().all()
        assert all(torch.equal(first, other) for _, other in others)

"""Top-k and random-k: what travels, what is added, what is refused. Error feedback over steps: test_error_feedback."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ddplab as dl
from ddplab._buckets import Bucket
from ddplab.hooks.sparse import _pack, _unpack, drawn, index_dtype, kept, largest


@pytest.mark.parametrize(
    "n, ratio, k",
    [(3, 0.01, 1), (10, 0.25, 2), (0, 0.5, 0), (1, 1e-9, 1), (100, 0.3, 30), (70_000, 1.0, 70_000), (7, 0.999, 6)],
)
def test_how_many_elements_travel(n, ratio, k):
    assert kept(n, ratio) == k


def test_indices_are_wide_enough():
    assert index_dtype(70_000) == index_dtype(2**31 - 1) == torch.int32
    assert index_dtype(2**31) == torch.int64
    flat = torch.zeros(70_000)
    flat[69_999] = -1  # no 16 bits hold this index
    assert largest(flat, 1).tolist() == [69_999] and largest(flat, 1).dtype == torch.int32


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40), st.floats(0.01, 1))
def test_largest_leaves_nothing_larger_and_random_draws_differ(numbers, ratio):
    flat = torch.tensor(numbers)
    n, k = len(flat), kept(len(flat), ratio)
    for index in (largest(flat, k), drawn(n, k, seed=3, draw=n)):
        assert len(set(index.tolist())) == k and all(0 <= i < n for i in index.tolist())
    rest = flat.clone()
    rest[largest(flat, k)] = 0
    assert rest.abs().max() <= flat[largest(flat, k)].abs().min()
    # Stich, Cordonnier and Jaggi 2018: what one step leaves
    assert rest.double().square().sum() <= (1 - k / n) * flat.double().square().sum() + 1e-9


def test_draws_are_fair_repeatable_and_new_each_time():
    n, k, draws = 50, 5, 4000
    hits = torch.zeros(n)
    for draw in range(draws):
        hits[drawn(n, k, 0, draw)] += 1
    expected, deviation = draws * k / n, (draws * k / n * (1 - k / n)) ** 0.5
    assert (hits - expected).abs().max() < 5 * deviation  # beyond 5 sigma once in 30,000 such tests; the seed is fixed
    assert torch.equal(drawn(n, k, 0, 7), drawn(n, k, 0, 7))
    assert not torch.equal(drawn(n, k, 0, 7), drawn(n, k, 1, 7))


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_messages_keep_their_parts(k, dtype):
    flag, index, values = torch.tensor([-1]), torch.arange(k, dtype=torch.int32), torch.randn(k).to(dtype)
    message = _pack(flag, index, values)
    assert message.numel() <= 8 + 4 * k + k * dtype.itemsize + 2 * 7
    again = _unpack(message, [(torch.int64, 1), (torch.int32, k), (dtype, k)])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(again, (flag, index, values), strict=True))


def bucket_of(gradient, index=0):
    """A bucket of one parameter whose gradient is this."""
    bucket = Bucket([nn.Parameter(torch.zeros_like(gradient))], index, True)
    bucket.buffer().copy_(gradient.view(-1))
    return bucket


def one_step(gradients, make):
    """Every rank's mean of `gradients[rank]`, residual norm and bytes, after one step of the hook that `make` gives."""

    def step():
        state, hook = make()
        bucket = bucket_of(gradients[dist.get_rank()])
        return hook(state, bucket).wait(), state.residual_norm(), state.wire_bytes

    return dl.launch(step, ranks=len(gradients), timeout=300, show=False)


def test_what_two_ranks_send_to_one_place_is_added():
    one, two = torch.tensor([1.0, 4, 0, 0]), torch.tensor([3.0, 0, 2, 0])
    for mean, residual, nbytes in one_step([one, two], lambda: dl.topk(ratio=0.5)):
        assert mean.tolist() == [2, 2, 1, 0] and residual == 0
        assert nbytes == 8 + 2 * (4 + 4)  # the flag, two indices, two values, to one other rank


def test_many_shapes_and_types_in_one_job():
    def steps():
        rank, seen = dist.get_rank(), {}
        # One element for int(3 * 0.01) = 0; an index beyond 16 bits; the mean over 3 ranks.
        state, hook = dl.topk(ratio=0.01)
        seen["three"] = hook(state, bucket_of(torch.tensor([0.0, 6.0, 1.0]))).wait()
        far = torch.zeros(70_000)
        far[69_999 - rank] = 3.0 * (rank + 1)
        state, hook = dl.topk(ratio=1 / 70_000)
        seen["far"] = hook(state, bucket_of(far)).wait().nonzero().view(-1), state.residual_norm()
        state, hook = dl.randomk(ratio=0.1, seed=11)
        seen["draws"] = [hook(state, bucket_of(torch.ones(1000))).wait().nonzero().view(-1).tolist() for _ in range(3)]
        seen["draws cost"] = state.wire_bytes
        for name, make in (("topk", dl.topk), ("randomk", dl.randomk)):
            state, hook = make(ratio=0.5)
            before = state.wire_bytes
            empty = hook(state, bucket_of(torch.zeros(0, 3))).wait()
            seen[name, "empty"] = empty.shape, state.wire_bytes - before
            whole = make(ratio=1.0)
            for dtype in (torch.bfloat16, torch.float64):
                mean = whole[1](whole[0], bucket_of(torch.tensor([1.5, -2.0, 0.25 * rank], dtype=dtype))).wait()
                seen[name, dtype] = mean, mean.dtype
            # Of a group of two ranks out of three, the mean is over two.
            pair = dist.new_group([0, 2])
            if rank != 1:
                state, hook = make(1.0, pair)
                seen[name, "pair"] = hook(state, bucket_of(torch.tensor([float(rank)]))).wait().item()
        return seen

    for rank, seen in enumerate(dl.launch(steps, ranks=3, timeout=300, show=False)):
        assert seen["three"].tolist() == [0, 6, 0]
        assert seen["far"][0].tolist() == [69_997, 69_998, 69_999] and seen["far"][1] == 0
        # Random-k sends values only, and every rank the same places: a ring's bytes of 100 values and one for the flag.
        assert seen["draws"] == [drawn(1000, 100, 11, i).tolist() for i in range(3)]
        assert seen["draws cost"] == 3 * (2 * 2 * 4 * 101 // 3)
        for name in ("topk", "randomk"):
            shape, nbytes = seen[name, "empty"]
            assert shape == (0,) and 0 < nbytes <= 16  # it joins with its flag
            for dtype in (torch.bfloat16, torch.float64):
                mean, kept_dtype = seen[name, dtype]
                assert kept_dtype == dtype and mean.tolist() == pytest.approx([1.5, -2, 0.25])
            if rank != 1:
                assert seen[name, "pair"] == 1.0


def test_under_ddp_and_its_rebuilt_buckets_nothing_is_lost():
    """Ratio 1 sends everything: gradients are those of plain DDP from the first step on, frozen and unused included."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(2, 2)
            self.frozen, self.empty = nn.Linear(3, 3).requires_grad_(False), nn.Parameter(torch.empty(0, 3))

        def forward(self, x):
            return self.frozen(self.b(self.a(x).tanh())).sum() + self.empty.sum()

    def train(make):
        torch.manual_seed(0)
        ddp = nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=1e-4, find_unused_parameters=True)
        if make:
            ddp.register_comm_hook(*make())
        torch.manual_seed(10 + dist.get_rank())
        seen = []
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.randn(4, 7)).backward()
            seen.append([None if p.grad is None else p.grad.clone() for p in ddp.parameters()])
        return seen

    def steps():
        return [train(make) for make in (None, lambda: dl.topk(ratio=1.0), lambda: dl.randomk(ratio=1.0))]

    for plain, top, random in dl.launch(steps, ranks=2, timeout=300, show=False):
        for hooked in (top, random):
            for ours, theirs in zip(hooked, plain, strict=True):
                for a, b in zip(ours, theirs, strict=True):
                    assert (a is None) == (b is None)
                    assert a is None or torch.allclose(a, b, atol=1e-6)


def test_a_hook_goes_on_where_it_was_saved(tmp_path):
    def steps():
        rank, out = dist.get_rank(), []
        p = nn.Parameter(torch.zeros(60))
        gradients = torch.randn(6, 60, generator=torch.Generator().manual_seed(rank))

        def run(state, hook, steps):
            seen = []
            for t in steps:
                bucket = Bucket([p], 0, True)
                bucket.buffer().copy_(gradients[t])
                seen.append(hook(state, bucket).wait().clone())
            return seen

        for make in (dl.topk, dl.randomk):
            whole, first, second = make(0.1), make(0.1), make(0.1)
            straight = run(*whole, range(6))
            run(*first, range(3))
            file = tmp_path / f"{make.__name__}{rank}.pt"
            torch.save(first[0].state_dict(), file)
            second[0].load_state_dict(torch.load(file, weights_only=True))
            resumed = run(*second, range(3, 6))
            out.append(all(torch.equal(a, b) for a, b in zip(straight[3:], resumed, strict=True)))
            out.append(second[0].residual_norm() == whole[0].residual_norm() > 0)
            out.append(second[0].wire_bytes == whole[0].wire_bytes)
        return out

    assert dl.launch(steps, ranks=2, timeout=300, show=False) == [[True] * 6] * 2


@pytest.mark.parametrize("make", ["topk", "randomk"])
@pytest.mark.parametrize("ratio", [0, -0.1, 1.1, float("nan"), "1%", True])
def test_ratios_that_make_no_sense(make, ratio):
    with pytest.raises(ValueError, match="ratio, the share of the elements that travel, is"):
        getattr(dl, make)(ratio=ratio)


def test_ranks_that_disagree_are_told():
    def differ():
        rank, said = dist.get_rank(), []
        for make in (
            lambda: dl.topk(ratio=0.1 + rank / 10),
            lambda: dl.randomk(ratio=0.1, seed=rank),
            lambda: dl.randomk(ratio=0.1, error_feedback=rank == 0),
        ):
            try:
                make()
            except ValueError as problem:
                said.append(str(problem))
        return said

    for said in dl.launch(differ, ranks=2, timeout=300, show=False):
        assert said == [
            "TopK's ratio must be the same on all ranks: rank 0: 0.1, rank 1: 0.2",
            "RandomK's seed must be the same on all ranks: rank 0: 0, rank 1: 1",
            "RandomK's error_feedback must be the same on all ranks: rank 0: True, rank 1: False",
        ]

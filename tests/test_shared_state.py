"""What ranks must share, after a checkpoint that some of them loaded and others did not; and what they give back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp_cases import outcome
from hook_cases import EVERY
from torch import nn

import ddplab as dl
from ddplab._buckets import Bucket
from ddplab._lockstep import digest
from ddplab.hooks.codec import SignCodec

SHAPES = [(12, 16), (5,)]
SHARING = {"randomk": lambda: dl.randomk(0.1), "powersgd": lambda: dl.powersgd(1)}


# -- hooks -----------------------------------------------------------------------------------------------------------


class Job:
    """A hook, and parameters in two buckets whose gradients depend on rank and step."""

    def __init__(self, make):
        self.state, self.hook = make()
        self.params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]

    def step(self, k):
        draw, futures = torch.Generator().manual_seed(100 * k + dist.get_rank()), []
        for i, p in enumerate(self.params):
            bucket = Bucket([p], i, i == len(self.params) - 1)
            bucket.buffer().copy_(torch.randn(p.numel(), generator=draw))
            futures.append(self.hook(self.state, bucket))
        return torch.cat([future.wait() for future in futures])

    def run(self, first, last):
        return [self.step(k).clone() for k in range(first, last)]


def hook_resumed(make):
    rank, whole = dist.get_rank(), Job(make)
    straight = whole.run(0, 2)
    early = whole.state.state_dict()
    straight += whole.run(2, 3)
    middle = whole.state.state_dict()
    straight += whole.run(3, 6)
    jobs = [Job(make) for _ in range(3)]
    if rank == 1:
        jobs[0].state.load_state_dict(middle)
    jobs[1].state.load_state_dict(early if rank else middle)
    jobs[2].state.load_state_dict(middle)
    found = {
        "one rank": outcome(lambda: jobs[0].step(3)),
        "and again": outcome(lambda: jobs[0].step(3)),
        "other steps": outcome(lambda: jobs[1].step(3)),
        "all": [torch.equal(a, b) for a, b in zip(jobs[2].run(3, 6), straight[3:], strict=True)],
    }
    jobs[0].state.load_state_dict(middle)
    found["mended"] = torch.equal(jobs[0].step(3), straight[3])
    if rank == 0:
        jobs[2].state.load_state_dict(middle)  # back to step 3, alone
    found["running"] = outcome(lambda: jobs[2].step(6))
    other = Job(make)
    other.state.seed += rank
    other.state.load_state_dict(middle | {"seed": 5 * rank})
    found["seeds"] = outcome(lambda: other.step(3))
    for job in (whole, other, *jobs):
        job.state.close()
    return found


def damaged_states():
    state = dl.onebit()[0]
    good, found = state.state_dict(), {}
    for name, bad in {
        "wire_bytes": "many",
        "overflows": -1,
        "scale": float("nan"),
        "residuals": {"first": torch.ones(2)},
        "servers": {"0": {"layout": torch.ones(2), "now": torch.ones(2)}},
    }.items():
        found[name] = outcome(lambda: state.load_state_dict(good | {name: bad}))  # noqa: B023
    state.close()
    return found, len(good) == len(state.state_dict())


# -- optimizers ------------------------------------------------------------------------------------------------------


def gradients(model, k, run=0):
    draw = torch.Generator().manual_seed(1000 * run + 10 * k + dist.get_rank())
    model.zero_grad()
    model(torch.randn(3, 4, generator=draw)).square().sum().backward()


def adam(steps=0, run=0):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = dl.OneBitAdam(model.named_parameters(), warmup=2, stable=None)
    for k in range(steps):
        gradients(model, k, run)
        optimizer.step()
    return model, optimizer


def adam_resumed():
    rank, found = dist.get_rank(), {}

    def go_on(model, optimizer):
        gradients(model, 3)
        return outcome(optimizer.step)

    (model, one), (_, two) = adam(3), adam(3, run=1)
    saved, others = one.state_dict(), two.state_dict()
    fresh, optimizer = adam()
    if rank == 1:
        fresh.load_state_dict(model.state_dict())
        optimizer.load_state_dict(saved)
    found["one rank"] = go_on(fresh, optimizer)
    optimizer.close()
    fresh, optimizer = adam()
    fresh.load_state_dict(model.state_dict())
    optimizer.load_state_dict(others if rank else saved)
    found["another run"] = go_on(fresh, optimizer)
    optimizer.load_state_dict(saved)
    found["mended"] = go_on(fresh, optimizer)
    optimizer.close()
    if rank == 0:
        one.load_state_dict(others)
    found["running"] = go_on(model, one)
    for o in (one, two):
        o.close()
    return found


def local(kind, steps=0, run=0, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    made = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"every": 5, **options})
    for k in range(steps):
        gradients(model, k, run)
        made.step()
    return made


def go_on(made, steps):
    for k in range(steps):
        gradients(made.module, 10 + k)
        made.step()


def local_resumed():
    rank, found = dist.get_rank(), {}
    post = dl.PostLocalSGD
    cases = {
        "PostLocalSGD": (post, {}),  # in step 6 it has agreed once
        "PostLocalSGD in its warm-up": (post, {"warmup": 9}),
        "PostLocalSGD after its warm-up": (post, {"warmup": 4}),  # and not yet agreed
        "DiLoCo": (dl.DiLoCo, {}),
    }
    for name, (kind, options) in cases.items():
        saved, others = (local(kind, 6, run, **options).state_dict() for run in (0, 1))
        at_three = local(kind, 3, **options).state_dict()
        made = local(kind, **options)
        if rank == 1:
            made.load_state_dict(at_three)
        # After the warm-up rank 1 is in its step 5 after two steps, rank 0 after five, and there they meet.
        found[name, "one rank"] = outcome(lambda m=made: go_on(m, 5))
        made = local(kind, **options)
        made.load_state_dict(saved if rank else others)
        found[name, "another run"] = outcome(lambda m=made: go_on(m, 5))
        made = local(kind, **options)
        made.load_state_dict(saved)
        found[name, "all"] = outcome(lambda m=made: go_on(m, 5))
    made, before, after = local(dl.DiLoCo, 6), local(dl.DiLoCo), local(dl.DiLoCo)
    before.load_state_dict(made.state_dict())
    made.finish()
    after.load_state_dict(made.state_dict())
    made = after if rank else before
    found["finished", "one rank"] = outcome(made.finish)
    return found


# -- what is given back ----------------------------------------------------------------------------------------------


def groups():
    return len(dist.distributed_c10d._world.pg_map)


def given_back():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("inter", "intra"))
    before, found, ones = groups(), {}, torch.ones(4)
    for name, make in EVERY.items():
        state, _ = make()
        during = groups()
        state.close()
        state.close()
        found[name] = during > before, groups() == before
    state = dl.Hierarchical(mesh)
    state.close()
    found["mesh's own stay"] = groups() == before, dl.hierarchical_all_reduce(ones.clone(), mesh).tolist() == [2.0] * 4
    levels = dl.Hierarchy([[0], [1]])
    found["Hierarchy"] = groups() > before, [levels.close() for _ in range(2)] == [None] * 2 and groups() == before
    found["closed"] = [outcome(lambda: dl.hierarchical_all_reduce(ones.clone(), levels))]
    found["closed"].append(outcome(lambda: dl.hierarchical_all_reduce(ones.clone(), levels, check=False)))
    two = dl.TwoPhase(SignCodec())
    two.mean(ones.clone())
    found["TwoPhase"] = groups() > before, [two.close() for _ in range(2)] == [None] * 2 and groups() == before
    found["closed"].append(outcome(lambda: two.mean(ones.clone())))
    model, optimizer = adam(3)
    found["OneBitAdam"] = groups() > before, [optimizer.close() for _ in range(2)] == [None] * 2 and groups() == before
    gradients(model, 3)
    found["closed"].append(outcome(optimizer.step))
    mine = dl.TwoPhase(SignCodec())
    dl.OneBitAdam([nn.Parameter(ones)], warmup=1, exchange=mine).close()
    found["an exchange of others stays"] = groups() == before + 1, mine.mean(ones.clone()).tolist() == [1.0] * 4
    dist.destroy_process_group(mine.wire.group)
    mine.close()
    return found


# -- arguments that make no sense, where there are ranks -------------------------------------------------------------


def wrong_arguments():
    ones, rank = torch.ones(4), dist.get_rank()
    levels, two, (model, optimizer) = dl.Hierarchy([[0, 1]]), dl.TwoPhase(SignCodec()), adam()
    post, inner = local(dl.PostLocalSGD), torch.optim.SGD(model.parameters(), lr=0.1)
    part = optimizer.state_dict() | {"onebit": {"rank": rank}}

    def made(**options):
        return dl.OneBitAdam([nn.Parameter(torch.ones(2))], **{"warmup": 1} | options)

    calls = {
        "module is the model, a torch.nn.Module, or None, not 5": lambda: dl.onebit(module=5),
        "scaler is a torch.amp.GradScaler or None, not 5": lambda: dl.onebit(scaler=5),
        "error_feedback is True or False, not 'no'": lambda: dl.onebit(error_feedback="no"),
        "error_feedback is True or False, not 1": lambda: dl.powersgd(error_feedback=1),
        "process_group is a torch.distributed.ProcessGroup or None, not 'all'": lambda: dl.int8("all"),
        'on_overflow is "count" or "raise", not 1': lambda: dl.fp16(on_overflow=1),
        "count_underflows is True or False, not 'yes'": lambda: dl.bf16(count_underflows="yes"),
        "is a number, above 0 and at most 1, not None": lambda: dl.topk(None),
        "seed must be a whole number of at least 0, not True": lambda: dl.randomk(seed=True),
        "PowerSGD's rank must be a whole number of at least 1, not 'two'": lambda: dl.powersgd("two"),
        "warm_start is True or False, not None": lambda: dl.powersgd(warm_start=None),
        "hosts are lists of ranks, one a host, such as [[0, 1], [2, 3]], not 5": lambda: dl.Hierarchical(5),
        "hosts are lists of ranks, one a host, such as [[0, 1], [2, 3]], not [[0, True]]": lambda: dl.Hierarchy(
            [[0, True]]
        ),
        "process_group is a torch.distributed.ProcessGroup or None, not 6": lambda: dl.Hierarchy(group=6),
        'hierarchical_all_reduce\'s op is "sum" or "mean", not 5': lambda: dl.hierarchical_all_reduce(ones, levels, 5),
        "check is True or False, not 'no'": lambda: dl.hierarchical_all_reduce(ones, levels, check="no"),
        "all_reduce takes a torch.Tensor, not list": lambda: dl.hierarchical_all_reduce([1.0], levels),
        "the hook gets a bucket of gradients from DDP, not 5": lambda: dl.onebit_hook(dl.OneBit(), 5),
        "codec is a ddplab codec, such as ddplab.SignCodec(), not 1": lambda: dl.TwoPhase(1),
        "what is averaged is a one-dimensional floating tensor, not [1.0]": lambda: two.mean([1.0]),
        "what is averaged is a one-dimensional floating tensor, not tensor([1, 2])": lambda: two.mean(
            torch.tensor([1, 2])
        ),
        "worker_residual is a float32 tensor of shape (4,) or None, not tensor([1.])": lambda: two.mean(
            ones, torch.ones(1)
        ),
        "n, the number of elements, must be a whole number of at least 0, not -1": lambda: two.shard(-1),
        "rank is 0 to 1, not 2": lambda: two.shard(8, 2),
        "lr is a number, 0 or more, not 'x'": lambda: made(lr="x"),
        "eps is a number, 0 or more, not None": lambda: made(eps=None),
        "weight_decay is a number, 0 or more, not True": lambda: made(weight_decay=True),
        "betas are two numbers, such as (0.9, 0.999), not 0.9": lambda: made(betas=0.9),
        "each of the betas is a number, from 0 to 1, not 'b'": lambda: made(betas=(0.9, "b")),
        "each of the betas is below 1, not 1.0": lambda: made(betas=(0.9, 1.0)),
        "floor is a number, from 0 to 1, not 2": lambda: made(floor=2),
        "stable, where it is not None, is a number, above 0 and at most 1, not 'x'": lambda: made(stable="x"),
        "warmup is a whole number of steps, 1 or more, not '9'": lambda: made(warmup="9"),
        "bias_correction is True or False, not 1": lambda: made(bias_correction=1),
        "preconditioned is True or False, not 'no'": lambda: made(preconditioned="no"),
        "decoupled_weight_decay is True or False, not 0": lambda: made(decoupled_weight_decay=0),
        "exchange is a ddplab.TwoPhase or None, not 5": lambda: made(exchange=5),
        "process_group is a torch.distributed.ProcessGroup or None, not 7": lambda: made(process_group=7),
        "closure is a function without arguments, or None, not 5": lambda: optimizer.step(5),
        'a group is a dict with an entry "params", not 5': lambda: optimizer.add_param_group(5),
        "this is no checkpoint of OneBitAdam: None": lambda: optimizer.load_state_dict(None),
        "this checkpoint of OneBitAdam is damaged: it has no norm_before": lambda: optimizer.load_state_dict(part),
        "residuals is True or False, not 'no'": lambda: optimizer.load_state_dict(optimizer.state_dict(), "no"),
        "PostLocalSGD takes a torch module, not None": lambda: dl.PostLocalSGD(None, inner, 2),
        "every is a whole number of steps, 1 or more, not True": lambda: dl.PostLocalSGD(model, inner, True),
        "warmup is a whole number of steps, 0 or more, not nan": lambda: dl.PostLocalSGD(model, inner, 2, float("nan")),
        "nesterov is True or False, not 'no'": lambda: dl.DiLoCo(model, inner, 2, nesterov="no"),
        "outer_lr is a number, 0 or more, not '1'": lambda: dl.DiLoCo(model, inner, 2, outer_lr="1"),
        "process_group is a torch.distributed.ProcessGroup or None, not 8": lambda: dl.DiLoCo(
            model, inner, 2, process_group=8
        ),
        "set_to_none is True or False, not 1": lambda: post.zero_grad(1),
        "this is no checkpoint of PostLocalSGD, it is NoneType": lambda: post.load_state_dict(None),
        "this checkpoint of PostLocalSGD is damaged: it has no entry agreed": lambda: post.load_state_dict(
            {"rank": rank, "ranks": 2}
        ),
    }
    return {message: outcome(call) for message, call in calls.items()}


# -- what is right ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two():
    parts = (adam_resumed, local_resumed, given_back, damaged_states, wrong_arguments)

    def run():
        found = {part.__name__: part() for part in parts}
        return found | {"hooks": {name: hook_resumed(make) for name, make in SHARING.items()}}

    return dl.launch(run, ranks=2, device="cpu", show=False, timeout=120)


@pytest.mark.parametrize("method", SHARING)
def test_a_hook_resumed_on_one_rank_only_is_noticed_on_all(two, method):
    name, counter = {"randomk": ("RandomK", "draws"), "powersgd": ("PowerSGD", "steps")}[method]
    for found in (found["hooks"][method] for found in two):
        for case in ("one rank", "and again", "other steps", "running"):
            assert found[case].startswith(f"ValueError: {name}'s number of {counter} must be the same on all ranks: ")
            assert "let every rank load what it saved itself, all at the same step" in found[case]
        assert found["seeds"].startswith(f"ValueError: {name}'s seed must be the same on all ranks: rank 0: 0, rank 1:")
        assert found["all"] == [True] * 3 and found["mended"] is True
        assert found["one rank"] == two[0]["hooks"][method]["one rank"]


def test_a_damaged_state_is_refused_whole(two):
    for found, unchanged in (found["damaged_states"] for found in two):
        assert unchanged
        for name, said in found.items():
            assert said.startswith(f"ValueError: this state of OneBit is damaged: {name} is "), said


def test_1_bit_adam_resumed_on_one_rank_only(two):
    for found in (found["adam_resumed"] for found in two):
        assert found["one rank"] == (
            "RuntimeError: the ranks are out of step: rank 0 is in step 1, rank 1 is in step 4. Every rank must take "
            "the same number of steps; and a checkpoint was loaded on rank 1 of 2: let every rank load what it saved "
            "itself, all at the same step"
        )
        for case, loaded in (("another run", "0, 1"), ("running", "0")):
            said = (
                f"ValueError: the ranks' momenta differ, and a checkpoint was loaded on rank {loaded} of 2: let every"
            )
            assert found[case].startswith(said)
        assert found["mended"] is None


def test_local_training_resumed_on_one_rank_only(two):
    for found in (found["local_resumed"] for found in two):
        for name in ("PostLocalSGD", "DiLoCo"):
            said = "ValueError: the ranks' starting points differ, and a checkpoint was loaded on rank 1 of 2"
            assert found[name, "one rank"].startswith(said)
        said = "RuntimeError: the ranks last agreed after different numbers of steps: rank 0: 5, rank 1: 6"
        assert found["finished", "one rank"] == said
        warm = found["PostLocalSGD in its warm-up", "one rank"]
        assert warm.startswith("RuntimeError: the ranks are out of step: rank 0 is in step 1, rank 1 is in step 4")
        assert "a checkpoint was loaded on rank 1 of 2" in warm
        shared = {
            "PostLocalSGD": "parameters of their last agreement",
            "PostLocalSGD in its warm-up": "parameters",
            "PostLocalSGD after its warm-up": "parameters of their last agreement",
            "DiLoCo": "common parameters",
        }
        for name, what in shared.items():
            said = f"ValueError: the ranks' {what} differ, and a checkpoint was loaded on rank 0, 1 of 2"
            assert found[name, "another run"].startswith(said)
        assert all(said is None for (_, case), said in found.items() if case == "all")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.uint8])
def test_a_digest_is_of_every_bit_and_of_nothing_else(dtype):
    """As large as the memory is: the same in another layout, another after any bit has changed."""
    one = torch.arange(12).reshape(3, 4).to(dtype)
    same = torch.empty(4, 3, dtype=dtype).t().copy_(one)
    assert not same.is_contiguous() and digest([one, one[0]]) == digest([same, same[0]])
    assert digest([]) == digest([]) and digest([one, one[0]]) != digest([one[0], one])
    for bit in range(8):
        other = one.clone()
        other.view(torch.uint8)[1, 3] ^= 1 << bit
        assert digest([other]) != digest([one])


def test_close_gives_back_what_was_made_and_nothing_else(two):
    for found in (found["given_back"] for found in two):
        assert all(said.startswith("RuntimeError: th") and "closed" in said for said in found.pop("closed"))
        assert found == {name: (True, True) for name in found}


def test_wrong_arguments_get_sentences(two):
    for found in (found["wrong_arguments"] for found in two):
        for message, said in found.items():
            assert isinstance(said, str) and message in said, (message, said)
            assert said.startswith(("ValueError: ", "TypeError: "))

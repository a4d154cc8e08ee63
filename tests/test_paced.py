"""Paced compute, recording, and the measured timeline: what they play and see, never how fast."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import ddplab as dl
from ddplab.profile import Gradient, Profile
from ddplab.timeline import assign

# 12 parameters of 50 to 600 kB; two dtypes in the second
PLAIN = Profile.of([(12_500 * (i + 1), 1e-4) for i in range(12)], forward_s=1e-3)
MIXED = Profile(
    tuple(
        Gradient(f"p{i}", 20_000 + 7_000 * i, 1e-4 * i, 11 - i, "float32" if i % 3 else "float64") for i in range(12)
    ),
    0.0,
    2e-3,
)


def small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))


# ---- paced


@pytest.mark.parametrize("profile", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_a_recording_of_a_paced_profile_is_that_profile(profile: Profile) -> None:
    """Sizes, dtypes and the order come back; nothing is ready before its time (waiting longer is possible)."""
    net = dl.paced(profile)
    seen = dl.record(net, (torch.ones(3),), repeats=3)
    assert seen.basis == "measured"
    assert [(g.elements, g.position, g.dtype) for g in seen.gradients] == [
        (g.elements, g.position, g.dtype) for g in profile.gradients
    ]
    assert all(got.ready_s >= said.ready_s for got, said in zip(seen.gradients, profile.gradients, strict=True))
    assert seen.forward_s >= profile.forward_s and seen.backward_s >= profile.backward_s
    assert all(p.grad is None for p in net.parameters())


def test_gradients_are_the_mean_of_the_input() -> None:
    net = dl.paced(PLAIN)
    net(torch.tensor([1.0, 4.0])).backward()
    assert all(torch.equal(p.grad, torch.full_like(p, 2.5)) for p in net.parameters())
    (3 * net()).backward()
    assert all(torch.equal(p.grad, torch.full_like(p, 5.5)) for p in net.parameters())


def test_a_module_is_paced_by_its_sizes() -> None:
    net = dl.paced(small(), backward_s=0.004)
    profile = net.profile
    assert [g.name for g in profile.gradients][:3] == ["3.bias", "3.weight", "2.bias"]
    assert [g.position for g in profile.gradients] == list(range(5, -1, -1))
    assert [p.numel() for p in net.parameters()] == [p.numel() for p in small().parameters()]
    assert profile.gradients[1].ready_s == pytest.approx(0.004 * 5 / (35 + 24 + 5))
    assert profile.forward_s == 0.002 and profile.basis == "stated"


def test_names_that_would_collide_stay_apart() -> None:
    profile = Profile((Gradient("a.b", 2, 0.0, 1), Gradient("a_b", 3, 0.0, 0)), 0.0, 0.0)
    assert [p.numel() for p in dl.paced(profile).parameters()] == [3, 2]


def test_a_parameter_without_elements_carries_nothing() -> None:
    model = small()
    model.empty = torch.nn.Parameter(torch.empty(0, 3))
    profiles = dl.paced(model).profile, dl.assumed_profile(model, compute_s=1.0), dl.record(model, torch.zeros(2, 6))
    assert [len(profile.gradients) for profile in profiles] == [6, 6, 6]


def test_frozen_parameters_are_not_played() -> None:
    model = small()
    model[0].weight.requires_grad_(False)
    assert len(dl.paced(model).profile.gradients) == 5
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter"):
        dl.paced(model)
    with pytest.raises(TypeError, match=r"ddplab.Profile or a torch module, not str"):
        dl.paced("resnet18")


# ---- record


def test_record_sees_backward_order_and_leaves_the_model_alone() -> None:
    model = small()
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = dl.record(model, torch.randn(3, 6), loss_fn=lambda y: y.pow(2).mean(), optimizer=optimizer, repeats=3)
    assert {g.name for g in seen.gradients[:2]} == {"3.weight", "3.bias"}
    assert {g.name for g in seen.gradients[-2:]} == {"0.weight", "0.bias"}
    assert seen.gradients[-1].ready_s <= seen.backward_s
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_record_without_gradients_says_so() -> None:
    with pytest.raises(ValueError, match="no parameter of this model got a gradient"):
        dl.record(small(), torch.randn(3, 6), loss_fn=lambda y: torch.ones((), requires_grad=True))


# ---- assumed


def test_assumed_shares_follow_the_flops() -> None:
    """Linear layers without bias: 2 * in * out FLOPs an example; 3 times that a step, two thirds of it backward."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 16, bias=False))
    profile = dl.assumed_profile(model, torch.zeros(10, 4), tflops=1e-6)
    assert profile.compute_s == pytest.approx(3 * 10 * 2 * (32 + 128) / 1e6)
    assert profile.basis == "assumed" and "assumed 1e-06 TFLOP/s" in profile.source
    assert profile.gradients[0].name == "1.weight"
    assert profile.gradients[0].ready_s == pytest.approx(profile.backward_s * 128 / 160)
    stated = dl.assumed_profile(model, torch.zeros(10, 4), compute_s=3.0)
    assert (stated.forward_s, stated.backward_s) == pytest.approx((1.0, 2.0))


def test_assumed_without_inputs_needs_a_time() -> None:
    with pytest.raises(ValueError, match="state compute_s"):
        dl.assumed_profile(small())
    profile = dl.assumed_profile(small(), compute_s=3.0)
    assert profile.gradients[0].name == "3.bias" and profile.gradients[-1].ready_s == pytest.approx(2.0)
    assert "number of parameters" in profile.source


X = torch.zeros(2, 4)


class Awkward(torch.nn.Module):
    """A forward that looks at its data, which the meta device does not have; or breaks as a user's may."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        super().__init__()
        self.layer, self.error = torch.nn.Linear(4, 4), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error:
            raise self.error("broken\nin two lines")
        return self.layer(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: dl.assumed_profile(Awkward(), X), ValueError, "without data its forward fails: "),
        (lambda: dl.assumed_profile(Awkward(AttributeError), X), ValueError, r"AttributeError: broken\)"),
        (lambda: dl.assumed_profile(small(), torch.zeros(2, 9)), ValueError, "without data its forward fails: Runtime"),
        (lambda: dl.assumed_profile(torch.nn.BatchNorm1d(4), X), ValueError, "no operation that is counted"),
        (lambda: dl.assumed_profile(torch.nn.Linear(4, 4), X, tflops=1e300), ValueError, "takes no time at all"),
        (lambda: dl.assumed_profile(torch.nn.Linear(4, 4), X, tflops="10"), ValueError, "tflops is a positive number"),
        (lambda: dl.assumed_profile(small(), compute_s=math.nan), ValueError, "compute_s is a positive number"),
        (lambda: dl.assumed_profile("resnet18", batch=0.5), ValueError, "batch must be a whole number of at least 1"),
        (lambda: dl.assumed_profile(None), TypeError, "torchvision classifier or a torch module, not None"),
        (lambda: dl.record("resnet18"), TypeError, "record takes a torch module, not str"),
        (lambda: dl.record(small(), torch.zeros(2, 6), repeats=0), ValueError, "record's repeats must be"),
        (lambda: dl.record(small(), torch.zeros(2, 6), lambda y: y), TypeError, r"not a Tensor of shape \(2, 1\)"),
        (lambda: dl.record(small(), torch.zeros(2, 6), lambda y: y.sum().item()), TypeError, "a tensor, not a float"),
        (lambda: dl.record(small(), torch.zeros(2, 6), lambda y: y.sum().detach()), ValueError, "got a gradient"),
        (lambda: dl.record(torch.nn.LSTM(6, 3), torch.zeros(2, 6)), TypeError, "returned a tuple.* pass loss_fn"),
        (lambda: dl.paced(small(), backward_s=-1.0), ValueError, "backward_s"),
        (lambda: dl.paced(small(), backward_s="1"), ValueError, "backward_s"),
    ],
)
def test_what_is_no_model_no_time_or_no_loss_is_named(call: Callable, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_assuming_leaves_the_model_alone() -> None:
    for device in ("cpu", "meta"):
        model = small().to(device)
        dl.assumed_profile(model, torch.zeros(2, 6))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_layer_used_twice_is_ready_when_its_first_use_is_over_in_backward() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(self.b(self.a(x)))

    profile = dl.assumed_profile(Twice(), torch.zeros(1, 4), compute_s=3.0)
    assert [(g.name, round(g.ready_s, 6)) for g in profile.gradients] == [("b.weight", 1.333333), ("a.weight", 2.0)]


# ---- torch's DDP plays it, and its reducer agrees on the buckets


def watch_reducer(profile: Profile, cap: float | None, steps: int) -> list:
    """Names in each bucket of torch's DDP, for each step; and whether the gradients are the mean over the ranks."""
    net = dl.paced(profile)
    ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=cap)
    names = {id(p): name for name, p in net.named_parameters()}
    seen = []

    def hook(state, bucket):
        seen[-1].append([names[id(p)] for p in bucket.parameters()])
        tensor = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])

    ddp.register_comm_hook(None, hook)
    for _ in range(steps):
        seen.append([])
        ddp.zero_grad()
        ddp(torch.tensor([1.0 + dist.get_rank()])).backward()
    right = all(torch.equal(p.grad, torch.full_like(p, 1.5)) for p in net.parameters())
    return [seen, right]


@pytest.mark.parametrize("cap", [None, 0.3, 1, 100])
@pytest.mark.parametrize("profile", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_buckets_are_those_of_torch(profile: Profile, cap: float | None) -> None:
    order = sorted if profile is MIXED else list  # half-full buckets of several dtypes come in an order of torch's own
    for seen, right in dl.launch(watch_reducer, profile, cap, 3, ranks=2, device="cpu"):
        assert right
        for step, buckets in enumerate(seen):
            said = [[g.name.replace(".", "_") for g in bucket] for bucket in assign(profile, cap, min(step, 1))]
            assert order(buckets) == order(said), step


@pytest.mark.parametrize("wrapper", ["BucketedDDP", "FlatDDP"])
def test_our_ddps_play_it_too(wrapper: str) -> None:
    def train() -> bool:
        net = dl.paced(PLAIN)
        ddp = getattr(dl, wrapper)(net)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.tensor([1.0 + dist.get_rank()])).backward()
            ddp.finish()
        return all(torch.equal(p.grad, torch.full_like(p, 1.5)) for p in net.parameters())

    assert dl.launch(train, ranks=2, device="cpu") == [True, True]


# ---- the measured timeline


@pytest.mark.parametrize("hook", ["none", "fp16"])
def test_measured_timeline_has_the_predicted_buckets(hook: str) -> None:
    seen = dl.measure_timeline(PLAIN, ranks=2, bucket_cap_mb=0.3, hook=hook, steps=3, device="cpu")
    said = dl.predict_step(PLAIN, ranks=2, bucket_cap_mb=0.3, compression=hook)
    assert seen.basis == "paced" and len(seen.about["steps_s"]) == 3
    assert [b.nbytes for b in seen.buckets] == [b.nbytes for b in said.buckets]
    assert [[n.replace(".", "_") for n in b.names] for b in said.buckets] == [list(b.names) for b in seen.buckets]
    assert all(b.ready_s <= b.start_s <= b.end_s <= seen.done_s + 1e-9 for b in seen.buckets)
    assert seen.compute_end_s >= PLAIN.gradients[-1].ready_s and seen.exposed_s >= 0


def test_a_real_model_and_a_hook_of_ones_own_are_measured() -> None:
    def build():
        torch.manual_seed(0)
        x = torch.randn(8, 6)
        return small(), lambda ddp: ddp(x).sum()

    def nothing(state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    seen = dl.measure_timeline(build, ranks=2, hook=nothing, steps=2, device="cpu")
    assert seen.basis == "measured" and seen.about["compression"] == "nothing"
    assert sum(b.nbytes for b in seen.buckets) == 4 * (35 + 24 + 5)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: dl.measure_timeline(PLAIN, warmup=1), ValueError, "warmup must be a whole number of at least 2"),
        (lambda: dl.measure_timeline(PLAIN, steps=0), ValueError, "steps must be a whole number of at least 1, not 0"),
        (lambda: dl.measure_timeline(PLAIN, hook="zip"), ValueError, "hook is none, fp16"),
        (lambda: dl.measure_timeline(PLAIN, hook=None), ValueError, "hook is none, fp16"),
        (lambda: dl.measure_timeline(PLAIN, bucket_cap_mb=0), ValueError, "bucket_cap_mb, in MiB, is a positive"),
        (lambda: dl.measure_timeline(PLAIN, lanes=0), ValueError, "lanes must be"),
        (lambda: dl.measure_timeline(small()), TypeError, "a function that returns"),
        (lambda: dl.measure_timeline("resnet18"), TypeError, "a function that returns .*, not 'resnet18'"),
        (lambda: dl.calibrate(dtypes="float32"), ValueError, "dtypes is a list of float64"),
        (lambda: dl.calibrate(dtypes=["int8"]), ValueError, r"not \['int8'\]"),
        (lambda: dl.calibrate(sizes=[1000, 1000, 2000]), ValueError, "three different sizes or more"),
        (lambda: dl.calibrate(sizes=[0, 1, 2]), ValueError, "a size, in bytes, must be a whole number of at least 8"),
        (lambda: dl.calibrate(repeats=0), ValueError, "repeats must be"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, call: Callable, error: type[Exception], words: str
) -> None:
    monkeypatch.setattr(sys.modules[dl.launch.__module__], "fork_server", lambda: pytest.fail("ranks were started"))
    with pytest.raises(error, match=words):
        call()


def test_calibrated_costs_price_a_step() -> None:
    """Of a calibration the numbers are the machine's; what the prediction does with them is checked."""
    costs = dl.calibrate(ranks=2, sizes=(20_000, 100_000, 400_000), repeats=2, device="cpu")
    assert set(costs.links) == {"float32", "float16"} and costs.lanes == 2
    for dtype, points in costs.points.items():
        assert [size for size, _ in points] == [20_000, 100_000, 400_000]
        link = costs.links[dtype]
        assert costs.all_reduce_seconds(1e6, dtype) == pytest.approx(dl.ring_seconds(2, 1e6, link))
        assert link.latency_s >= 0 and link.payload_Bps > 0
    t = dl.predict_step(PLAIN, ranks=2, bucket_cap_mb=100, costs=costs)
    b = PLAIN.nbytes
    copies = costs.copy_s_per_byte * b
    assert t.compute_end_s == pytest.approx(PLAIN.backward_s + copies + costs.divide_s_per_byte * b)
    assert t.done_s == pytest.approx(t.compute_end_s + costs.all_reduce_seconds(b, "float32") + copies)
    with pytest.raises(ValueError, match="bfloat16 was not calibrated"):
        costs.all_reduce_seconds(1, "bfloat16")

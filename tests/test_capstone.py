"""The capstone's fit against timelines whose numbers are known, and the calibration of hooks on real ranks."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ddplab as dl
from ddplab.capstone import SENDS_NOTHING
from ddplab.cost import ring_seconds
from ddplab.headline import RESNET50_PARAMETERS
from ddplab.profile import Gradient, Profile
from ddplab.timeline import predict_step

COSTS = dl.Costs(4, {}, 1.5e-10, 1e-10, 3e-10, 1e-10, lanes=2, worst=0.0)
PROFILE = Profile.of([(400_000 * (1 + i % 4), 0.004) for i in range(24)], forward_s=0.05, optimizer_s=0.01)


def known(payload_Bps: float, cast: float) -> tuple[dl.Costs, dl.Compression]:
    link = dl.Link(payload_Bps, latency_s=0.0, wire_efficiency=1.0)
    costs = replace(COSTS, links={"float32": link, "float16": link})
    return costs, dl.Compression("fp16", 0.5, COSTS.cast_s_per_byte, cast, "float16")


def test_a_known_job_is_recovered_and_its_other_runs_are_predicted() -> None:
    """Drawn computing, link and cast; from three of its steps come the three numbers, and the steps of other caps,
    other codecs and another number of ranks."""
    draw = random.Random(4)
    for _ in range(12):
        costs, cast = known(10 ** draw.uniform(7.5, 8.5), draw.choice([0.0, 10 ** draw.uniform(-10, -9)]))
        job = PROFILE.scaled(draw.uniform(0.5, 2))

        def step(how, cap=25.0, lanes=2, job=job, costs=costs) -> float:
            return predict_step(job, costs.ranks, "1gbit", cap, how, costs=costs, lanes=lanes, contention=1.5).step_s

        plain = costs.compression("none")
        fit = dl.fit_step(PROFILE, step(SENDS_NOTHING), step(plain), step(cast), COSTS, contention=1.5)
        assert fit.compute_s == pytest.approx(job.compute_s, rel=1e-6)
        assert fit.link.payload_Bps == pytest.approx(costs.links["float32"].payload_Bps, rel=1e-6)
        assert fit.cast.decode_s_per_byte == pytest.approx(cast.decode_s_per_byte, rel=1e-4, abs=1e-14)
        assert fit.predict("noop").step_s == pytest.approx(step(SENDS_NOTHING), rel=1e-6)
        for cap in (1, 5, 100):
            assert fit.predict("none", cap).step_s == pytest.approx(step(plain, cap), rel=1e-6)
            assert fit.predict("fp16", cap).step_s == pytest.approx(step(cast, cap), rel=1e-6)
        codec = dl.Compression("1-bit", 1 / 32, 5e-10, 2e-10, bucket_s=1e-3)
        on_wire = replace(codec, wire_dtype="float32")
        assert fit.predict(codec).step_s == pytest.approx(step(on_wire, lanes=1), rel=1e-6)


def test_what_the_fit_refuses() -> None:
    with pytest.raises(ValueError, match="nothing is exposed"):
        dl.fit_step(PROFILE, 1.0, 1.0, 0.9, COSTS)
    fit = dl.fit_step(PROFILE, 0.2, 0.6, 0.4, COSTS)
    assert "computing" in str(fit)
    with pytest.raises(ValueError, match="method is none, fp16, noop, a ddplab.HookStages or .*, not 'zip'"):
        fit.predict("zip")


def test_link_for_is_the_inverse_of_the_ring() -> None:
    for ranks in (2, 4, 8, 100):
        link = dl.link_for(1.2, 102_228_128, ranks)
        assert ring_seconds(ranks, 102_228_128, link) == pytest.approx(1.2)
    assert str(dl.link_for(1.2, 102_228_128, 4)) == "1.07 Gbit/s"
    with pytest.raises(ValueError, match="seconds is a positive number"):
        dl.link_for(0, 1, 4)


def test_profiles_survive_a_file(tmp_path: Path) -> None:
    shaped = Profile(
        (Gradient("w", 6, 0.1, 1, "float32", (2, 3)), Gradient("b", 1, 0.1, 0)), 0.1, 0.2, 0.05, source="x"
    )
    dl.save_profile(tmp_path / "p.json", shaped, model="mine")
    again, about = dl.load_profile(tmp_path / "p.json")
    assert again == shaped and about["model"] == "mine" and "date" in about
    assert dl.load_profile(tmp_path / "p.json", compute_s=0.7)[0].compute_s == pytest.approx(0.7)
    assert [f.name for f in tmp_path.iterdir()] == ["p.json"]
    for text in ("", "[]", "{}", '{"about": {}, "profile": {}, "gradients": []}', "\xff", json.dumps({"gradients": 1})):
        (tmp_path / "bad.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match="bad.json is no recorded profile"):
            dl.load_profile(tmp_path / "bad.json")
    with pytest.raises(FileNotFoundError):
        dl.load_profile(tmp_path / "none.json")


def test_the_recorded_resnet50_is_torchvisions() -> None:
    """Names, shapes and places are the model's own, and the order is backward's: the head first, the stem last."""
    from torchvision.models import resnet50

    with torch.device("meta"):
        model = resnet50()
    profile, about = dl.load_profile(Path(__file__).parents[1] / "labs/results/resnet50_profile.json")
    named = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert [(g.name, g.shape) for g in sorted(profile.gradients, key=lambda g: g.position)] == named
    assert profile.gradients[0].name.startswith("fc.") and profile.gradients[-1].name == "conv1.weight"
    assert profile.basis == "measured" and about["machine"]
    assert sum(g.elements for g in profile.gradients) == RESNET50_PARAMETERS


def test_a_thinned_profile_keeps_the_ratio_of_bytes_to_time() -> None:
    small = dl.thinned(PROFILE, 8)
    assert small.nbytes == PROFILE.nbytes // 8 and small.compute_s == pytest.approx(PROFILE.compute_s / 8)
    for link in ("0.1gbit", "1gbit"):
        full = predict_step(PROFILE, 4, dl.Link.parse(link, latency_s=0), 8)
        assert predict_step(small, 4, dl.Link.parse(link, latency_s=0), 1).step_s == pytest.approx(full.step_s / 8)
    assert dl.thinned(Profile((Gradient("b", 3, 0.0, 0, "float32", (3,)),), 0, 1), 8).gradients[0].elements == 1


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"w of shape \(2, 3\) has 6 elements, not 5"):
        Profile((Gradient("w", 5, 0.0, 0, "float32", (2, 3)),), 0, 1)


def test_paced_parameters_have_the_models_shapes() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    recorded = dl.record(model, torch.randn(1, 3, 5, 5), repeats=1)
    for profile in (recorded, dl.assumed_profile(model, torch.randn(1, 3, 5, 5), compute_s=0.01)):
        assert [p.shape for p in dl.paced(profile).parameters()] == [p.shape for p in model.parameters()]


ENCODE_S = 0.02


def slow_hook():
    """Sleeps while it encodes, then sends nothing; counts 100 bytes a bucket."""
    import torch

    class State:
        wire_bytes = 0

    def hook(state, bucket):
        time.sleep(ENCODE_S)
        state.wire_bytes += 100
        assert bucket.parameters()[0].ndim == 2  # the shapes are the profile's
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return State(), hook


def test_a_hooks_costs_are_measured_on_all_ranks() -> None:
    """A sleep lasts at least as long as it was told to: the encoding holds it, whatever the machine does."""
    small = Profile(tuple(Gradient(f"w{i}", 2_000_000, 0.0, i, "float32", (1000, 2000)) for i in range(2)), 0, 0)
    cost = dl.calibrate_hook(slow_hook, small, ranks=2, repeats=1, device="cpu")
    # 5 MiB: two buckets; 25 and 100 MiB: one
    assert cost.encode_s_per_byte * 3 * small.nbytes >= 4 * ENCODE_S
    assert cost.factor == pytest.approx(400 / (3 * small.nbytes))  # the ring of 2 ranks sends each byte once
    assert cost.name == "slow_hook" and cost.decode_s_per_byte >= 0 and cost.bucket_s >= 0
    with pytest.raises(TypeError, match="ddplab.Profile"):
        dl.calibrate_hook(slow_hook, None)


def test_a_hook_is_made_on_each_rank() -> None:
    """`measure_timeline` takes a function that makes (state, hook)."""
    small = PROFILE.scaled(0.02)
    seen = dl.measure_timeline(small, ranks=2, hook=slow_hook_1d, steps=1, device="cpu")
    assert seen.step_s >= len(seen.buckets) * ENCODE_S


def slow_hook_1d():
    state, hook = slow_hook()

    def flat(state, bucket):
        time.sleep(ENCODE_S)
        return dl.noop_hook(state, bucket)

    return state, flat

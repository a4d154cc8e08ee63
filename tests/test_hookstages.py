"""The stages of hooks: bytes against closed forms, times only for what no machine can change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import ddplab as dl
from ddplab.hooks.powersgd import factor_rank
from ddplab.hookstages import BucketStages, HookStages, calibrate_stages
from ddplab.processors import slice_s
from ddplab.profile import Gradient, Profile

SHAPES = [(64, 300), (64,), (200, 50, 3)]
PROFILE = Profile(tuple(Gradient(f"w{i}", math.prod(s), 0.0, i, "float32", s) for i, s in enumerate(SHAPES)), 0.0, 0.0)
RANKS = 2


def stages(*buckets: BucketStages) -> HookStages:
    return HookStages("mine", buckets, 4, 2, 0.1)


def test_a_bucket_of_a_measured_size_is_the_mean_and_others_lie_on_a_line() -> None:
    mine = stages(
        BucketStages(100, 1.0, (2.0, 3.0), (0.5,), (10.0,)),
        BucketStages(100, 3.0, (4.0, 5.0), (1.5,), (20.0,)),
        BucketStages(300, 4.0, (5.0, 8.0), (2.0,), (45.0,)),
    )
    assert mine.at(100) == BucketStages(100, 2.0, (3.0, 4.0), (1.0,), (15.0,))
    assert mine.at(300) == BucketStages(300, 4.0, (5.0, 8.0), (2.0,), (45.0,))
    between = mine.at(200)
    assert between.encode_s == pytest.approx(3.0) and between.work_s == pytest.approx((4.0, 6.0))
    assert between.loopback_s == pytest.approx((1.5,)) and between.sent == pytest.approx((30.0,))
    assert stages(BucketStages(100, 1.0, (0.0, 2.0), (0.0,), (10.0,))).at(50).work_s == (0.0, 1.0)
    falling = stages(BucketStages(1, 0.0, (3.0, 0.0), (0.0,), (1.0,)), BucketStages(2, 0.0, (1.0, 0.0), (0.0,), (2.0,)))
    assert falling.at(4).work_s[0] == 0.0  # no time is negative


def test_a_transfer_takes_what_its_bytes_take_or_what_it_takes_without_a_link() -> None:
    mine = stages(BucketStages(100, 1.0, (2.0, 3.0, 4.0), (0.5, 7.0), (10.0, 20.0)))
    job = mine.job(["g"], 100, payload_Bps=10)
    assert job.transfer_s == (1.0, 7.0) and job.work_s == (2.0, 3.0, 4.0) and job.encode_s == 1.0


@pytest.fixture(scope="module")
def measured() -> dict[str, HookStages]:
    hooks = {"powersgd": dl.powersgd, "onebit": dl.onebit, "hierarchical": two_level}
    return {
        name: calibrate_stages(make, PROFILE, RANKS, name=name, caps_mb=(5,), repeats=1) for name, make in hooks.items()
    }


def two_level():
    return dl.Hierarchical([[0], [1]]), dl.hierarchical_hook


def test_powersgd_sends_twice_and_works_three_times(measured: dict[str, HookStages]) -> None:
    """The bytes are those of the paper: P and what travels as it is, then Q; one value more says that all is well."""
    (bucket,) = measured["powersgd"].buckets
    matrices = [(s[0], math.prod(s[1:]), r) for s in SHAPES if (r := factor_rank(s, 4))]
    assert matrices == [(64, 300, 4), (200, 150, 4)]
    first, second = sum(rows * r for rows, _, r in matrices) + 64 + 1, sum(cols * r for _, cols, r in matrices)
    assert bucket.sent == (4.0 * first, 4.0 * second)  # the ring of two ranks sends each byte once
    assert len(bucket.work_s) == 3 and len(bucket.loopback_s) == 2
    assert bucket.encode_s > 0 and bucket.work_s[1] > 0 and min(bucket.loopback_s) > 0
    assert "in 2 transfers" in str(measured["powersgd"])


def test_onebit_sends_two_phases(measured: dict[str, HookStages]) -> None:
    """To the other rank goes half of the bits, and the mean of one's own half: each with a scale and padding."""
    (bucket,) = measured["onebit"].buckets
    bits = PROFILE.nbytes / 4 / 8 / RANKS
    assert len(bucket.sent) == 2 and all(bits <= sent <= bits + 32 for sent in bucket.sent)
    assert bucket.nbytes == PROFILE.nbytes and bucket.work_s[1] > 0


def test_an_exchange_past_the_wire_is_one_transfer(measured: dict[str, HookStages]) -> None:
    (bucket,) = measured["hierarchical"].buckets
    assert bucket.sent == (0.0,) and bucket.work_s == (0.0, 0.0) and bucket.loopback_s[0] > 0


def test_what_shares_the_processors_is_written_down(measured: dict[str, HookStages]) -> None:
    one = measured["onebit"]
    assert one.ranks == RANKS and one.processors >= 1 and one.slice_s == slice_s(realtime=False)


def test_other_hooks_are_refused() -> None:
    with pytest.raises(TypeError, match="ddplab.Profile"):
        calibrate_stages(dl.onebit, None)
    with pytest.raises(ValueError, match="repeats"):
        calibrate_stages(dl.onebit, PROFILE, repeats=0)
    with pytest.raises(dl.RankError, match="stages are those of a hook of ddplab"):
        calibrate_stages(lambda: (None, dl.noop_hook), PROFILE, RANKS)


COSTS = dl.Costs(4, {}, 1.5e-10, 1e-10, 3e-10, 1e-10, lanes=2, worst=0.0)
JOB = Profile.of([(400_000 * (1 + i % 4), 0.004) for i in range(24)], forward_s=0.05, optimizer_s=0.01)


def test_a_hook_of_one_stage_is_predicted_as_its_encoder_and_decoder() -> None:
    """With processors for everybody, where nothing but the bytes and their seconds counts."""
    fit = dl.fit_step(JOB, 0.2, 0.6, 0.4, COSTS, contention=1.0)
    how = dl.Compression("mine", 0.25, 5e-10, 2e-10)
    for cap in (1, 5, 100):
        sizes = [b.nbytes for b in fit.predict(how, cap).buckets]
        rows = [BucketStages(n, 5e-10 * n, (0.0, 2e-10 * n), (0.0,), (0.25 * 1.5 * n,)) for n in sizes]
        staged = HookStages("mine", tuple(rows), 4, None, 0.1)
        old, new = fit.predict(how, cap), fit.predict(staged, cap)
        assert new.step_s == pytest.approx(old.step_s) and new.exposed_s == pytest.approx(old.exposed_s)
        assert [b.nbytes for b in new.buckets] == sizes and new.about["compression"] == "mine"
        for a, b in zip(new.buckets, old.buckets, strict=True):
            assert (a.ready_s, a.start_s, a.end_s) == pytest.approx((b.ready_s, b.start_s, b.end_s))
        slower = fit.predict(replace(staged, processors=2), cap).step_s
        assert slower >= new.step_s  # four ranks on two processors

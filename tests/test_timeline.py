"""The timeline against hand calculations and torch's own reducer."""

from __future__ import annotations

import math
import random

import pytest

import ddplab as dl
from ddplab.lanes import Parcel, run_lanes
from ddplab.profile import Gradient, Profile
from ddplab.timeline import MIB, MOST_JITTER, Compression, assign, best_bucket_cap, predict_step, slowest_of

LINK = dl.Link(1e6, latency_s=0.0, wire_efficiency=1.0)  # 1 MB/s of payload, no latency: round numbers
FOUR = dl.Topology(4, 1, LINK)


def layers(*seconds: float, elements: int = 250_000) -> Profile:
    """1 MB a layer, backward seconds in the order of backward."""
    return Profile.of([(elements, s) for s in reversed(seconds)], forward_s=0.5)


# ---- closed forms: 1 MB buckets, each 2 * 3/4 = 1.5 s on the link of four ranks


def test_one_bucket_hides_nothing() -> None:
    t = predict_step(layers(1, 1, 1), bucket_cap_mb=100, topology=FOUR)
    assert len(t.buckets) == 1
    assert (t.compute_end_s, t.done_s, t.exposed_s) == pytest.approx((3, 3 + 4.5, 4.5))
    assert t.step_s == pytest.approx(0.5 + 7.5)
    assert t.hidden == pytest.approx(0)


def test_buckets_queue_in_one_lane() -> None:
    """Ready at 1, 2, 3; each takes 1.5: they end at 2.5, 4, 5.5."""
    t = predict_step(layers(1, 1, 1), bucket_cap_mb=0.5, topology=FOUR)
    assert [b.ready_s for b in t.buckets] == pytest.approx([1, 2, 3])
    assert [b.start_s for b in t.buckets] == pytest.approx([1, 2.5, 4])
    assert [b.end_s for b in t.buckets] == pytest.approx([2.5, 4, 5.5])
    assert [b.wait_s for b in t.buckets] == pytest.approx([0, 0.5, 1])
    assert t.exposed_s == pytest.approx(2.5)
    assert t.communication_s == pytest.approx(4.5)
    assert t.hidden == pytest.approx(2 / 4.5)
    assert t.buckets[0].names == ("layer2.weight",)
    assert t.frame().exposed_ms.sum() == pytest.approx(2500)


def test_only_the_last_bucket_is_exposed_where_the_link_is_fast() -> None:
    t = predict_step(layers(1, 1, 1), bucket_cap_mb=0.5, topology=dl.Topology(4, 1, dl.Link(1e7, 0.0, 1.0)))
    assert t.exposed_s == pytest.approx(0.15)


def test_compression_costs_and_saves() -> None:
    """Half the bytes: 0.75 s; encoding 0.1 s a MB stands in the compute lane, decoding 0.2 s at the transfer's end."""
    how = Compression("half", 0.5, 0.1e-6, 0.2e-6)
    t = predict_step(layers(1, 1), bucket_cap_mb=0.5, topology=FOUR, compression=how)
    assert [b.ready_s for b in t.buckets] == pytest.approx([1, 2.1])
    assert [b.start_s for b in t.buckets] == pytest.approx([1.1, 2.2])
    assert [b.end_s for b in t.buckets] == pytest.approx([1.1 + 0.95, 2.2 + 0.95])
    assert t.compute_end_s == pytest.approx(2.2)


def test_compute_slows_down_while_communication_runs() -> None:
    """Factor 2. Layer 1: 1 s. Its transfer runs from 1 to 2.5, in which compute does 0.75 of layer 2; done at 2.75."""
    t = predict_step(layers(1, 1), bucket_cap_mb=0.5, topology=FOUR, slowdown=2)
    assert [b.ready_s for b in t.buckets] == pytest.approx([1, 2.75])
    assert t.done_s == pytest.approx(2.75 + 1.5)


def test_encoding_and_decoding_want_the_same_processors() -> None:
    """Layer 1: ready at 1, encoded until 2, sent until 2.75, then 0.75 s of decoding. Layer 2 is ready at 3: the 0.5 s
    of decoding that are left take 1 s beside its encoding, which has 0.5 s left at 4 and ends at 4.5, not at 4."""
    step = {"bucket_cap_mb": 0.5, "topology": FOUR, "compression": Compression("half", 0.5, 1e-6, 0.75e-6)}
    apart, together = (predict_step(layers(1, 1), **step, contention=c) for c in (1, 2))
    assert [b.end_s for b in apart.buckets] == pytest.approx([3.5, 4 + 1.5])
    assert [b.end_s for b in together.buckets] == pytest.approx([4, 4.5 + 1.5])
    assert (apart.compute_end_s, together.compute_end_s) == pytest.approx((4, 4.5))
    assert together.buckets[1].ready_s == apart.buckets[1].ready_s == pytest.approx(3)


def test_two_lanes_share_the_link() -> None:
    """Both ready at 1 and 2: alone until 2 (1 of 1.5 s left 0.5), then halves: first ends at 3, second at 4."""
    t = predict_step(layers(1, 1), bucket_cap_mb=0.5, topology=FOUR, lanes=2)
    assert [b.start_s for b in t.buckets] == pytest.approx([1, 2])
    assert [b.end_s for b in t.buckets] == pytest.approx([3, 4])


def test_jitter_waits_for_the_slowest() -> None:
    plain = predict_step(layers(1, 1), topology=FOUR)
    noisy = predict_step(layers(1, 1), topology=FOUR, jitter=0.1)
    assert plain.band_s is None
    assert noisy.band_s[0] < noisy.step_s < noisy.band_s[1]
    assert noisy.compute_end_s == pytest.approx(2 * (1 + 0.1 * slowest_of(4)))
    assert slowest_of(1) == 0
    draws = random.Random(1)
    for n in (2, 8, 100):
        sample = sorted(max(draws.gauss(0, 1) for _ in range(n)) for _ in range(4000))
        assert slowest_of(n) == pytest.approx(sample[2000], abs=4 * 1.2533 / math.sqrt(4000))  # 4 standard errors


def test_one_rank_communicates_nothing() -> None:
    t = predict_step(layers(1, 1), ranks=1, link="1gbit")
    assert t.exposed_s == 0 and t.step_s == pytest.approx(2.5) and t.hidden == 1.0


def test_two_level_ring() -> None:
    """2 hosts of 2 ranks, 1 MB: inside 2 (1/2) 1 MB at 10 MB/s, across 2 (1/2) 1 MB at 1 MB/s."""
    topology = dl.Topology(2, 2, LINK, dl.Link(1e7, 0.0, 1.0))
    t = predict_step(layers(1), topology=topology)
    assert t.communication_s == pytest.approx(0.1 + 1.0)
    said = dl.predict(dl.hierarchical(2, 2), 1_000_000, topology).seconds
    assert t.communication_s == pytest.approx(said)


def test_random_timelines_obey_the_bounds() -> None:
    """Never faster than compute or communication alone, never slower than both one after the other."""
    draw = random.Random(2)
    for _ in range(60):
        sizes = [draw.randint(1, 800_000) for _ in range(draw.randint(1, 30))]
        profile = Profile.of([(n, draw.random()) for n in sizes], forward_s=draw.random())
        step = {"topology": FOUR, "bucket_cap_mb": draw.choice([0.1, 1, 5]), "lanes": draw.choice([1, 2])}
        t = predict_step(profile, **step)
        alone = 1.5 * profile.nbytes / 1e6
        assert max(profile.backward_s, alone) - 1e-9 <= t.done_s <= profile.backward_s + alone + 1e-9
        assert t.communication_s == pytest.approx(alone)
        assert all(b.ready_s <= b.start_s <= b.end_s for b in t.buckets)
        assert sum(b.nbytes for b in t.buckets) == profile.nbytes
        assert predict_step(profile, **step, slowdown=1.3).done_s >= t.done_s - 1e-9


def test_a_bucket_waits_for_those_before_it() -> None:
    """Bucket 0 is complete only when the second gradient is there; bucket 1, complete earlier, must not overtake."""
    a, b, c = (Gradient(name, 1, 0.0, i) for i, name in enumerate("abc"))
    parcels = [Parcel([a, c], 1, 0, 1.0, 0), Parcel([b], 1, 0, 1.0, 0)]
    lanes = run_lanes([(a, 1.0), (b, 2.0), (c, 3.0)], 4.0, parcels)
    assert (lanes.ready, lanes.start, lanes.end) == ([3, 2], [3, 4], [4, 5])


# ---- bucket size


def test_best_bucket_cap_is_the_smallest_step() -> None:
    profile = layers(*[0.1] * 40)
    slow = dl.Topology(4, 1, dl.Link(2e7, latency_s=5e-3, wire_efficiency=1.0))
    best, frame = best_bucket_cap(profile, topology=slow)
    assert frame.set_index("bucket_cap_mb").step_ms[best] == pytest.approx(frame.step_ms.min(), rel=1e-4)
    assert 0.5 < best < 200  # latency punishes the small ones, the tail the large ones
    assert list(frame.columns) == ["bucket_cap_mb", "buckets", "communication_ms", "exposed_ms", "step_ms"]


# ---- buckets as torch fills them (torch's own reducer says so in test_paced.py)


def test_iteration_0_is_one_bucket() -> None:
    profile = layers(1, 1, 1)
    (only,) = assign(profile, 0.5, iteration=0)
    assert [g.name for g in only] == ["layer0.weight", "layer1.weight", "layer2.weight"]
    t = predict_step(profile, bucket_cap_mb=0.5, topology=FOUR, iteration=0)
    assert len(t.buckets) == 1 and t.exposed_s == pytest.approx(4.5)


def test_resnet50_has_the_five_buckets_of_the_claim() -> None:
    """C13: 7.82 / 30.04 / 25.04 / 25.32 / 9.27 MiB from iteration 1, one of 97.5 MiB in iteration 0."""
    torchvision = pytest.importorskip("torchvision", reason="the sizes of ResNet-50 come from torchvision")
    parameters = list(torchvision.models.resnet50().named_parameters())
    profile = Profile.of([(p.numel(), 1e-3) for _, p in parameters])
    sizes = [sum(g.nbytes for g in bucket) / MIB for bucket in assign(profile)]
    assert [round(size, 2) for size in sizes] == [7.82, 30.04, 25.04, 25.32, 9.27]
    assert round(sum(g.nbytes for g in assign(profile, iteration=0)[0]) / MIB, 1) == 97.5


# ---- bad input


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: predict_step(p, bucket_cap_mb=0), "bucket_cap_mb, in MiB, is a positive number, not 0"),
        (lambda p: predict_step(p, bucket_cap_mb=math.nan), "bucket_cap_mb"),
        (lambda p: predict_step(p, link="fast"), "fast"),
        (lambda p: predict_step(p, compression="zip"), "compression is none, fp16"),
        (lambda p: predict_step(p, slowdown=0.5), "slowdown is a number, 1 or more"),
        (lambda p: predict_step(p, contention=0.5), "contention is a number, 1 or more"),
        (lambda p: predict_step(p, jitter=-1), "jitter is a number, from 0 to 0.5, not -1"),
        (lambda p: predict_step(p, ranks=1, jitter=0.7), "jitter is a number, from 0 to 0.5"),  # less than no time
        (lambda p: predict_step(p, slowdown=True), "slowdown is a number, 1 or more, not True"),
        (lambda p: predict_step(p, bucket_cap_mb=True), "bucket_cap_mb, in MiB, is a positive number"),
        (lambda p: predict_step(p, bucket_cap_mb="25"), "bucket_cap_mb, in MiB, is a positive number, not '25'"),
        (lambda p: predict_step(p, ranks=2.5), "at least 1, not 2.5"),
        (lambda p: predict_step(p, link=5), "is not a rate"),
        (lambda p: predict_step(p, compression=None), "compression is none, fp16 or a ddplab.Compression, not None"),
        (lambda p: Compression("lossy", -0.5), "a compression's factor is a number, 0 or more, not -0.5"),
        (lambda p: Compression("slow", 0.5, math.inf), "a compression's encode_s_per_byte"),
        (lambda p: best_bucket_cap(p, 25), "caps_mb is a list of numbers of MiB"),
        (lambda p: best_bucket_cap(p, [25, 0]), "bucket_cap_mb, in MiB, is a positive number, not 0"),
        (lambda p: predict_step(p, ranks=0), "at least 1, not 0"),
        (lambda p: predict_step(p, lanes=-1), "lanes must be a whole number of at least 1"),
        (lambda p: predict_step(p, iteration=7), "iteration is 0"),
        (lambda p: predict_step(p, ranks=3, topology=FOUR), "the topology has 4"),
        (lambda p: best_bucket_cap(p, []), "at least one bucket_cap_mb"),
        (lambda p: p.scaled(0), "positive factor"),
        (lambda p: Profile((), 0, 1), "without gradients"),
        (lambda p: Profile(p.gradients, -1, 3), "forward_s"),
        (lambda p: Profile(p.gradients, 0, 0.5), "layer2.weight is ready at"),
        (lambda p: Profile.of([(0, 1.0)]), "layer 0's elements must be a whole number of at least 1, not 0"),
        (lambda p: Profile.of([(9, 1.0), (2.5, 1.0)]), "layer 1's elements must be a whole number"),
        (lambda p: Profile.of([(9, 1.0), (9, -1.0)]), "layer 1's backward seconds is a number, 0 or more, not -1.0"),
        (lambda p: Profile.of([9, 9]), r"layer 1 is \(elements, backward seconds\), not 9"),
        (lambda p: Profile.of([]), "without gradients"),
        (lambda p: Profile.of(7), "layers are pairs"),
        (lambda p: Profile((("w", 1, 0.0),), 0, 1), "gradients are ddplab.Gradient rows, not"),
        (lambda p: Profile((Gradient("w", "1", 0.0, 0),), 0, 1), "w's elements must be a whole number"),
        (lambda p: Profile((Gradient("w", 1, math.nan, 0),), 0, 1), "w is ready at nan s"),
        (lambda p: Profile((Gradient("w", 1, None, 0),), 0, 1), "w is ready at None s"),
        (lambda p: Profile((Gradient("w", 1, 0.0, 0, "int8"),), 0, 1), "w is 'int8'"),
    ],
)
def test_bad_input_is_named(call, words) -> None:
    with pytest.raises(ValueError, match=words):
        call(layers(1, 1, 1))


def test_a_name_is_not_a_profile() -> None:
    with pytest.raises(TypeError, match=r"predict_step takes a ddplab.Profile \(record, assumed_profile\), not str"):
        predict_step("resnet50")
    with pytest.raises(TypeError, match="buckets are filled from a ddplab.Profile .*, not from a str"):
        dl.BucketFigure("resnet50")
    with pytest.raises(TypeError, match="timeline is a ddplab.Timeline"):
        dl.OverlapFigure(timeline="measured")
    with pytest.raises(TypeError, match="topology is a ddplab.Topology or Hosts, not '4 hosts'"):
        predict_step(layers(1, 1), topology="4 hosts")
    with pytest.raises(TypeError, match="costs is what ddplab.calibrate returns, not 50"):
        predict_step(layers(1, 1), costs=50)


def test_the_widest_jitter_still_takes_time() -> None:
    for n in (1, 2, 1024):
        t = predict_step(layers(1, 1, 1), n, "100gbit", jitter=MOST_JITTER)
        assert 0 < t.band_s[0] <= t.step_s <= t.band_s[1]

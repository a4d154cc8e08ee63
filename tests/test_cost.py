"""The cost model against closed forms, link names against arithmetic, fits against points of known origin."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddplab.cost import (
    EMULATED_BURST_BYTES,
    FIELD_LINKS,
    Link,
    Topology,
    fit,
    predict,
    ring_seconds,
)
from ddplab.schedule import Schedule, chain, direct, halving_doubling, hierarchical, ring, star, tree

S = 5_040_000  # divides by every number of ranks and chunks below
ALPHA, RATE = 3e-4, 2e8
PLAIN = Link(RATE, latency_s=ALPHA, wire_efficiency=1.0)


def seconds(schedule: Schedule, nbytes: int = S, link: Link = PLAIN) -> float:
    return predict(schedule, nbytes, Topology(schedule.ranks, link=link)).seconds


# ---- closed forms, one rank a host


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_closed_forms(n):
    log = math.ceil(math.log2(n))
    assert seconds(ring(n)) == pytest.approx(2 * (n - 1) * (ALPHA + S / (n * RATE)))
    assert seconds(star(n)) == pytest.approx(2 * (ALPHA + (n - 1) * S / RATE))
    assert seconds(direct(n)) == pytest.approx(2 * (ALPHA + (n - 1) / n * S / RATE))
    assert seconds(tree(n)) == pytest.approx(2 * log * (ALPHA + S / RATE))
    assert seconds(chain(n, chunks=7)) == pytest.approx(2 * (7 + n - 2) * (ALPHA + S / 7 / RATE))


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_halving_doubling_in_closed_form(n):
    assert seconds(halving_doubling(n), S * 4) == pytest.approx(
        2 * math.log2(n) * ALPHA + 2 * (n - 1) / n * S * 4 / RATE
    )


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
def test_ring_seconds_is_what_predict_sums_up(n):
    link = Link.parse("1gbit", latency_s=2e-4)
    assert ring_seconds(n, 64 * S, link) == pytest.approx(seconds(ring(n), 64 * S, link))


def test_without_latency_star_costs_n_rings_and_a_chain_n_over_n_minus_1():
    free = Link(RATE, latency_s=0, wire_efficiency=1.0)
    for n in (2, 4, 8):
        assert seconds(star(n), link=free) / seconds(ring(n), link=free) == pytest.approx(n)
    # at 8 ranks the default chain has 72 chunks; filling 6 hops adds 6 / 72 to the ideal
    ratio = seconds(chain(8), link=free) / seconds(ring(8), link=free)
    assert ratio == pytest.approx(8 / 7 * (1 + 1 / 12))


def test_published_figures():
    """Claims C27 and C66: alpha 5 us, 10 GB/s, 64 ranks; ResNet-50's 102.2 MB on 8 ranks."""
    link, resnet50 = Link(10e9, latency_s=5e-6, wire_efficiency=1.0), 4 * 25_557_032
    assert ring_seconds(64, 100e3, link) == pytest.approx(650e-6, rel=0.005)
    assert ring_seconds(64, resnet50, link) == pytest.approx(20.8e-3, rel=0.005)
    for rate, ms in ((1.25e9, 143), (3.125e9, 57), (1.49e9, 120)):
        assert ring_seconds(8, resnet50, Link(rate, 0, 1.0)) * 1e3 == pytest.approx(ms, abs=0.5)


def test_a_hundred_thousand_ranks():
    assert ring_seconds(100_000, 102_400_000, PLAIN) == pytest.approx(2 * 99_999 * (ALPHA + 1024 / RATE))
    assert predict(tree(100_000), S, Topology(100_000, link=PLAIN)).seconds == pytest.approx(34 * (ALPHA + S / RATE))


def test_a_thousand_ranks_send_what_the_formula_says():
    found = predict(ring(1024), 102_400_000, Topology(1024, link=PLAIN))
    assert set(found.bytes_sent.tolist()) == {2 * 1023 * 100_000}
    assert found.seconds == pytest.approx(ring_seconds(1024, 102_400_000, PLAIN))


# ---- bytes


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_bytes_sent_in_closed_form(n):
    def sent(schedule: Schedule) -> list[int]:
        found = predict(schedule, S, Topology(n))
        assert all(isinstance(load, int) for load in found.bytes_per_link.values())
        ups = [found.bytes_per_link["host", i, "up"] for i in range(n)]
        assert ups == found.bytes_sent.tolist()
        assert sum(ups) == sum(found.bytes_per_link["host", i, "down"] for i in range(n))
        return ups

    assert sent(ring(n)) == sent(direct(n)) == [2 * (n - 1) * S // n] * n
    assert sent(star(n)) == [(n - 1) * S] + [S] * (n - 1)
    assert sent(chain(n)) == [S] + [2 * S] * (n - 2) + [S]
    assert sum(sent(tree(n))) == 2 * (n - 1) * S


def test_sizes_that_do_not_divide_are_exact():
    for nbytes, itemsize in ((5, 1), (20, 4), (0, 4), (4, 4), (1_000_003, 1), (4 * 1_000_003, 4)):
        found = predict(ring(4), nbytes, Topology(4), itemsize=itemsize)
        cuts = [nbytes // itemsize * i // 4 * itemsize for i in range(5)]
        sizes = np.diff(cuts)
        # each chunk travels 2 (n - 1) hops
        assert found.bytes_sent.sum() == 6 * nbytes
        assert found.bytes_sent.tolist() == [
            int(sum(sizes[t.chunk] for t in ring(4).transfers if t.src == r)) for r in range(4)
        ]
    # 2 elements on 4 ranks: chunks of 0, 1, 0, 1 elements, and each step still carries some
    few = predict(ring(4), 2, Topology(4, link=PLAIN))
    assert few.seconds == pytest.approx(6 * (ALPHA + 1 / RATE))


def test_nothing_to_send_costs_nothing():
    empty = predict(ring(4), 0, Topology(4))
    assert empty.seconds == 0 and empty.bytes_sent.tolist() == [0] * 4
    assert empty.busiest_over_mean == 1.0 and math.isnan(empty.algbw_GBps)
    for builder in (ring, star, chain, direct, tree, halving_doubling):
        alone = predict(builder(1), S, Topology(1))
        assert alone.seconds == 0 and alone.bytes_sent.tolist() == [0] and len(alone.step_seconds) == 0
        assert "busiest" in repr(alone)
    # a chain of 24 chunks with 5 bytes: only the steps of the 5 chunks that hold one cost
    chunks = [c for c in range(24) if 5 * (c + 1) // 24 > 5 * c // 24]
    steps = {(phase, c + hop) for phase in (0, 1) for c in chunks for hop in range(3)}
    assert seconds(chain(4), 5) == pytest.approx(len(steps) * (ALPHA + 1 / RATE))


def test_busiest_link():
    # star on 4: rank 0's links carry 3 S each way, the six others S
    found = predict(star(4), S, Topology(4))
    assert found.busiest == ("host", 0, "up") and found.busiest_over_mean == pytest.approx(3 / (12 / 8))
    assert predict(ring(4), S, Topology(4)).busiest_over_mean == 1.0


def test_bandwidths_as_nccl_tests_defines_them():
    found = predict(ring(4), S, Topology(4, link=Link(RATE, 0, 1.0)))
    assert found.algbw_GBps == pytest.approx(S / found.seconds / 1e9)
    assert found.busbw_GBps == pytest.approx(RATE / 1e9)  # a ring without latency keeps every link busy


# ---- several ranks a host


def test_ranks_of_one_host_do_not_load_its_link():
    found = predict(hierarchical(3, 4), 12 * S, Topology(3, 4, link=PLAIN))
    per_host = 2 * (3 - 1) * 12 * S // 3  # 2 (hosts - 1) / hosts of the buffer
    assert found.bytes_per_link == {("host", i, way): per_host for i in range(3) for way in ("up", "down")}
    assert found.seconds == pytest.approx(4 * ALPHA + per_host / RATE)
    # each rank also sends 2 * 3 / 4 of the buffer inside its host
    assert found.bytes_sent.tolist() == [2 * 3 * 12 * S // 4 + per_host // 4] * 12


def test_a_flat_ring_crosses_each_host_once():
    found = predict(ring(8), S, Topology(2, 4, link=PLAIN))
    assert found.seconds == pytest.approx(ring_seconds(8, S, PLAIN))
    assert found.bytes_per_link["host", 0, "up"] == 14 * S // 8


def test_inner_links_are_priced_where_they_exist():
    inner = Link(4 * RATE, latency_s=ALPHA / 4, wire_efficiency=0.5)
    found = predict(hierarchical(2, 2), S, Topology(2, 2, link=PLAIN, inner_link=inner))
    inside = ALPHA / 4 + S / 2 / (2 * RATE)  # half the buffer in a step, at the inner payload rate
    across = ALPHA + S / 2 / RATE  # two rings of a quarter each share the host's link
    assert found.step_seconds.tolist() == pytest.approx([inside, across, across, inside])
    assert found.bytes_per_link["rank", 3, "down"] == S
    one_host = predict(ring(4), S, Topology(1, 4, link=PLAIN, inner_link=PLAIN))
    assert one_host.seconds == pytest.approx(ring_seconds(4, S, PLAIN))
    assert predict(ring(4), S, Topology(1, 4, link=PLAIN)).seconds == 0


def test_a_step_that_crosses_and_stays_costs_the_slower_of_both():
    slow_inside = Link(RATE / 10, latency_s=2 * ALPHA, wire_efficiency=1.0)
    found = predict(ring(4), S, Topology(2, 2, link=PLAIN, inner_link=slow_inside))
    assert found.seconds == pytest.approx(ring_seconds(4, S, slow_inside))


# ---- the token bucket


def test_an_idle_link_lets_one_burst_through_at_once():
    link = Link(RATE, latency_s=ALPHA, wire_efficiency=0.9, burst_bytes=100_000)
    rate, burst = RATE * 0.9, 90_000
    # two ranks, one step each way over different links, whose buckets are both full
    assert seconds(star(2), 50_000, link) == pytest.approx(2 * ALPHA)
    assert seconds(star(2), 290_000, link) == pytest.approx(2 * (ALPHA + (290_000 - burst) / rate))


def test_a_busy_link_gains_one_burst_and_its_own_idle_time():
    # a chunk takes longer than alpha refills, so after the first step alpha is hidden in what the bucket gained
    n, link = 4, Link(RATE, latency_s=ALPHA, wire_efficiency=1.0, burst_bytes=128_000)
    assert S / n > RATE * ALPHA and RATE * ALPHA < 128_000
    assert seconds(ring(n), S, link) == pytest.approx(ALPHA + (2 * (n - 1) * S / n - 128_000) / RATE)


def test_a_bucket_never_holds_more_than_its_burst():
    n, burst = 4, 1000
    link = Link(RATE, latency_s=1.0, wire_efficiency=1.0, burst_bytes=burst)
    assert seconds(ring(n), S, link) == pytest.approx(2 * (n - 1) * (1.0 + (S / n - burst) / RATE))


def test_a_vanishing_burst_changes_nothing():
    for schedule in (ring(4), star(4), chain(4), direct(4), tree(5), halving_doubling(8)):
        tiny = Link(RATE, latency_s=ALPHA, wire_efficiency=1.0, burst_bytes=1e-9)
        assert seconds(schedule, S, tiny) == pytest.approx(seconds(schedule), rel=1e-9)


def test_emulated_links_have_the_burst_and_hosts_are_taken_for_a_topology():
    link = Link.parse("1gbit")
    assert link.burst_bytes == 0 and link.emulated().burst_bytes == EMULATED_BURST_BYTES == 131_072
    assert Link(1e8, burst_bytes=5).emulated().burst_bytes == 5

    class Hosts:
        topology = Topology(4, link=link.emulated())

    assert predict(ring(4), S, Hosts()).seconds == predict(ring(4), S, Hosts.topology).seconds


# ---- links and topologies


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1gbit", 125e6),
        ("1 gbps", 125e6),
        ("1Gbit/s", 125e6),
        ("10 Gbit/s", 1.25e9),
        ("100mbit", 12.5e6),
        ("800 kbit/s", 100e3),
        ("2.5Gb/s", 312.5e6),
        ("1 Gbits/s", 125e6),
        ("9600 bit/s", 1200),
        ("10GbE", 1.25e9),
        ("10gbe", 1.25e9),
        ("25GB/s", 25e9),
        ("100 MB/s", 100e6),
        ("100 mB/s", 100e6),
        ("100 Mb/s", 12.5e6),
        ("3 GBps", 3e9),
        ("3 gigs", None),
        ("1.5 MiB/s", 1.5 * 2**20),
        ("8 Gibit/s", 2**30),
        ("1e9 bit/s", 125e6),
        (" 1gbit ", 125e6),
        ("fast", None),
        ("", None),
        ("-1gbit", None),
        ("0", None),
        ("0gbit", None),
        ("1", None),
        ("1g", None),
        ("25GB", None),
        ("gbit", None),
        ("1 gbit fast", None),
        ("1,5gbit", None),
        ("nangbit", None),
        ("infgbit", None),
        ("1e999gbit", None),
        ("1 ibit", None),
        (None, None),
        (1e9, None),
    ],
)
def test_parse(text, rate):
    if rate is not None:
        link = Link.parse(text)
        assert link.rate_Bps == pytest.approx(rate) and str(link) == text.strip()
        assert link.payload_Bps == pytest.approx(rate * 1448 / 1514)
        return
    with pytest.raises(ValueError, match="is not a rate") as error:
        Link.parse(text)
    message = str(error.value)
    assert repr(text) in message and "1gbit" in message and "25GB/s" in message
    assert message.count(". ") == 0 and "\n" not in message


def test_parse_takes_the_other_fields_and_links():
    link = Link.parse("1gbit", latency_s=1e-3)
    assert link.latency_s == 1e-3 and Link.parse(link) == link
    assert Link.parse(link, latency_s=0.5).latency_s == 0.5


@pytest.mark.parametrize(
    "fields",
    [
        {"rate_Bps": 0},
        {"rate_Bps": -1.0},
        {"rate_Bps": math.inf},
        {"rate_Bps": math.nan},
        {"rate_Bps": "1gbit"},
        {"rate_Bps": None},
        {"rate_Bps": True},
        {"rate_Bps": 1.0, "latency_s": -1},
        {"rate_Bps": 1.0, "wire_efficiency": 0},
        {"rate_Bps": 1.0, "wire_efficiency": 1.1},
        {"rate_Bps": 1.0, "burst_bytes": -1},
    ],
)
def test_impossible_links_are_refused(fields):
    with pytest.raises(ValueError, match=f"A link's {list(fields)[-1]} must be"):
        Link(**fields)


def test_topologies():
    topology = Topology(2, 4, link="10gbit", inner_link="25GB/s")
    assert topology.ranks == 8 and topology.link.rate_Bps == 1.25e9 and topology.inner_link.rate_Bps == 25e9
    assert Topology() == Topology(4, 1, Link.parse("1gbit"))
    for bad in ({"hosts": 0}, {"hosts": 2.5}, {"ranks_per_host": -1}, {"ranks_per_host": "2"}):
        with pytest.raises(ValueError, match=f"A topology's {next(iter(bad))} must be a whole number"):
            Topology(**bad)
    with pytest.raises(ValueError, match="'fast' is not a rate"):
        Topology(4, link="fast")


def test_field_links_keep_to_their_sources():
    """Claim C08: NCCL counts 80, 80, 82 and 80% of nominal NVLink; measured 235 of 300 and 368 of 450 GB/s."""
    shares = [FIELD_LINKS[f"nvlink-{gpu}"].wire_efficiency for gpu in ("v100", "a100", "h100", "b200")]
    assert shares == pytest.approx([0.80, 0.80, 0.824, 0.802])
    assert FIELD_LINKS["nvlink-a100"].rate_Bps == 300e9 and FIELD_LINKS["nvlink-h100"].rate_Bps == 450e9
    assert FIELD_LINKS["25gbe"].rate_Bps == Link.parse("25gbe").rate_Bps


def test_predict_refuses_what_does_not_fit():
    for call, message in (
        (lambda: predict(ring(8), S, Topology(4)), r"ring is for 8 ranks, but the topology has 4 \(4 hosts x 1\)"),
        (lambda: predict(ring(4), -1, Topology(4)), "nbytes must be a whole number of at least 0, not -1"),
        (lambda: predict(ring(4), 1.5, Topology(4)), "nbytes must be a whole number"),
        (lambda: predict(ring(4), "1M", Topology(4)), "nbytes must be a whole number"),
        (lambda: predict(ring(4), math.nan, Topology(4)), "nbytes must be a whole number"),
        (lambda: predict(ring(4), 10, Topology(4), itemsize=4), "not a whole number of elements"),
        (lambda: predict(ring(4), 10, Topology(4), itemsize=0), "itemsize must be"),
        (lambda: ring_seconds(0, S, PLAIN), "number of ranks must be"),
        (lambda: ring_seconds(4, -1, PLAIN), "nbytes must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"needs a Schedule, such as ddplab\.ring\(4\), not 'ring'"):
        predict("ring", S, Topology(4))
    with pytest.raises(TypeError, match=r"needs a Schedule, such as ddplab\.ring\(4\), not None\."):
        predict(None, S, Topology(4))
    with pytest.raises(TypeError, match=r"needs a Topology, such as ddplab\.Topology\(hosts=4\), not '1gbit'"):
        predict(ring(4), S, "1gbit")
    assert predict(ring(4), 25.6e6, Topology(4)).nbytes == 25_600_000


# ---- fit


POINTS = [(n, size) for n in (2, 4, 8) for size in (1 << 10, 1 << 16, 1 << 20, 1 << 26)]


@pytest.mark.parametrize(
    ("family", "steps", "load"),
    [
        ("ring", lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
        ("star", lambda n: 2, lambda n: 2 * (n - 1)),
        ("tree", lambda n: 2 * math.log2(n), lambda n: 2 * math.log2(n)),
        ("direct", lambda n: 2, lambda n: 2 * (n - 1) / n),
        ("halving_doubling", lambda n: 2 * math.log2(n), lambda n: 2 * (n - 1) / n),
    ],
)
def test_fit_recovers_alpha_and_beta(family, steps, load):
    alpha, beta = 7e-5, 8.4e-9
    found = fit([(n, size, alpha * steps(n) + beta * load(n) * size) for n, size in POINTS], family)
    assert found.alpha_s == pytest.approx(alpha) and found.beta_s_per_byte == pytest.approx(beta)
    assert found.payload_Bps == pytest.approx(1 / beta) and found.worst < 1e-9
    assert found.seconds(16, 1 << 22) == pytest.approx(alpha * steps(16) + beta * load(16) * (1 << 22))


def test_fit_with_noise_matches_numpy_and_predicts():
    rng = np.random.default_rng(3)
    truth = [(n, size, ring_seconds(n, size, PLAIN)) for n, size in POINTS]
    noisy = [(n, size, t * rng.uniform(0.97, 1.03)) for n, size, t in truth]
    found = fit(noisy)
    steps = np.array([2 * (n - 1) for n, _ in POINTS])
    load = np.array([2 * (n - 1) / n * size for n, size in POINTS])
    measured = np.array([t for *_, t in noisy])
    weights = np.polyfit(load / steps, measured / steps, 1, w=steps / measured)  # beta, alpha by another road
    assert (found.beta_s_per_byte, found.alpha_s) == pytest.approx(tuple(weights))
    assert found.residuals == pytest.approx(measured / (weights[1] * steps + weights[0] * load) - 1)
    assert found.worst == np.abs(found.residuals).max()
    assert ring_seconds(4, 1 << 20, found.link) == pytest.approx(found.seconds(4, 1 << 20))
    assert "Fit of ring to 12 points: alpha" in repr(found)


def test_fit_takes_a_builder_and_a_table_of_floats():
    rows = np.array([(n, size, seconds(chain(n, chunks=4), size)) for n, size in POINTS])
    found = fit(rows, lambda n: chain(n, chunks=4))
    assert found.alpha_s == pytest.approx(ALPHA) and found.payload_Bps == pytest.approx(RATE)


def test_fit_never_gives_a_negative_term():
    decreasing = [(4, 1 << 20, 1.0), (4, 1 << 21, 2.3), (4, 1 << 22, 5.0)]  # steeper than any line through alpha >= 0
    found = fit(decreasing)
    assert found.alpha_s == 0 and found.beta_s_per_byte > 0
    flat = [(4, 1 << 10, 1.0), (4, 1 << 20, 0.9), (4, 1 << 22, 0.8)]
    found = fit(flat)
    assert found.beta_s_per_byte == 0 and found.alpha_s > 0 and found.payload_Bps == math.inf


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "at least 3 points"),
        ([(4, 1024, 0.1), (4, 2048, 0.2)], "at least 3 points .* not 2"),
        ([(4, 1 << 20, 0.1)] * 5, "cannot tell latency from rate"),
        ([(2, 1 << 20, 0.1), (4, 1 << 21, 0.3), (8, 1 << 22, 0.7)], "cannot tell latency from rate"),
        ([(4, 1024, 0.1), (4, 2048, -0.2), (4, 4096, 0.4)], "Point 1's seconds must be a positive number"),
        ([(4, 1024, 0.1), (4, 2048, math.nan), (4, 4096, 0.4)], "Point 1's seconds"),
        ([(4, 1024, 0.1), (4, 2048, "fast"), (4, 4096, 0.4)], "Point 1's seconds"),
        ([(1, 1024, 0.1)] * 3, "Point 0's ranks must be a whole number of at least 2"),
        ([(4, 0, 0.1)] * 3, "Point 0's nbytes"),
        ([(4, 1024)] * 3, "Point 0 must be"),
        ([4, 4, 4], "Point 0 must be"),
    ],
)
def test_fit_refuses_points_that_say_nothing(points, message):
    with pytest.raises(ValueError, match=message):
        fit(points)


def test_fit_refuses_an_unknown_family():
    with pytest.raises(ValueError, match="No schedule family is called 'rings': take ring, star"):
        fit([(4, 1, 1.0)] * 3, "rings")


def test_sizes_beyond_any_buffer_and_links_as_text():
    with pytest.raises(ValueError, match="at most 2\\^53"):
        predict(ring(4), 10**30, Topology(hosts=4, link=Link.parse("1gbit")))
    assert ring_seconds(4, 1000, "1gbit") == ring_seconds(4, 1000, Link.parse("1gbit"))

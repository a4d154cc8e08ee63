"""A headline's arithmetic against hand-made systems whose numbers are known."""

from __future__ import annotations

import math
import random

import pytest

from ddplab.headline import headline, three_runs


def test_the_articles_numbers() -> None:
    """Each by hand: 75 ms less are 1.7 times faster, 102.2 MB, 12 of 32 bits."""
    h = headline()
    assert h.nbytes == 102_228_128
    assert h.compute_s == pytest.approx((0.120 - 1.7 * 0.045) / 0.7) and round(h.compute_s, 4) == 0.0621
    assert [round(1e3 * step) for step in h.step_s] == [182, 107]
    assert round(h.overlapped_compute_s, 4) == 0.0706
    assert round(h.busbw_Bps / 1e9, 2) == 1.49
    assert h.bits == pytest.approx(12)
    assert h.fixed_s == pytest.approx(-0.030)
    assert [round(e, 2) for e in h.efficiency] == [0.34, 0.58]
    assert round(h.ceiling, 2) == 2.93
    assert 1 < h.worth(240e9) < 1.013


def test_a_made_up_system_is_recovered() -> None:
    """Compute, before and after give a speed-up; the headline gives the compute back."""
    draw = random.Random(1)
    for _ in range(2000):
        compute, before = draw.uniform(1e-3, 1), draw.uniform(1e-3, 1)
        after, ranks, parameters = before * draw.uniform(0.01, 0.95), draw.randint(2, 64), draw.randint(1, 10**9)
        h = headline(before, after, (compute + before) / (compute + after), parameters, ranks)
        assert h.compute_s == pytest.approx(compute, rel=1e-6)
        assert h.ceiling == pytest.approx((compute + before) / compute, rel=1e-6)
        assert h.efficiency[0] == pytest.approx(compute / (compute + before), rel=1e-6)
        assert h.busbw_Bps * before == pytest.approx(2 * (ranks - 1) / ranks * 4 * parameters)
        assert h.worth(h.busbw_Bps) == pytest.approx(h.speedup)  # on its own link it is its own


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"speedup": 1.0}, "speedup is a number, 1 or more"),
        ({"speedup": 3.0}, "that would be 2.67 times"),
        ({"after_s": 0.12}, "nothing was gained"),
        ({"before_s": 0}, "before_s is a positive number"),
        ({"before_s": math.nan}, "before_s"),
        ({"ranks": 1}, "ranks must be a whole number of at least 2"),
        ({"parameters": 1.5}, "parameters must be a whole number"),
    ],
)
def test_impossible_headlines(given: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        headline(**given)


def test_three_runs_of_a_known_system() -> None:
    """C + max(0, comm * bits / 32 - hidden), drawn; three of its steps give the rest."""
    draw = random.Random(2)
    for _ in range(2000):
        compute, comm = draw.uniform(0.01, 1), draw.uniform(0.01, 1)
        hidden = comm / 2 * draw.uniform(0, 0.99)  # so that fp16 still waits
        runs = three_runs(compute, compute + comm - hidden, compute + comm / 2 - hidden, 1000, 8)
        assert runs.communication_s == pytest.approx(comm, rel=1e-6)
        assert runs.hidden_s == pytest.approx(hidden, rel=1e-6, abs=1e-9)
        assert runs.busbw_Bps == pytest.approx(1.75 * 4000 / comm, rel=1e-6)
        for bits in (32, 16, 8, 1):
            assert runs.step_s(bits) == pytest.approx(compute + max(0, comm * bits / 32 - hidden), rel=1e-6)
        assert runs.ceiling * runs.efficiency == pytest.approx(1)
        bits = draw.uniform(16, 32)
        assert runs.bits_for(runs.fp32_s / runs.step_s(bits)) == pytest.approx(bits, rel=1e-5)
        assert runs.bits_for(runs.ceiling * 1.01) is None


def test_the_articles_numbers_as_exposed_times() -> None:
    """If 120 and 45 ms are what a step waits for, fp16 fits: 150 ms of communication, 30 of them hidden."""
    compute = headline().compute_s
    runs = three_runs(compute, compute + 0.120, compute + 0.045, ranks=8)
    assert runs.communication_s == pytest.approx(0.150) and runs.hidden_s == pytest.approx(0.030)
    assert runs.bits_for(1.7) == pytest.approx(16)


@pytest.mark.parametrize(
    ("times", "says"),
    [
        ((1.0, 1.0, 0.9), "nothing is exposed"),
        ((1.0, 1.5, 1.5), "its cast costs more than its bytes save"),
        ((0.0, 1.5, 1.2), "noop_s is a positive number"),
        ((1.0, math.inf, 1.2), "fp32_s"),
    ],
)
def test_contradictions_are_named(times: tuple, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        three_runs(*times)


@pytest.mark.parametrize("bits", [-1, float("nan"), "8"])
def test_bits_that_are_none(bits: object) -> None:
    with pytest.raises(ValueError, match="bits is a number, 0 or more"):
        three_runs(1.0, 2.0, 1.5).step_s(bits)

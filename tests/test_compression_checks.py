"""The checkers of lab 10: right answers pass, and each way to be wrong is named."""

from __future__ import annotations

import pytest
import torch

from ddplab.checks import CheckError
from ddplab.compression_checks import check_onebit, check_routing_bytes


def right(gradient, residual):
    value = gradient + residual
    bits, scale = value >= 0, value.abs().mean()
    return bits, scale, value - torch.where(bits, scale, -scale)


def without_feedback(gradient, residual):
    bits, scale = gradient >= 0, gradient.abs().mean()
    return bits, scale, gradient - torch.where(bits, scale, -scale)


def zero_is_minus(gradient, residual):
    bits, scale, _ = right(gradient, residual)
    value = gradient + residual
    bits = value > 0
    return bits, scale, value - torch.where(bits, scale, -scale)


def largest(gradient, residual):
    value = gradient + residual
    bits, scale = value >= 0, value.abs().max()
    return bits, scale, value - torch.where(bits, scale, -scale)


def drops_the_old(gradient, residual):
    bits, scale, new = right(gradient, residual)
    return bits, scale, new - residual


def throws_away(gradient, residual):
    bits, scale, new = right(gradient, residual)
    return bits, scale, torch.zeros_like(new)


def in_place(gradient, residual):
    gradient += residual
    bits, scale = gradient >= 0, gradient.abs().mean()
    return bits, scale, gradient - torch.where(bits, scale, -scale)


def signs(gradient, residual):
    bits, scale, new = right(gradient, residual)
    return bits.float(), scale, new


def one_short(gradient, residual):
    bits, scale, new = right(gradient, residual)
    return bits[:-1], scale, new


def test_a_right_encoder_passes(capsys):
    check_onebit(right)
    check_onebit(lambda g, r: (lambda b, s, n: (b, float(s), n))(*right(g, r)), seed=3)
    assert capsys.readouterr().out.count("after 200 steps nothing was lost") == 2


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (without_feedback, "Add the residual first"),
        (zero_is_minus, "Zero counts as plus"),
        (largest, "the scale is 3; the mean magnitude of what is encoded is 2"),
        (drops_the_old, "The old residual was dropped"),
        (throws_away, "held back is 0, should be -1"),
        (in_place, "changed in place"),
        (signs, "bits are of dtype bool"),
        (one_short, r"bits is a tensor of shape \(2,\)"),
        (lambda g, r: (g > 0, r.mean(), r[:, 1]), "without anything held back: line 1 of <lambda>: IndexError"),
        (lambda g, r: None, r"return three things, \(bits, scale, residual\), not None"),
        (lambda g, r: g, r"return three things, \(bits, scale, residual\)"),
    ],
)
def test_a_wrong_encoder_is_told_why(wrong, sentence):
    with pytest.raises(CheckError, match=sentence):
        check_onebit(wrong)


def routes(route, ranks, values):
    if route == "fp32 ring":
        return 2 * (ranks - 1) / ranks * 4 * values
    if route == "all-gather":
        return (ranks - 1) * values / 8
    return 2 * (ranks - 1) / ranks * values / 8


def test_right_bytes_pass(capsys):
    check_routing_bytes(routes)
    assert "2, 4, 8 and 64" in capsys.readouterr().out


def test_the_claims_ratios_follow():
    """C64: all-gather costs 12.5% of the fp32 ring's bytes at 8 ranks and 100% at 64, two phases 1/32 at any number."""
    for ranks, percent in ((8, 12.5), (64, 100.0)):
        ring = routes("fp32 ring", ranks, 6400)
        assert 100 * routes("all-gather", ranks, 6400) / ring == pytest.approx(percent)
        assert routes("two phases", ranks, 6400) / ring == pytest.approx(1 / 32)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda route, n, v: None, "returned None"),
        (lambda route, n, v: 1 / 0, "line 1 of <lambda>: ZeroDivisionError"),
        (lambda route, n, v: 4 * v, "fp32 ring, 4 ranks.*chunk of values / N"),
        (lambda route, n, v: routes(route, n, v) * (8 if route == "all-gather" else 1), "A byte holds 8"),
        (lambda route, n, v: routes(route, n, v) / (2 if route == "two phases" else 1), "with the bits of one shard"),
    ],
)
def test_wrong_bytes_are_told_why(wrong, sentence):
    with pytest.raises(CheckError, match=sentence):
        check_routing_bytes(wrong)

"""Sweeps: the verdict on drawn samples, where the truth is known; and a small sweep of each kind on real ranks."""

from __future__ import annotations

import itertools
import math
import os

import numpy as np
import pandas as pd
import pytest

from ddplab.launch import launch
from ddplab.nccl.judge import judge, least_rounds, ratio_interval
from ddplab.nccl.sweep import sweep

ROUNDS = 24  # sweep's default


def weather(draw: np.random.Generator, rounds: int, values: int) -> np.ndarray:
    """Times of a shared machine, 10 ms when all is quiet: heavy tails, spikes, and a level that drifts and jumps.

    Quartiles of the noise lie 3% apart: a median over five steps that lie 5% apart, as in labs/results/ring_grid.json.
    """
    noise = 0.02 * draw.standard_t(3, (rounds, values))
    spikes = np.where(draw.random((rounds, values)) < 0.02, draw.uniform(0.2, 1.0, (rounds, values)), 0.0)
    level = np.cumsum(0.02 * draw.standard_normal(rounds)) + np.where(
        np.arange(rounds) > draw.integers(rounds), 0.15, 0.0
    )
    return 0.010 * np.exp(noise + spikes + level[:, None])


def observed(times: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(
        {"round": r, "value": f"v{v}", "seconds": times[r, v]} for r, v in itertools.product(*map(range, times.shape))
    )


def verdicts(times: np.ndarray) -> list[str]:
    return list(judge(observed(times), "v0")["verdict"][1:])


def test_nothing_is_found_where_there_is_nothing():
    quiet = [verdicts(weather(np.random.default_rng(seed), ROUNDS, 4)) for seed in range(40)]
    assert sum(found == ["no effect"] * 3 for found in quiet) >= 38


@pytest.mark.parametrize(("factor", "expected"), [(0.9, "helps"), (1.1, "hurts")])
def test_ten_percent_are_found(factor, expected):
    found = [verdicts(weather(np.random.default_rng(seed), ROUNDS, 2) * [1, factor])[0] for seed in range(40)]
    assert found.count(expected) >= 38 and set(found) <= {expected, "no effect"}


def test_the_error_rate_is_the_one_asked_for():
    """Whatever the noise: under no effect, at most 1 in 100 intervals misses 1 (binomial limit at four sigma)."""
    runs, missed = 1500, 0
    for seed in range(runs):
        times = weather(np.random.default_rng(10_000 + seed), 12, 2)
        _, low, high = ratio_interval(times[:, 0], times[:, 1], 0.99)
        missed += not low <= 1 <= high
    assert missed <= 0.01 * runs + 4 * math.sqrt(0.01 * 0.99 * runs)


def test_the_interval_is_that_of_all_sign_flips():
    """A shift lies inside exactly if the signed-rank test does not reject it: counted over all 2^n signs."""
    draw = np.random.default_rng(5)
    for n, confidence in ((6, 0.9), (9, 0.95), (10, 0.99)):
        base, other = draw.lognormal(0, 0.1, n), draw.lognormal(0.05, 0.1, n)
        _, low, high = ratio_interval(base, other, confidence)
        signs = np.array(list(itertools.product([0, 1], repeat=n)))
        sums = signs @ np.arange(1, n + 1)
        for ratio in np.exp(np.linspace(-0.3, 0.4, 200)):
            d = np.log(other / base) - np.log(ratio)
            ranks = np.argsort(np.argsort(abs(d))) + 1
            seen = ranks[d > 0].sum()
            p = min(1.0, 2 * min((sums <= seen).mean(), (sums >= seen).mean()))
            assert (low < ratio < high) == (p > 1 - confidence)


def test_too_few_rounds_and_small_effects_are_no_effect():
    assert ratio_interval([1.0] * 7, [2.0] * 7, 0.99)[1:] == (0.0, math.inf)
    assert least_rounds(0.99) == 8 and least_rounds(0.99, 4) == 10
    times = np.array([[0.01, 0.01005 + 1e-6 * r] for r in range(12)])
    assert verdicts(times) == ["no effect"]  # half a percent, and certain
    assert list(judge(observed(times), "v0", least_effect=0.001)["verdict"]) == ["baseline", "hurts"]


def test_what_the_table_says():
    times = np.array([[0.010, 0.008, 0.013] for _ in range(10)])
    row = judge(observed(times), "v0").set_index("value")
    assert row.loc["v1", ["change_pct", "low_pct", "high_pct"]].tolist() == pytest.approx([-20.0] * 3)
    assert row.loc["v2", ["time_ms", "change_pct"]].tolist() == pytest.approx([13.0, 30.0])
    assert list(row["verdict"]) == ["baseline", "helps", "hurts"]


def test_bad_observations():
    with pytest.raises(ValueError, match="the baseline 'x' was not measured"):
        judge(observed(np.ones((9, 2))), "x")
    with pytest.raises(ValueError, match="not measured in the same rounds"):
        judge(observed(np.ones((9, 2))).iloc[:-1], "v0")
    with pytest.raises(ValueError, match="twice in one round"):
        judge(pd.concat([observed(np.ones((9, 2)))] * 2), "v0")
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="2 and 1"):
        ratio_interval([1.0, 1.0], [1.0])


def test_a_variable_reaches_its_own_launches_only():
    """The step takes ten times as long where the variable says so: an effect that no machine hides."""

    def step() -> None:
        import time

        end = time.perf_counter() + (0.02 if os.environ.get("DDPLAB_SLOW") == "1" else 0.002)
        while time.perf_counter() < end:
            pass

    os.environ["DDPLAB_SLOW"] = "1"  # None is unset, even where this process has it set
    try:
        found = sweep(
            "DDPLAB_SLOW", [None, "1"], workload=step, ranks=1, rounds=5, confidence=0.9, iters=1, warmup=0, show=False
        )
    finally:
        assert os.environ.pop("DDPLAB_SLOW") == "1"
    assert list(found.table["value"]) == ["unset", "1"] and found.table["verdict"][1] == "hurts"
    assert len(found.observations) == 10 and set(found.observations["turn"]) == {0, 1}
    orders = found.observations.groupby("round")["value"].first()
    assert set(orders) == {"unset", "1"}  # not always the same first


def test_options_of_ddp_and_algorithms_share_one_launch(capsys):
    quick = {"ranks": 2, "rounds": 5, "confidence": 0.9, "iters": 1, "warmup": 0}
    found = sweep("bucket_cap_mb", [25, 25], size="64K", **quick | {"ranks": 1})
    assert list(found.table["value"]) == ["25", "25 (again)"] and found.about["workload"] == "ddp"
    assert "within one launch" in capsys.readouterr().out
    found = sweep("algorithm", ["backend", "ring"], size="64K", show=False, **quick)
    assert set(found.table["verdict"][1:]) <= {"no effect", "helps", "hurts"}
    assert (found.observations["seconds"] > 0).all() and found.about["size_B"] == 65536
    assert "algorithm on all_reduce, 65536 B: 2 ranks, gloo" in str(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("nccl_proto", ["LL", "LL"]),
            "a knob is an environment variable in capitals, or one of algorithm, bucket_cap",
        ),
        (("NCCL_PROTO", ["LL"]), "at least two"),
        (("NCCL_PROTO", "LL"), "at least two"),
        (("algorithm", ["ring", "rign"]), "no algorithm is called 'rign'"),
    ],
)
def test_bad_sweeps(arguments, message):
    with pytest.raises(ValueError, match=message):
        sweep(*arguments)


def test_other_bad_sweeps(monkeypatch):
    with pytest.raises(TypeError, match="takes text or None"):
        sweep("NCCL_NTHREADS", [64, 512])
    with pytest.raises(ValueError, match="rounds must be a whole number of at least 8 for 2 values at 99%"):
        sweep("NCCL_PROTO", [None, "LL"], rounds=5)
    with pytest.raises(ValueError, match="does not act on the workload"):
        sweep("bucket_cap_mb", [1, 2], workload="all_reduce")
    with pytest.raises(ValueError, match="one size"):
        sweep("NCCL_PROTO", [None, "LL"], size="1K,2K")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="cannot run under torchrun"):
        sweep("NCCL_PROTO", [None, "LL"])


def test_gloo_reads_the_variables_that_the_lab_sweeps():
    """Two names of the interface give gloo two devices, on which collectives take turns; one rank says how many."""

    def meet() -> str:
        import torch.distributed as dist

        dist.barrier()
        return os.environ["GLOO_SOCKET_IFNAME"]

    assert launch(meet, ranks=2, env={"GLOO_SOCKET_IFNAME": "lo,lo"}) == ["lo,lo"] * 2

"""Convergence runs: against one process on the whole batch, closed forms of bytes and seconds, and provable outcomes.

Real ranks, real digits, few steps: what a method does to learning is recorded elsewhere; here the harness is tested.
"""

from __future__ import annotations

import importlib
import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddplab as dl
from ddplab._training import network
from ddplab.convergence import TESTING, converge, verdicts
from ddplab.recipes import EVERY, MOMENTUM, RECIPES, SGD_LR

STEPS, LOOK, RANKS, BATCH = 20, 10, 2, 8
METHODS = ["fp32", "fp16", "DiLoCo"]
with np.load(ROOT / "labs/data/digits.npz") as file:
    PIXELS, LABELS = file["pixels"], file["label"]
HOW = {"steps": STEPS, "every": LOOK, "ranks": RANKS, "batch": BATCH, "device": "cpu"}


@pytest.fixture(scope="module")
def runs():
    return converge(PIXELS, LABELS, METHODS, [3, 1], slow="8 Mbit/s", fast="8 Gbit/s", compute_s=0.5, **HOW)


def last(runs, method):
    return runs[(runs.method == method) & (runs.step == STEPS)].set_index("seed").sort_index()


def one_process(seed: int) -> tuple[list[float], list[float]]:
    """The loss over training images and over images for testing, at steps 0 and 20, of plain torch on whole batches."""
    x = torch.from_numpy(PIXELS.astype(np.float32))[:, None]
    x, y = (x - x.mean()) / x.std(unbiased=False), torch.from_numpy(LABELS.astype(np.int64))
    order = np.random.default_rng(seed).permutation(len(x))
    test, train = order[:TESTING], order[TESTING:]
    torch.manual_seed(seed)
    model = network(8, 8, 10)
    velocities = [torch.zeros_like(p) for p in model.parameters()]
    batches = []
    for rank in range(RANKS):  # 20 steps of 8 images stay within the first shuffle of a rank's share
        batches.append(np.random.default_rng([seed, rank]).permutation(train[rank::RANKS]).reshape(-1)[: STEPS * BATCH])
    found: tuple[list[float], list[float]] = ([], [])
    for step in range(STEPS + 1):
        if step in (0, STEPS):
            with torch.no_grad():
                for part, values in zip((train, test), found, strict=True):
                    values.append(cross_entropy(model(x[part]), y[part]).item())
        rows = np.concatenate([mine[step * BATCH : (step + 1) * BATCH] for mine in batches])
        if len(rows):
            gradients = torch.autograd.grad(cross_entropy(model(x[rows]), y[rows]), list(model.parameters()))
            with torch.no_grad():  # by hand: SGD with momentum is two lines, and torch.optim takes seconds to import
                for p, v, g in zip(model.parameters(), velocities, gradients, strict=True):
                    p -= SGD_LR * v.mul_(MOMENTUM).add_(g)
    return found


@pytest.mark.parametrize("seed", [1, 3])
def test_fp32_equals_one_process_on_the_whole_batch(runs, seed):
    train, test = one_process(seed)
    mine = runs[(runs.method == "fp32") & (runs.seed == seed) & runs.step.isin([0, STEPS])]
    assert mine.loss.tolist() == pytest.approx(train, rel=1e-3)
    assert mine.test_loss.tolist() == pytest.approx(test, rel=1e-3)


def test_pairs_start_alike_and_seeds_do_not(runs):
    start = runs[runs.step == 0]
    assert (start.groupby("seed").loss.nunique() == 1).all() and start.loss.nunique() == 2
    assert runs.groupby(["method", "seed"]).size().eq(3).all()


def test_bytes_are_the_closed_forms(runs):
    nbytes = 4 * sum(p.numel() for p in network(8, 8, 10).parameters())
    ring = 2 * (RANKS - 1) * nbytes // RANKS
    assert nbytes == 4 * 13_706
    assert (last(runs, "fp32").wire_B == STEPS * ring).all()
    assert (last(runs, "fp16").wire_B == STEPS * ring // 2).all()
    # DiLoCo: the ring's over H, and small meetings about finite values
    extra = last(runs, "DiLoCo").wire_B - STEPS // EVERY * ring
    assert extra.between(0, 0.02 * (STEPS // EVERY) * ring).all()


def test_seconds_are_computing_messages_and_bytes(runs):
    """8 Mbit/s is 1 MB/s on the wire; two ranks' ring has 2 messages of 50 us."""
    payload = 1e6 * 1448 / 1514
    for method, exchanges in (("fp32", STEPS), ("fp16", STEPS), ("DiLoCo", STEPS / EVERY)):
        row = last(runs, method).iloc[0]
        wire = exchanges * 2 * 50e-6
        assert row.slow_s == pytest.approx(STEPS * 0.5 + wire + row.wire_B / payload, rel=1e-9)
        assert row.fast_s == pytest.approx(STEPS * 0.5 + wire + row.wire_B / (1000 * payload), rel=1e-9)
    assert set(runs.basis) == {"predicted"}


def test_a_run_depends_on_its_seed_alone(runs):
    """Other methods, another order and another number of seeds: the same numbers, to the bit."""
    again = converge(PIXELS, LABELS, ["DiLoCo", "fp16"], [1], **HOW)
    for method in ("fp16", "DiLoCo"):
        before = runs[(runs.method == method) & (runs.seed == 1)]
        columns = ["step", "loss", "test_loss", "test_accuracy", "wire_B"]
        pd.testing.assert_frame_equal(
            again[again.method == method][columns].reset_index(drop=True), before[columns].reset_index(drop=True)
        )


def test_a_run_that_blows_up_ends_in_nan_on_all_ranks():
    runs = converge(PIXELS, LABELS, ["fp32", "1-bit", "DiLoCo"], [0, 1], lr_factor=1e20, **HOW)
    assert runs[runs.step == 0].loss.notna().all() and runs[runs.step == STEPS].loss.isna().all()
    assert len(runs) == 3 * 2 * 3
    table = verdicts(runs).set_index("method")
    assert table.verdict["1-bit"] == "diverged in 2 of 2 and the baseline diverged in 2 of 2"


# -- verdicts ---------------------------------------------------------------------------------------------------------


def made(**finals: list[float]) -> pd.DataFrame:
    """Runs from a loss of 2.0 at the start to the given ones."""
    rows = []
    for name, losses in finals.items():
        for seed, loss in enumerate(losses):
            for step, value in ((0, 2.0), (9, loss)):
                row = {"method": name, "baseline": None if name == "base" else "base", "seed": seed, "step": step}
                rows.append(row | {"loss": value, "test_loss": value, "test_accuracy": 0.5, "wire_B": 10 * (step + 1)})
    return pd.DataFrame(rows)


def test_verdicts_compare_pairs():
    base = [0.1, 0.2, 0.4, 0.3, 0.25]
    runs = made(base=base, same=base, double=[2.0 * b * f for b, f in zip(base, (0.9, 1, 1.1, 1, 1), strict=True)])
    table = verdicts(runs.sample(frac=1, random_state=0)).set_index("method")
    assert list(table.pairs) == [5, 5] and set(table.index) == {"same", "double"}
    assert table.verdict["same"] == "no difference seen" and table.change["same"] == 1
    assert "times worse" in table.verdict["double"] and table.low["double"] < 2 < table.high["double"]
    assert (table.saves == 1).all()
    assert set(verdicts(runs, "test_accuracy").verdict) == {"no difference seen"}


def test_a_loss_above_the_start_has_diverged():
    """A huge value in one run of five would widen the interval until it contains everything."""
    runs = made(base=[0.1] * 5, wild=[0.1, 0.1, 0.1, 0.1, 1e7])
    assert list(verdicts(runs).verdict) == ["diverged in 1 of 5"]
    assert list(verdicts(runs, "test_accuracy").verdict) == ["diverged in 1 of 5"]


def test_verdicts_refuse_what_makes_no_pairs():
    runs = made(base=[0.1, 0.2], other=[0.1, 0.2])
    with pytest.raises(ValueError, match="other and base were not run from the same seeds"):
        verdicts(runs[~((runs.method == "base") & (runs.seed == 1))])
    with pytest.raises(ValueError, match="""metric is "loss", "test_loss" or "test_accuracy", not 'speed'"""):
        verdicts(runs, "speed")


# -- a control whose outcome is known ---------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, pull):
        """Rank r pulls w[0] with +-`pull`, to no effect on the mean; all ranks want w[1] to be 1."""
        side = 1.0 if dist.get_rank() % 2 else -1.0
        return side * pull * self.w[0] + 0.5 * (self.w[1] - 1) ** 2


def pulled(pulls: list[float]) -> dict[str, list[float]]:
    """In a rank: the distance of w[1] from 1 after 120 steps of top-1 of two, for each pull."""
    found: dict[str, list[float]] = {}
    for name, feedback in (("exact", None), ("feedback", True), ("none", False)):
        for pull in pulls:
            ddp = DistributedDataParallel(Two())
            if feedback is not None:
                state, hook = dl.topk(ratio=0.5, error_feedback=feedback)
                ddp.register_comm_hook(state, hook)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            for _ in range(120):
                optimizer.zero_grad()
                ddp(pull).backward()
                optimizer.step()
            found.setdefault(name, []).append(abs(ddp.module.w[1].item() - 1))
            if feedback is not None:
                state.close()
    return found


def test_without_feedback_the_small_gradient_never_arrives():
    """Of two elements each rank sends the larger. The larger ones cancel, so w stays where it is: distance 1, exactly.
    With feedback the smaller one piles up until its turn comes."""
    found = dl.launch(pulled, [3.0, 7.0], ranks=2, timeout=300, device="cpu")[0]
    assert found["none"] == [1.0, 1.0]
    assert found["exact"] == pytest.approx([0.95**120] * 2, rel=1e-3)  # a step of 0.05 leaves 0.95 of the distance
    assert max(found["feedback"]) < 0.5
    control = dl.paired(found["none"], found["exact"], lower_is_better=True)
    assert control.verdict.startswith("worse by 1") and not control.no_difference


# -- what makes no sense ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["fp64"]}, "no method is called 'fp64': take fp32, fp16"),
        ({"methods": []}, "methods are a list of names from ddplab.RECIPES: there must be at least one"),
        ({"methods": ["fp32", "fp32"]}, "each method and each seed once"),
        ({"seeds": [1, 1]}, "each method and each seed once"),
        ({"seeds": []}, "seeds are whole numbers, such as range\\(5\\): there must be at least one"),
        ({"seeds": [-1]}, "each of the seeds must be a whole number of at least 0, not -1"),
        ({"steps": 0}, "steps must be a whole number of at least 1, not 0"),
        ({"every": True}, "every must be a whole number of at least 1, not True"),
        ({"batch": 400}, "too few for 400 to test with and 400 for each of 4 ranks"),
        ({"slow": "fast"}, "is not a rate"),
        ({"lr_factor": math.nan}, "lr_factor is a positive number"),
        ({"lr_factor": "1"}, "lr_factor is a positive number"),
        ({"compute_s": math.nan}, "compute_s is a number, 0 or more"),
        ({"labels": LABELS[:-1]}, "one for each of 1797 images"),
        ({"labels": LABELS.astype(float)}, "whole numbers from 0"),
        ({"pixels": PIXELS.reshape(-1, 64)}, r"shape \(images, height, width\)"),
        ({"pixels": np.full((1797, 8, 8), np.nan)}, "NaN or infinity"),
    ],
)
def test_bad_arguments(options, message):
    pixels, labels = options.pop("pixels", PIXELS), options.pop("labels", LABELS)
    with pytest.raises(ValueError, match=message):
        converge(pixels, labels, **options)


def test_every_recipe_is_compared_with_a_baseline():
    names = {r.baseline for r in RECIPES.values()} - {None}
    assert names == {n for n, r in RECIPES.items() if r.baseline is None} == {"fp32", "Adam"}
    assert all(recipe.says for recipe in RECIPES.values())


def test_hosts_say_how_many_ranks_there_are(monkeypatch):
    def launch(run, names, *call, hosts, timeout):
        row = {
            "method": names[0],
            "seed": 0,
            "step": 1,
            "exchanges": 1,
            "wire_B": 0,
            "measured_s": 0.0,
            "measured_B": 0,
        }
        return [[row]]

    monkeypatch.setattr(importlib.import_module("ddplab.launch"), "launch", launch)
    two = type("Two", (dl.Hosts,), {"ranks": 2, "__init__": lambda self: None})()
    frame = converge(PIXELS, LABELS, ["fp32"], [0], hosts=two, slow=dl.Link(1e6, 0.25), compute_s=1.0)
    assert frame.slow_s[0] == 1.0 + 2 * (2 - 1) * 0.25

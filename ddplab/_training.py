"""The part of `ddplab.convergence` that runs on a rank: the network, its share of the images, the training loop."""

from __future__ import annotations

import math
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from ddplab.convergence import TESTING
from ddplab.hosts import link_bytes
from ddplab.recipes import RECIPES, Trainer


def network(height: int, width: int, classes: int) -> nn.Module:
    """Two convolutions and a hidden layer: 13,706 parameters for 8 x 8 pixels and 10 classes."""
    down = -(-height // 4) * -(-width // 4)  # each convolution halves both sides, rounding up
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(32 * down, 64), nn.ReLU(), nn.Linear(64, classes)),
    )


def train_all(
    methods: list[str],
    images: np.ndarray,
    labels: np.ndarray,
    seeds: list[int],
    steps: int,
    every: int,
    batch: int,
    lr_factor: float,
) -> list[dict[str, Any]]:
    """In a rank: every method from every seed. The rows of `converge`; the same on all ranks but for the bytes."""
    # One recipe has no warm-up on purpose; that it then leaves values out is known.
    warnings.filterwarnings("ignore", message=".* get their first gradient after the warm-up", category=RuntimeWarning)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    x, y = torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device)
    rows = []
    for seed in seeds:
        for method in methods:
            for row in train(method, x, y, seed, steps, every, batch, lr_factor):
                rows.append({"method": method, "seed": seed, **row})
    return rows


def train(
    method: str, x: torch.Tensor, y: torch.Tensor, seed: int, steps: int, every: int, batch: int, lr_factor: float
) -> list[dict[str, Any]]:
    """In a rank: one run. Everything that chance decides comes from the seed, whatever the method does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    deal = np.random.default_rng(seed)
    order = deal.permutation(len(x))
    testing, mine = order[:TESTING][rank::ranks], order[TESTING:][rank::ranks]
    torch.manual_seed(seed)
    model = network(*x.shape[2:], int(y.max()) + 1).to(x.device)
    torch.manual_seed(seed * ranks + rank)  # for a method that draws: another stream on each rank
    trainer = RECIPES[method].make(model, steps, lr_factor)
    shuffle = np.random.default_rng([seed, rank])
    waiting, rows, seconds, sent = np.empty(0, dtype=int), [], 0.0, 0
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            losses = _look(model, x, y, mine, testing)
            rows.append({"step": step, **losses, **_cost(trainer, seconds, sent)})
            if not math.isfinite(losses["loss"]):
                break
        if step == steps:
            trainer.finish()
            break
        if len(waiting) < batch:
            waiting = shuffle.permutation(mine)
        now, waiting = waiting[:batch], waiting[batch:]
        before, start = link_bytes()[0], time.perf_counter()
        try:
            trainer.step(x[now], y[now])
        except (ValueError, OverflowError) as error:  # every rank raises it: a value that is not finite
            if not any(word in str(error) for word in ("NaN", "do not fit")):
                raise
            break
        seconds, sent = seconds + time.perf_counter() - start, sent + link_bytes()[0] - before
    seen = {row["step"] for row in rows}
    lost = dict.fromkeys(("loss", "test_loss", "test_accuracy"), math.nan)
    for step in sorted({*range(0, steps + 1, every), steps} - seen):
        rows.append({"step": step, **lost, **_cost(trainer, seconds, sent)})
    trainer.close()
    return rows


def _cost(trainer: Trainer, seconds: float, sent: int) -> dict[str, Any]:
    return {
        "wire_B": trainer.wire_bytes,
        "exchanges": trainer.exchanges,
        "measured_s": seconds,
        "measured_B": sent,
    }


@torch.no_grad()
def _look(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, mine: np.ndarray, testing: np.ndarray
) -> dict[str, float]:
    """Loss over all training images, loss and accuracy over all images for testing: each rank looks at its share."""
    sums = []
    for rows in (mine, testing):
        logits = model(x[rows])
        right = (logits.argmax(1) == y[rows]).sum()
        sums += [cross_entropy(logits, y[rows], reduction="sum").double(), right.double(), torch.tensor(len(rows))]
    total = torch.stack([s.double().to(x.device) for s in sums])
    dist.all_reduce(total)
    loss, _, n, test_loss, right, n_test = total.tolist()
    return {"loss": loss / n, "test_loss": test_loss / n_test, "test_accuracy": right / n_test}

"""What compression does to learning: a small CNN on real images, real ranks, real hooks, paired seeds.

    with np.load("labs/data/digits.npz") as file:
        runs = converge(file["pixels"], file["label"], methods=["fp32", "fp16"], seeds=range(5))
    verdicts(runs)

A seed decides the start of the network, which images are for testing, how the others are dealt out, and their order:
for two methods the same, so that runs with equal seeds are pairs. Every rank trains on its own share.

Bytes are counted, by the methods themselves. Seconds are *predicted* for a slow and a fast link: a stated time for
computing a step, a latency for each message, and the bytes at the link's rate; nothing overlaps and encoding is free.
This model is far too small to measure a step on; its loss and its bytes are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from ddplab._arguments import choice, instance, several, shown
from ddplab.link import Link
from ddplab.paired import paired
from ddplab.transfers import count, number

if TYPE_CHECKING:
    import pandas as pd

    from ddplab.hosts import Hosts

TESTING = 400  # images held back
# How two methods are compared. A loss spreads the more the larger it is: as a ratio. Accuracy: as a difference.
METRICS = {
    "loss": {"lower_is_better": True, "ratio": True},
    "test_loss": {"lower_is_better": True, "ratio": True},
    "test_accuracy": {"lower_is_better": False, "ratio": False},
}


def converge(
    pixels: np.ndarray,
    labels: np.ndarray,
    methods: Sequence[str] | None = None,
    seeds: Iterable[int] = range(5),
    *,
    steps: int = 200,
    every: int = 20,
    batch: int = 16,
    lr_factor: float = 1.0,
    ranks: int = 4,
    slow: Link | str = "100mbit",
    fast: Link | str = "10gbit",
    compute_s: float = 5e-3,
    hosts: Hosts | None = None,
    device: str = "auto",
    timeout: float = 600.0,
) -> pd.DataFrame:
    """Train each method from each seed; one row a method, seed and `every`-th step.

    Args:
        pixels, labels: shape (images, height, width), any numbers, and (images,), whole numbers from 0. 400 images
            are held back for testing.
        methods: names from `RECIPES`, in any order; None means all. A baseline is not added by itself.
        seeds: whole numbers, each once.
        steps, every: optimizer steps of a run, and after how many of them it is looked at (step 0 and the last, too).
        batch: images a rank and step.
        lr_factor: multiplies every method's learning rate.
        slow, fast, compute_s: what `slow_s` and `fast_s` are predicted from; compute_s is assumed, in seconds a step.
        hosts: train on emulated hosts, with as many ranks as they hold, whatever `ranks` is. Then `measured_s` and
            `measured_B` say how long the steps took and how many bytes left rank 0's host, headers included.

    Columns: method, baseline, seed, step; loss (mean cross entropy over all training images), test_loss, test_accuracy
    (0 to 1), means over the ranks, each with its own model if they differ; wire_B (payload that rank 0 has sent so
    far), slow_s and fast_s with basis "predicted". A run that meets NaN or infinity ends: its later rows hold NaN.

    Raises ValueError for unknown methods, images and labels that do not match, and numbers that make no sense.
    """
    import pandas as pd

    from ddplab._training import train_all
    from ddplab.hosts import Hosts
    from ddplab.launch import launch
    from ddplab.recipes import RECIPES

    instance(hosts, (Hosts, NoneType), "hosts are emulated ones, a ddplab.Hosts, or None")
    ranks = ranks if hosts is None else hosts.ranks
    images, classes = _images(pixels, labels)
    names = list(RECIPES) if methods is None else several(methods, "methods are a list of names from ddplab.RECIPES")
    seeds = several(seeds, "seeds are whole numbers, such as range(5)")
    seeds = [count(seed, "each of the seeds", least=0, error=ValueError) for seed in seeds]
    if unknown := [name for name in names if not isinstance(name, str) or name not in RECIPES]:
        raise ValueError(f"no method is called {shown(unknown[0])}: take {', '.join(RECIPES)}")
    if len({*names}) < len(names) or len({*seeds}) < len(seeds):
        raise ValueError("name each method and each seed once")
    for name, value in (("steps", steps), ("every", every), ("batch", batch), ("ranks", ranks)):
        count(value, name, error=ValueError)
    number(lr_factor, "lr_factor", above=True), number(compute_s, "compute_s", 0)
    number(timeout, "timeout, in seconds,", above=True)
    if len(images) - TESTING < ranks * batch:
        raise ValueError(
            f"{len(images)} images are too few for {TESTING} to test with and {batch} for each of {ranks} ranks"
        )
    links = {"slow_s": Link.parse(slow), "fast_s": Link.parse(fast)}
    call = (names, images, classes, seeds, steps, every, batch, float(lr_factor))
    where: dict[str, Any] = {"hosts": hosts} if hosts is not None else {"ranks": ranks, "device": device}
    rows = launch(train_all, *call, **where, timeout=timeout)[0]
    frame = pd.DataFrame(rows)
    frame.insert(1, "baseline", [RECIPES[name].baseline for name in frame.method])
    messages = 2 * (ranks - 1) * frame.pop("exchanges")
    for column, link in links.items():
        frame[column] = frame.step * compute_s + messages * link.latency_s + frame.wire_B / link.payload_Bps
    frame["basis"] = "predicted"
    if hosts is None:
        frame = frame.drop(columns=["measured_s", "measured_B"])
    return frame


def verdicts(runs: pd.DataFrame, metric: str = "loss", confidence: float = 0.95) -> pd.DataFrame:
    """Every method of `converge` against its baseline, at the last step: one row a method whose baseline was run, too.

    A run that ended in NaN, or with a training loss no lower than it started with, has diverged, by any metric.

    Columns: method, baseline, value and baseline_value (means over the seeds), change, low, high, pairs, verdict (see
    `ddplab.paired`; for the losses a ratio, for accuracy a difference), and saves: the baseline's bytes over the
    method's. ValueError for another metric than loss, test_loss or test_accuracy, or for methods with other seeds.
    """
    import pandas as pd

    choice(metric, "metric", METRICS)
    instance(runs, pd.DataFrame, "runs are the DataFrame that ddplab.converge gives")
    needed = ("method", "baseline", "seed", "step", "loss", "wire_B", metric)
    if missing := [name for name in needed if name not in runs]:
        raise ValueError(f"runs are the DataFrame that ddplab.converge gives; this one has no {', '.join(missing)}")
    if runs.empty:
        raise ValueError("runs has no rows: there is nothing to compare")
    first, last = (
        runs[runs.step == step].sort_values(["method", "seed"]) for step in (runs.step.min(), runs.step.max())
    )
    learned = last.loss.to_numpy() < first.loss.to_numpy()
    last = last.assign(**{metric: last[metric].where(learned)})
    by_method = dict(list(last.groupby("method", sort=False)))
    rows = []
    for name, mine in by_method.items():
        other = by_method.get(mine.baseline.iloc[0])
        if other is None:
            continue
        if list(mine.seed) != list(other.seed):
            raise ValueError(f"{name} and {other.method.iloc[0]} were not run from the same seeds: they make no pairs")
        found = paired(mine[metric], other[metric], **METRICS[metric], confidence=confidence)
        rows.append(
            {
                "method": name,
                "baseline": other.method.iloc[0],
                "value": mine[metric].mean(),
                "baseline_value": other[metric].mean(),
                "change": found.change,
                "low": found.low,
                "high": found.high,
                "pairs": found.pairs,
                "verdict": found.verdict,
                "saves": other.wire_B.mean() / mine.wire_B.mean(),
            }
        )
    return pd.DataFrame(rows)


def _images(pixels: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 of shape (images, 1, height, width) with mean 0 and standard deviation 1, and int64."""
    try:
        images, classes = np.asarray(pixels, dtype=np.float32), np.asarray(labels)
    except (TypeError, ValueError):  # words, or rows of different lengths
        raise TypeError(f"pixels and labels are arrays of numbers, not {shown(pixels)} and {shown(labels)}") from None
    if images.ndim != 3 or min(images.shape[1:], default=0) < 2:
        raise ValueError(f"pixels have the shape (images, height, width), at least 2 by 2, not {images.shape}")
    if classes.shape != images.shape[:1] or classes.dtype.kind not in "iu" or (len(classes) and classes.min() < 0):
        raise ValueError(f"labels are whole numbers from 0, one for each of {len(images)} images")
    if not np.isfinite(images).all():
        raise ValueError("pixels hold NaN or infinity")
    spread = float(images.std()) or 1.0
    return ((images - images.mean()) / spread)[:, None], classes.astype(np.int64)

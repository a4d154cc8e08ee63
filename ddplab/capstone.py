"""Fit a training step from three runs, predict all others: the model behind the capstone.

Three runs of the same job, one with a hook that sends nothing, one plain, one with fp16, fix three unknowns: the
computing, the rate of the link, and what fp16's cast costs. With the recorded order of the gradients (`Profile`) and
the stages of each hook, measured on their own (`calibrate_stages`), the timeline then predicts any method, bucket size
and number of ranks that was never run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplab.calibration import Costs
from ddplab.cost import ring_seconds
from ddplab.headline import ThreeRuns, three_runs
from ddplab.hookstages import HookStages
from ddplab.link import TCP_EFFICIENCY, Link
from ddplab.processors import run_ranks
from ddplab.profile import Gradient, Profile
from ddplab.steptimes import BucketTimes, Timeline
from ddplab.timeline import Compression, assign, predict_step
from ddplab.transfers import count, number

if TYPE_CHECKING:
    import pandas as pd
    import torch

SENDS_NOTHING = Compression("noop", 0.0)
_RATES_BPS = (1e4, 1e14)  # the fit looks for a link in here


def noop_hook(state, bucket):  # no annotations: torch wants exactly its own on a hook
    """A communication hook that sends nothing: every rank keeps its own gradients. For timing, never for training."""
    import torch

    future: torch.futures.Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def resnet50_step(batch: int = 2, pixels: int = 64, seed: int = 0) -> tuple[torch.nn.Module, torch.Tensor, Callable]:
    """Inside a rank: torchvision's ResNet-50, random images and a loss of its output; on the rank's GPU if it has one.

    The same parameters on every rank; images differ, as the ranks' random state does.
    """
    import torch
    import torchvision

    device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)
    torch.manual_seed(seed)
    model, loss = torchvision.models.resnet50().to(device), torch.nn.CrossEntropyLoss()
    return model, images, lambda out: loss(out, labels)


def resnet50_job(batch: int = 2, pixels: int = 64) -> Callable[[], tuple[torch.nn.Module, Callable]]:
    """For `measure_timeline`: a ResNet-50 that really computes, with this batch a rank and square images."""

    def make() -> tuple[torch.nn.Module, Callable]:
        model, images, loss = resnet50_step(batch, pixels)
        return model, lambda ddp: loss(ddp(images))

    return make


def link_for(seconds: float, nbytes: int, ranks: int) -> Link:
    """The link on which the ring all-reduce of `nbytes` takes `seconds`, with no latency; TCP's wire efficiency."""
    number(seconds, "seconds", above=True), count(nbytes, "nbytes", error=ValueError)
    count(ranks, "ranks", least=2, error=ValueError)
    rate = ring_seconds(ranks, nbytes, Link(1.0, latency_s=0.0, wire_efficiency=TCP_EFFICIENCY)) / seconds
    return Link(rate, latency_s=0.0, name=f"{rate * 8 / 1e9:.3g} Gbit/s")


def save_profile(path: str | Path, profile: Profile, **about: Any) -> None:
    """Write a profile as JSON, one gradient a line, with this machine, the versions, the date, and `about`."""
    from ddplab.results import provenance

    path, facts = Path(path), {k: v for k, v in asdict(profile).items() if k != "gradients"}
    head = json.dumps({**provenance(), **about}, indent=1, ensure_ascii=False)
    rows = ",\n".join(json.dumps(list(g)) for g in profile.gradients)
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(f'{{"about": {head},\n"profile": {json.dumps(facts)},\n"gradients": [\n{rows}\n]}}\n', "utf8")
    os.replace(part, path)


def load_profile(path: str | Path, compute_s: float | None = None) -> tuple[Profile, dict[str, Any]]:
    """(profile, about) as `save_profile` wrote them; with `compute_s` its times are scaled so that a step takes that.

    FileNotFoundError, or ValueError for another kind of file.
    """
    path = Path(path)
    try:
        found = json.loads(path.read_text("utf8"))
        rows = [Gradient(*row[:5], tuple(row[5]) if row[5] is not None else None) for row in found["gradients"]]
        profile, about = Profile(tuple(rows), **found["profile"]), dict(found["about"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{path} is no recorded profile of ddplab: {type(error).__name__}: {error}") from None
    if compute_s is not None:
        profile = profile.scaled(number(compute_s, "compute_s", above=True) / profile.compute_s)
    return profile, about


def thinned(profile: Profile, factor: int) -> Profile:
    """The same step in small: gradients and times divided by `factor`, so their ratio stays. Parameters become flat."""
    count(factor, "factor", error=ValueError)
    small = profile.scaled(1 / factor)
    gradients = tuple(g._replace(elements=max(1, g.elements // factor), shape=None) for g in small.gradients)
    return replace(small, gradients=gradients, source=f"{small.source}, gradients / {factor}")


@dataclass(frozen=True)
class StepFit:
    """What three runs say of a job, ready to predict others. Made by `fit_step`; times in seconds.

    profile: the recorded step, scaled to the fitted computing.  costs: with the fitted link for every wire dtype.
    cast: fp16 with what its cast and its slower sum cost.  runs: the three times and their arithmetic.
    contention: by how much encoding and decoding slow each other down, see `predict_step`.
    """

    profile: Profile
    costs: Costs
    cast: Compression
    runs: ThreeRuns
    contention: float = 1.0

    @property
    def link(self) -> Link:
        """The fitted link, in payload bytes."""
        return self.costs.links["float32"]

    @property
    def compute_s(self) -> float:
        """The fitted computing: a step without communication, without what DDP copies."""
        return self.profile.compute_s

    def predict(self, method: str | Compression | HookStages = "none", bucket_cap_mb: float | None = 25) -> Timeline:
        """A step that was not run. method: "none", "fp16", "noop", what `calibrate_stages` says of a hook of ours, or
        what `calibrate_hook` says of any."""
        known = {"none": self.costs.compression("none"), "fp16": self.cast, "noop": SENDS_NOTHING}
        if isinstance(method, str) and method not in known:
            kinds = "a ddplab.HookStages or a ddplab.Compression"
            raise ValueError(f"method is {', '.join(known)}, {kinds}, not {method!r}")
        if isinstance(method, HookStages):
            return _staged_step(self.profile, self.costs, bucket_cap_mb, method)
        if isinstance(method, Compression):  # one communication thread, and bytes that fp32's link takes
            how, lanes = replace(method, wire_dtype="float32"), 1
        else:
            how, lanes = known[method], self.costs.lanes
        return _step(self.profile, self.costs, bucket_cap_mb, how, lanes, self.contention)

    def __str__(self) -> str:
        return (
            f"computing {self.compute_s * 1e3:.4g} ms, link {self.link.payload_Bps * 8 / 1e9:.4g} Gbit/s of payload, "
            f"fp16 {self.cast.decode_s_per_byte * 1e9:.3g} ns a byte on top of its transfer"
        )


def fit_step(
    profile: Profile,
    noop_s: float,
    fp32_s: float,
    fp16_s: float,
    costs: Costs,
    bucket_cap_mb: float | None = 25,
    contention: float | None = None,
) -> StepFit:
    """Fit computing, link and cast from three measured steps of torch's DDP: one unknown each, in this order.

    profile: the recorded step, whatever its speed.  noop_s, fp32_s, fp16_s: with `noop_hook`, without a hook, with
    torch's fp16_compress_hook.  costs: of copies and divisions (`calibrate`); its links do not count.
    contention: see `predict_step`; None takes this machine's: 2 where encoding and decoding threads of all ranks
    outnumber its processors twice, 1 on GPUs.
    Raises ValueError where the three contradict each other.
    """
    runs = three_runs(noop_s, fp32_s, fp16_s, sum(g.elements for g in profile.gradients), costs.ranks)

    if contention is None:
        contention = 1.0 if costs.lanes == 1 else min(2.0, max(1.0, 2 * costs.ranks / (os.cpu_count() or 1)))

    def step(profile: Profile, payload_Bps: float, how: Compression) -> float:
        return _step(profile, _on(costs, payload_Bps), bucket_cap_mb, how, costs.lanes, contention).step_s

    factor = _root(lambda x: step(profile.scaled(x), 1e12, SENDS_NOTHING) - noop_s, 1e-9, 1e9)
    scaled = profile.scaled(factor)
    plain = costs.compression("none")
    rate = _root(lambda rate: fp32_s - step(scaled, rate, plain), *_RATES_BPS)
    half = Compression("fp16", 0.5, costs.cast_s_per_byte, 0.0, "float16")
    extra = 0.0
    if step(scaled, rate, half) < fp16_s:
        extra = _root(lambda x: step(scaled, rate, replace(half, decode_s_per_byte=x)) - fp16_s, 1e-15, 1e-6)
    return StepFit(scaled, _on(costs, rate), replace(half, decode_s_per_byte=extra), runs, contention)


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """Each run against plain fp32 with the same ranks, hosts and buckets; runs without such a partner are left out.

    frame: rows with method ("none" is fp32), bucket_cap_mb, ranks, ranks_per_host, predicted_ms, measured_ms, p25_ms,
    p75_ms.  Returns predicted and measured speed-up, and low and high: quarter against opposite quarter.
    """
    key = ["ranks", "ranks_per_host", "bucket_cap_mb"]
    plain = frame[frame.method == "none"].drop_duplicates(key)
    both = frame[frame.method != "none"].merge(plain, on=key, suffixes=("", "_of_fp32"))
    out = both[["method", *key]].copy()
    for kind in ("predicted", "measured"):
        out[kind] = both[f"{kind}_ms_of_fp32"] / both[f"{kind}_ms"]
    out["low"], out["high"] = both.p25_ms_of_fp32 / both.p75_ms, both.p75_ms_of_fp32 / both.p25_ms
    return out


def _step(
    profile: Profile, costs: Costs, cap: float | None, how: Compression, lanes: int, contention: float
) -> Timeline:
    options = {"costs": costs, "lanes": lanes, "contention": contention}
    return predict_step(profile, costs.ranks, "1gbit", cap, how, **options)  # the link is that of the costs


def _staged_step(profile: Profile, costs: Costs, cap: float | None, stages: HookStages) -> Timeline:
    """A step with a hook whose stages are known, on the processors on which they were timed."""
    rate = costs.links["float32"].payload_Bps
    jobs = [stages.job(members, sum(g.nbytes for g in members), rate) for members in assign(profile, cap)]
    lane, done_s = run_ranks(
        [(g, g.ready_s) for g in profile.gradients],
        profile.backward_s,
        jobs,
        costs.copy_s_per_byte / stages.turns,  # timed with all ranks at it
        ranks=stages.ranks,
        processors=stages.processors,
        slice_s=stages.slice_s,
    )
    buckets = tuple(
        BucketTimes(i, job.nbytes, lane.ready[i], lane.start[i], lane.end[i], tuple(g.name for g in job.gradients))
        for i, job in enumerate(jobs)
    )
    about = {"ranks": stages.ranks, "bucket_cap_mb": cap, "compression": stages.name, "profile": str(profile)}
    times = (profile.forward_s, lane.compute_end, done_s, profile.optimizer_s)
    return Timeline(buckets, *times, basis="predicted", about=about)


def _on(costs: Costs, payload_Bps: float) -> Costs:
    link = Link(payload_Bps, latency_s=0.0, wire_efficiency=1.0, name="fitted")
    return replace(costs, links={"float32": link, "float16": link})


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f, which grows, passes 0: bisection on a logarithmic scale. An end of the interval where it does not."""
    for _ in range(48):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return (low * high) ** 0.5

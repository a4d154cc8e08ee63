"""Is this link healthy, and does it cost the step anything? Two rules of the article, and the two that replace them.

The article wants the link above 85% of its peak all the time, and every all-reduce below a third of backward (claims
C55 and C56). The first fails on healthy jobs, which use a link in bursts, and holds for jobs that do nothing but wait
for it. The second looks at one all-reduce while DDP issues many, and at its length while only what sticks out costs
time. The replacements ask two separate questions. Does the link do what it can: bus bandwidth against a reference
measured on the same machines, at the same size. Does the step wait for it: exposed communication as a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplab.dcgm.peaks import link_peak

if TYPE_CHECKING:
    import pandas as pd

    from ddplab.steptimes import Timeline

ARTICLE_UTILISATION, ARTICLE_ALL_REDUCE = 0.85, 1 / 3
_HAIR = 1e-9  # rounding does not decide
SAYS = {
    (True, True): "healthy: the link does what it can, and the step hardly waits for it",
    (True, False): "communication-bound on a healthy link: send fewer bytes (compression, accumulation), overlap more "
    "(bucket size), or buy a faster link; no setting of the link will help",
    (False, True): "the link is below its reference, but the computing hides it: find out why before the job grows",
    (False, False): "the link is below its reference and the step waits for it: repair the link first",
    (True, None): "the link does what it can; whether the step waits for it was not measured",
    (False, None): "the link is below its reference; whether that costs the step anything was not measured",
    (None, True): "the step hardly waits for communication, so the link costs nothing now; its health was not measured",
    (None, False): "the step waits for communication; hold bus bandwidth against a reference: is the link at fault?",
    (None, None): "nothing that decides was measured: a utilisation or the length of one all-reduce says neither "
    "whether the link is healthy nor whether it costs anything",
}


@dataclass(frozen=True)
class LinkVerdict:
    """What the rules say, the article's and ours.

    link_ok: bus bandwidth is near its reference.  step_ok: little of the step is exposed communication; both True,
    False or None where it was not measured.  says: the verdict.  rules: (whose, rule, value, limit, holds).
    """

    link_ok: bool | None
    step_ok: bool | None
    says: str
    rules: tuple[tuple[str, str, float | None, float, bool | None], ...]

    def frame(self) -> pd.DataFrame:
        """The rules side by side: whose, rule, value, limit (fractions), holds (True, False, None: not measured)."""
        import pandas as pd

        frame = pd.DataFrame(self.rules, columns=["whose", "rule", "value", "limit", "holds"])
        return frame.astype({"value": float, "limit": float, "holds": object})

    def __str__(self) -> str:
        return self.says


def link_verdict(
    timeline: Timeline | None = None,
    *,
    busbw_GBps: float | None = None,
    reference_GBps: float | None = None,
    exposed: float | None = None,
    utilisation: float | None = None,
    largest_over_backward: float | None = None,
    busbw_least: float = 0.8,
    exposed_most: float = 0.1,
) -> LinkVerdict:
    """Judge a link and a step by bus bandwidth over a reference and exposed communication; the article's rules beside.

    timeline: a `ddplab.Timeline`, predicted or measured; it gives exposed, largest_over_backward and, where it knows
        its ranks, busbw_GBps (of all buckets, while any is under way).
    busbw_GBps, reference_GBps: of the job, and of a collective benchmark alone on the same machines with messages as
        large as the job's buckets (`ddplab bench`, nccl-tests); not the peak in the data sheet.
    exposed: exposed communication over step, 0 to 1.  utilisation: mean over peak of one direction, 0 to 1 or a little
        more.  largest_over_backward: the longest all-reduce over backward.
    busbw_least, exposed_most: where we draw the lines. They are conventions: 20% below what the same machine reached a
        while ago is worth a look, and a tenth of a step is worth work. Choose your own.
    """
    if timeline is not None:
        if timeline.step_s > 0 and exposed is None:
            exposed = max(0.0, timeline.exposed_s) / timeline.step_s
        if timeline.compute_end_s > 0 and timeline.buckets and largest_over_backward is None:
            largest_over_backward = max(b.end_s - b.start_s for b in timeline.buckets) / timeline.compute_end_s
        ranks = timeline.about.get("ranks")
        if busbw_GBps is None and ranks and timeline.communication_s > 0:
            sent = sum(b.nbytes for b in timeline.buckets) * 2 * (ranks - 1) / ranks
            busbw_GBps = sent / timeline.communication_s / 1e9
    for name, value, most in (
        ("busbw_GBps", busbw_GBps, 1e6),
        ("reference_GBps", reference_GBps, 1e6),
        ("exposed", exposed, 1.0),
        ("utilisation", utilisation, 10.0),
        ("largest_over_backward", largest_over_backward, 1e9),
        ("busbw_least", busbw_least, 10.0),
        ("exposed_most", exposed_most, 1.0),
    ):
        if value is not None and not 0 <= value <= most:
            raise ValueError(f"{name} is a number from 0 to {most:g}, not {value!r}")
    if reference_GBps == 0:
        raise ValueError("reference_GBps is 0: measure it with a benchmark on the same machines")
    ratio = busbw_GBps / reference_GBps if busbw_GBps is not None and reference_GBps else None
    link_ok = None if ratio is None else ratio >= busbw_least - _HAIR
    step_ok = None if exposed is None else exposed <= exposed_most + _HAIR
    high = None if utilisation is None else utilisation >= ARTICLE_UTILISATION
    short = None if largest_over_backward is None else largest_over_backward < ARTICLE_ALL_REDUCE
    rules = (
        ("article", "mean utilisation of the link at least", utilisation, ARTICLE_UTILISATION, high),
        ("article", "longest all-reduce over backward below", largest_over_backward, ARTICLE_ALL_REDUCE, short),
        ("ours", "busbw over reference at least", ratio, busbw_least, link_ok),
        ("ours", "exposed communication over step at most", exposed, exposed_most, step_ok),
    )
    return LinkVerdict(link_ok, step_ok, SAYS[link_ok, step_ok], rules)


def link_utilisation(rates: pd.DataFrame, peak: object = None) -> pd.DataFrame:
    """Mean and most of each device's links over a table of rates, against the peak of ONE direction.

    rates: from `link_rates`, `nvlink_rates` or a `LinkWatch`.  peak: whatever `link_peak` takes, or a list of it: an
        NVLink's for NVLink rows, a PCIe's for PCIe rows, a plain rate for all others; or a mapping (device, link) ->
        peak. None: what drivers state, where the table knows it.
    Columns: device, link, samples, tx_mean_GBps, tx_max_GBps, rx_mean_GBps, rx_max_GBps, peak_GBps, mean_pct, max_pct
    (of the busier direction; NaN without a peak), against (the peak in words). Samples without a value are left out,
    not counted as 0.
    """
    import pandas as pd

    given = rates.attrs.get("peaks", {}) if peak is None else peak
    if not isinstance(given, Mapping):
        given = [link_peak(one) for one in (given if isinstance(given, (list, tuple)) else [given])]
    rows = []
    for (device, link), part in rates.groupby(["device", "link"], sort=False):
        fits = [link_peak(given[device, link])] if isinstance(given, Mapping) and (device, link) in given else []
        if not isinstance(given, Mapping):
            fits = sorted((one for one in given if one.of(link) is not None), key=lambda one: not one.link)
        best = fits[0] if fits else None
        row = {"device": device, "link": link, "samples": int(part[["tx_GBps", "rx_GBps"]].notna().any(axis=1).sum())}
        for way in ("tx", "rx"):
            row |= {f"{way}_mean_GBps": part[f"{way}_GBps"].mean(), f"{way}_max_GBps": part[f"{way}_GBps"].max()}
        row["peak_GBps"] = best.of(link) if best else float("nan")
        for what in ("mean", "max"):
            busier = pd.Series([row[f"tx_{what}_GBps"], row[f"rx_{what}_GBps"]]).max()  # NaN where both are
            row[f"{what}_pct"] = 100 * busier / row["peak_GBps"]
        row["against"] = str(best) if best else None
        rows.append(row)
    return pd.DataFrame(rows)

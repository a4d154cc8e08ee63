"""Peaks in one direction, utilisation against them, and the verdict: closed forms and the article's own numbers."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from conftest import ROOT

import ddplab as dl
from ddplab.link import FIELD_LINKS
from ddplab.steptimes import BucketTimes, Timeline


@pytest.mark.parametrize(
    ("link", "GBps"),
    [("nvlink1", 80), ("nvlink2", 150), ("nvlink3", 300), ("NVLink 4", 450), ("nvlink5", 900), ("nvlink3 x8", 200),
     ("NVIDIA A100-SXM4-80GB", 300), ("NVIDIA H100 80GB HBM3", 450), ("NVIDIA B200", 900),
     ("Tesla V100-SXM2-16GB", 150),
     ("pcie3", 15.75), ("PCIe 4.0 x16", 31.5), ("pcie-gen5", 63.0), ("pcie5 x8", 31.5), ("pcie6", 121),
     ("25gbit", 3.125), ("300GB/s", 300), (12.5, 12.5), (dl.Link.parse("1gbit"), 0.125)],
)  # fmt: skip
def test_a_peak_is_that_of_one_direction(link, GBps):
    peak = dl.link_peak(link)
    assert peak.GBps == pytest.approx(GBps, rel=0.002) and "in one direction" in str(peak)
    assert dl.link_peak(peak) is peak


def test_peaks_agree_with_the_links_that_predictions_use():
    for name, gpu in (("nvlink2", "v100"), ("nvlink3", "a100"), ("nvlink4", "h100"), ("nvlink5", "b200")):
        assert dl.link_peak(name).GBps * 1e9 == FIELD_LINKS[f"nvlink-{gpu}"].rate_Bps


@pytest.mark.parametrize(
    "link", ["nvlink9", "nvlink0", "nvlink4 x0", "pcie9", "pcie4 x3", "", "fast", -1, 0, None, True]
)
def test_other_links_are_refused(link):
    with pytest.raises((ValueError, TypeError)):
        dl.link_peak(link)
    with pytest.raises(ValueError, match="up to 18 links, not 40"):
        dl.link_peak("nvlink4 x40")


def test_utilisation_is_of_the_busier_direction_and_leaves_gaps_out():
    rates = pd.DataFrame(
        {
            "device": ["GPU 0"] * 3 + ["GPU 0", "GPU 0", "eth0"],
            "link": ["NVLink"] * 3 + ["PCIe", "NVLink 3", "NIC"],
            "tx_GBps": [math.nan, 90.0, 180.0, 6.3, 5.0, 1.0],
            "rx_GBps": [math.nan, 100.0, 260.0, math.nan, 2.0, 0.5],
        }
    )
    use = dl.link_utilisation(rates, ["nvlink4", "pcie5"]).set_index("link")
    assert (
        use.samples["NVLink"] == 2 and use.mean_pct["NVLink"] == pytest.approx(40) and use.tx_max_GBps["NVLink"] == 180
    )
    assert use.max_pct["NVLink"] == pytest.approx(100 * 260 / 450)
    assert use.mean_pct["PCIe"] == pytest.approx(10, rel=1e-3) and use.mean_pct["NVLink 3"] == pytest.approx(20)
    assert math.isnan(use.mean_pct["NIC"]) and pd.isna(use.against["NIC"])
    assert dl.link_utilisation(rates, "10gbit").set_index("link").mean_pct["NIC"] == pytest.approx(80)
    by_device = dl.link_utilisation(rates, {("eth0", "NIC"): "8gbit"}).set_index("link")
    assert by_device.mean_pct["NIC"] == pytest.approx(100) and math.isnan(by_device.mean_pct["NVLink"])


def test_the_sample_at_41_percent_of_nvlink_4():
    rates = dl.link_rates(dl.parse_dmon((ROOT / "tests/data/dcgm/dmon_4.6.txt").read_text()))
    use = dl.link_utilisation(rates, "nvlink4").query("link == 'NVLink'")
    assert list(use.mean_pct.round(2)) == [41.38, 41.38]
    assert list(dl.link_utilisation(rates, "900GB/s").query("link == 'NVLink'").mean_pct.round(2)) == [20.69, 20.69]


@pytest.mark.parametrize(
    ("busbw", "exposed", "link_ok", "step_ok", "says"),
    [
        (230, 0.02, True, True, "healthy"),
        (230, 0.4, True, False, "communication-bound on a healthy link"),
        (120, 0.02, False, True, "below its reference, but the computing hides it"),
        (120, 0.4, False, False, "repair the link first"),
        (None, 0.4, None, False, "hold bus bandwidth against a reference"),
        (230, None, True, None, "was not measured"),
        (None, None, None, None, "nothing that decides was measured"),
    ],
)
def test_two_questions_four_answers(busbw, exposed, link_ok, step_ok, says):
    verdict = dl.link_verdict(busbw_GBps=busbw, reference_GBps=235, exposed=exposed, utilisation=0.006)
    assert (verdict.link_ok, verdict.step_ok) == (link_ok, step_ok) and says in verdict.says == str(verdict)
    table = verdict.frame()
    assert list(table.whose) == ["article", "article", "ours", "ours"]
    assert list(table.holds) == [False, None, link_ok, step_ok]


def bucket(i: int, start: float, end: float, nbytes: int = 10**6) -> BucketTimes:
    return BucketTimes(i, nbytes, start, start, end)


def test_the_third_rule_is_wrong_in_both_directions():
    # Ten all-reduces of 30% of backward each: communication takes three times backward, and the rule is content.
    many = Timeline(tuple(bucket(i, 0.3 * i, 0.3 * (i + 1)) for i in range(10)), 0, 1.0, 3.0, 0, "predicted")
    verdict = dl.link_verdict(many)
    holds = verdict.frame().set_index("rule").holds
    assert holds["longest all-reduce over backward below"] is True and verdict.step_ok is False
    # One of 40%, hidden completely: the rule fails it, and the step waits for nothing.
    one = Timeline((bucket(0, 0.5, 0.9),), 0, 1.0, 1.0, 0, "predicted")
    verdict = dl.link_verdict(one)
    assert verdict.frame().holds[1] is False and verdict.step_ok is True
    assert verdict.frame().value[3] == 0 and verdict.frame().value[1] == pytest.approx(0.4)


def test_a_timeline_that_knows_its_ranks_gives_bus_bandwidth():
    two = Timeline(
        (bucket(0, 0.0, 0.01, 10**8), bucket(1, 0.005, 0.02, 10**8)), 0, 0.02, 0.025, 0, "paced", about={"ranks": 4}
    )
    verdict = dl.link_verdict(two, reference_GBps=15.0)
    assert verdict.frame().value[2] == pytest.approx(2e8 * 1.5 / 0.02 / 1e9 / 15.0) and verdict.link_ok
    assert verdict.frame().value[3] == pytest.approx(0.2)


@pytest.mark.parametrize(
    "wrong", [{"exposed": 1.2}, {"exposed": -0.1}, {"busbw_GBps": math.nan}, {"reference_GBps": 0}, {"utilisation": 85}]
)
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dl.link_verdict(**wrong)
